"""What a run is: the typed run file. Every name here is the name in YAML, in Python and on the command line."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, JsonValue, model_validator

from shoal.errors import SpecError
from shoal.spec.base import Auto, CountOrAuto, LocalPath, Positive, Says, Strict, TaskNames
from shoal.spec.batch import Batch
from shoal.spec.duration import Duration
from shoal.spec.engine import Engine
from shoal.spec.launch import Launch
from shoal.spec.length import WAYS, Tokens
from shoal.spec.model import Model
from shoal.spec.optimizer import Optimizer as Optimizer
from shoal.spec.own import Own
from shoal.spec.schedule import Schedule as Schedule
from shoal.spec.script import Script
from shoal.spec.swarm import Swarm


class Source(Strict):
    """One prepared data set of a mixture."""

    path: LocalPath = Field(description="Folder of token shards made by `shoal data prepare`, or s3://bucket/prefix.")
    weight: float = Field(
        1.0,
        gt=0,
        description="Share of the samples drawn from it, relative to the other sources; of `data.eval`, its share of "
        "the mean.",
    )


def _as_sources(value: object) -> object:
    """`train: folder` and `train: [a, b]` are short for a list of sources."""
    if isinstance(value, str | dict):
        value = [value]
    if isinstance(value, list | tuple):
        return [{"path": item} if isinstance(item, str) else item for item in value]
    return value


Sources = Annotated[
    tuple[Source, ...],
    BeforeValidator(_as_sources, json_schema_input_type=str | Source | list[str | Source]),
    Says("a folder, a list of folders, or a list of {path, weight}"),
]


def _as_switch(value: object) -> object:
    """`mlflow: off` means no tracking, not a server called off."""
    return {"off": False, "no": False, "on": True, "yes": True}.get(value, value) if isinstance(value, str) else value


Switch = Annotated[bool | str, BeforeValidator(_as_switch), Says("`true`, `false`, or the address of a server")]
NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$"
RunName = Annotated[
    str,
    Field(pattern=NAME_PATTERN),
    Says("1 to 100 letters, digits, `.`, `_` or `-`, the first of them a letter or a digit"),
]


Interval = Annotated[
    Annotated[int, Field(ge=0)] | Auto | Duration,
    Says("`auto`, a number of steps (0: at the end only), or a time such as `30 s`, `10 min` or `1.5 h`"),
]


def _without_slash(address: str) -> str:
    return address.rstrip("/")


# A user or a password has no place here (it would be copied with the run file): the keys are in the AWS_* variables.
Remote = Annotated[
    str,
    Field(pattern=r"^(s3://[A-Za-z0-9._-]+(/[^?#@]*)?|file:///[^/].*)$"),
    AfterValidator(_without_slash),
    Says("an address such as `s3://bucket/prefix` or `file:///folder`"),
]


Packing = Literal["pairs", "best-fit", "chop"]


class Data(Strict):
    """What the model reads, and how windows are cut."""

    train: Sources = Field(
        (), description="Prepared token shards; several are mixed by their weights. Empty with `own.data` alone."
    )
    eval: Sources = Field(
        (), description="Held-out shards for evaluation: a loss of each set, and their mean by weight; empty: none."
    )
    seq_len: Positive = Field(512, description="Tokens in a window.")
    skip: tuple[Annotated[int, Field(ge=0)], ...] = Field(
        (), description="Batches of the order that are left out, counted from 0; `guard` may add to them."
    )
    mask_documents: bool = Field(True, description="Tokens see only their own document; positions restart with it.")
    packing: Packing = Field(
        "pairs",
        description="How documents become windows. `chop`: end to end, cut wherever a window ends. `best-fit`: none is "
        "cut that fits a window, and what is left is padding. `pairs`: prompts and answers by best fit, text chopped.",
    )
    cache_dir: LocalPath | None = Field(
        None,
        description="Where remote shards are cached; empty means .shoal/cache in the workspace, or, where several "
        "machines share that, a disk of this one ($SLURM_TMPDIR, $TMPDIR, /var/tmp).",
    )
    cache_gb: float = Field(20.0, gt=0, description="Size limit of that cache; the shards unused for longest go first.")


class Train(Strict):
    """The loop."""

    # An editor marks a run without an end, as `rules` refuses it.
    model_config = ConfigDict(json_schema_extra={"anyOf": [{"required": [way[-1]]} for way in WAYS]})

    steps: CountOrAuto = Field(
        "auto", description="Optimizer steps of the whole run; `auto`: they follow from epochs or tokens."
    )
    epochs: float | None = Field(
        None,
        gt=0,
        description="Instead of steps: passes over `data.train`, that is, so many times its windows.",
    )
    tokens: Tokens | None = Field(None, description="Instead of steps: tokens to read, in whole steps.")
    batch: Positive = Field(32, description="Windows in one optimizer step, over all processes.")
    clip: float | None = Field(1.0, gt=0, description="Largest gradient norm; empty means no clipping.")
    z_loss: float = Field(
        0.0,
        ge=0,
        description="So much of each target's squared logsumexp of the logits in the gradient; 1e-4 keeps logits from "
        "growing together. The loss that is reported stays the cross-entropy. 0: none.",
    )
    precision: Literal["auto", "fp32", "bf16", "fp8"] = Field(
        "auto",
        description="Compute type; weights and optimizer stay float32. `auto`: bf16 on a GPU, fp32 on a CPU. `fp8`: "
        "bf16 with the blocks' matrix products in 8 bits (L40S, RTX 4090, H100 and newer; on a CPU emulated, slowly).",
    )
    fp8_head: bool = Field(
        True, description="With `fp8`, the output layer in 8 bits too, if the vocabulary is a multiple of 16."
    )
    fp8_scaling: Literal["tensor", "row"] = Field(
        "tensor",
        description="With `fp8`, one scale for a tensor, or one for each row and column of it in the blocks: `row` is "
        "safer where a few numbers are far larger than the rest, and slower.",
    )
    compile: bool | Literal["auto"] = Field(
        "auto", description="Compile each block with torch.compile; `auto`: on a GPU, for models without experts."
    )
    kernels: Literal["auto", "plain", "triton", "exact"] = Field(
        "auto",
        description="`plain` keeps to torch's own kernels; `triton` uses Shoal's too; `auto`: those on a GPU. `exact`: "
        "a token's numbers are the same bits whatever is computed beside it, so that an exact engine generates with "
        "the trainer's own log-probabilities; slower (processors, float32).",
    )
    optimizer: Optimizer = Field(default_factory=Optimizer, description="The optimizer.")
    schedule: Schedule = Field(default_factory=Schedule, description="The learning-rate schedule.")


class Eval(Strict):
    """Evaluation on `data.eval`, on tasks, and what the model writes by then."""

    every: int = Field(0, ge=0, description="Steps between evaluations; 0 means at the end only.")
    windows: Positive | None = Field(
        None, description="Windows to evaluate on, by the weights of the sets; empty means all of them."
    )
    precision: Literal["auto", "fp32", "bf16", "fp8"] = Field(
        "auto", description="Compute type; `auto`: as training, and bf16 where that is fp8 (the output layer's too)."
    )
    tasks: TaskNames = Field(
        (),
        description="What is asked of the model at each evaluation: task files as of `shoal eval`, and made tasks by "
        "name (`shoal data tasks` lists them). Each process holds the whole model meanwhile.",
    )
    limit: Positive | None = Field(
        None, description="Questions of each task, the first so many; empty means all (of a made task 200)."
    )
    samples: tuple[str, ...] = Field(
        (), description="Beginnings that the model goes on from at each evaluation; its texts are kept in the run."
    )
    sample_tokens: Positive = Field(64, description="Tokens of each such text; the likeliest one each time.")


class Mesh(Strict):
    """How the model is laid over the processes: pp x dp_replicate x dp_shard x cp x tp of them."""

    pp: CountOrAuto = Field("auto", description="Pipeline: processes that each hold a stretch of the layers.")
    dp_replicate: CountOrAuto = Field("auto", description="Copies of the model; above 1 with dp_shard 1 this is DDP.")
    dp_shard: CountOrAuto = Field("auto", description="Processes that share one copy (FSDP2); both above 1 is HSDP.")
    cp: CountOrAuto = Field("auto", description="Processes that share each sequence (context parallelism).")
    tp: CountOrAuto = Field("auto", description="Processes that share each layer (tensor and sequence parallelism).")
    ep: CountOrAuto = Field(
        "auto", description="Processes that share the experts of a layer; adds none, divides dp_shard x cp x tp."
    )
    micro_batch: CountOrAuto = Field("auto", description="Windows a process computes at once; the rest is accumulated.")
    schedule: Literal["auto", "gpipe", "1f1b", "interleaved", "zbv"] = Field(
        "auto", description="Order of micro-batches in the pipeline; interleaved and zbv put two stages on a process."
    )
    cp_method: Literal["auto", "ring", "all_to_all"] = Field(
        "auto", description="Attention over a shared sequence; `auto`: all_to_all where the heads divide, else ring."
    )
    recompute: Literal["auto", "none", "selective", "attention", "full"] = Field(
        "auto", description="Activations computed again in the backward pass; `auto`: as little as the memory allows."
    )
    reduce: Literal["auto", "step", "micro_batch"] = Field(
        "auto",
        description="When FSDP sums gradients up: once a `step`, holding all of them until then, or with each "
        "`micro_batch`, sending more; `auto`: once, where the memory allows.",
    )


class Resources(Strict):
    """What the run may use of this machine."""

    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="`auto`: the GPUs when there are any; `cuda`: GPUs, also of AMD."
    )
    processes: CountOrAuto = Field(
        "auto", description="Worker processes (of each island); `auto`: one a GPU, or one a core on a CPU."
    )
    threads: CountOrAuto = Field("auto", description="CPU threads a process computes with; `auto`: cores / processes.")
    bind: bool = Field(
        True,
        description="Each process keeps to its share of the cores: those near its GPU, or of a machine with several "
        "NUMA nodes an even part.",
    )


class Checkpoint(Strict):
    """When the state is saved, where, and what is kept."""

    every: Interval = Field(
        "auto", description="Between two saves; `auto`: from what a save costs and how often something fails."
    )
    memory: CountOrAuto | Literal["off"] = Field(
        "auto", description="Steps between snapshots kept in the RAM of this node and the next; `auto`: with each save."
    )
    keep: Positive = Field(3, description="The newest this many are kept; the newest good one always is.")
    keep_every: int = Field(0, ge=0, description="Steps divisible by this are kept for good; 0 means none.")
    keep_best: int = Field(0, ge=0, description="This many with the lowest eval loss are kept; 0 means none.")
    remote: Remote | None = Field(None, description="Where each is copied to, under the name of the run.")
    local: bool = Field(
        True,
        description="Saved on the disk of the run directory; `false`: in `remote` only, where nodes share no disk.",
    )
    read_back: Literal["auto", "full", "headers"] = Field(
        "auto", description="Read again before a save counts: all bytes, or sizes and headers; `auto`: all on a disk."
    )
    background: bool = Field(True, description="Training goes on while a save is written; `false`: it waits.")


class Track(Strict):
    """Where the metrics are mirrored to. The journal in the run directory is always written."""

    experiment: str = Field("shoal", description="Experiment (MLflow) or project (W&B) the run belongs to.")
    group: RunName | None = Field(
        None, description="Runs that belong together: parent run (MLflow), group and tag (W&B); a sweep sets its name."
    )
    mlflow: Switch = Field(True, description="`true`: SQLite in the workspace; an address: that server; `false`: off.")
    wandb: Literal["off", "online", "offline"] = Field("off", description="Weights & Biases.")
    tensorboard: bool = Field(False, description="Event files under the run directory.")


# Time without progress that is a hang: a rule, no watch at all, or a time.
Patience = Annotated[Auto | Literal["off"] | Duration, Says("`auto`, `off`, or a time such as `30 s` or `10 min`")]


# Time at work without progress that is a hang.
Bound = Annotated[Literal["off"] | Duration, Says("`off`, or a time such as `30 min` or `2 h`")]


class Guard(Strict):
    """What happens when a worker dies, or stands still."""

    restarts: int = Field(3, ge=0, description="Restarts in a row without progress before giving up.")
    backoff_s: float = Field(1.0, ge=0, description="Wait before the first restart; doubles with each one in a row.")
    grace_s: float = Field(60.0, gt=0, description="Time the workers have to save and leave when told to stop.")
    hang: Patience = Field(
        "auto",
        description="A worker without work and progress for so long, and for 2.5 steps, hangs; `auto`: 7 s, on several "
        "nodes 45 s. "
        "Half an hour until a step was measured, and while it starts, compiles, saves or waits for a disk.",
    )
    livelock: Bound = Field(
        "off",
        description="A worker that computes without progress is reported as slow; after so long it hangs. "
        "`off`: it is never ended for it.",
    )
    on_hang: Literal["restart", "wait"] = Field(
        "restart", description="`restart`: as if it had died; `wait`: it is told, and nothing is done."
    )
    on_straggler: Literal["wait", "evict"] = Field(
        "wait",
        description="An island that is slower than the others is told; `evict`: it leaves, and comes back later.",
    )
    numerics: Literal["skip", "stop"] = Field(
        "skip", description="A loss or gradient that is not finite: the batch is skipped, or the run stops."
    )
    skips: int = Field(
        3, ge=0, description="Batches in a row skipped for it before the run stops; three times as many in 1,000 steps."
    )
    spikes: Literal["off", "warn", "rewind"] = Field(
        "warn", description="A loss spike: a warning, or back to a checkpoint from before it and around its batches."
    )
    rewinds: int = Field(3, ge=0, description="Rewinds in 1,000 steps before the run stops.")
    replay: int = Field(
        0, ge=0, description="Steps between checks that two ranks compute the same, for silent corruption; 0: none."
    )


class Fleet(Strict):
    """Islands: copies of the run that train together and may die, hang or join while the others go on."""

    islands: Positive = Field(1, description="How many; each has resources.processes processes and the whole mesh.")
    shards: CountOrAuto = Field(
        "auto", description="Parts of a batch that go from island to island; `auto`: up to four for each island."
    )
    deterministic: bool = Field(
        False, description="Bitwise the same weights whichever islands came and went; costs some speed."
    )


# Of the catalogue: only `shoal plan` knows which there are.
Named = Annotated[str, Field(min_length=1)]
Rates = Annotated[
    Annotated[float, Field(gt=0)] | Named,
    Says("the name of a rate, such as `llama3`, or failures of hardware in 1,000 device-days"),
]


class Plan(Strict):
    """What `shoal plan` reckons with where its options say nothing else. Training does not read it."""

    on: Named | None = Field(None, description="Accelerator of the catalogue, such as h100; empty means this machine.")
    devices: Positive | None = Field(
        None, description="How many; empty means resources.processes of each island, else a node of each."
    )
    fabric: Named | None = Field(None, description="What joins the nodes, such as ib; empty means what usually does.")
    price: float | None = Field(None, gt=0, description="Dollars for one device and hour; empty: the catalogue's.")
    rates: Rates | None = Field(None, description="How often devices fail; empty means as fleets do, which differ.")
    style: Literal["manual", "remote", "supervised", "spares", "islands"] | None = Field(
        None, description="How the run comes back; empty means islands where there are several, else supervised."
    )


_DATA: list[JsonValue] = [
    {"properties": {"data": {"required": ["train"]}}},
    {"required": ["own"], "properties": {"own": {"required": ["data"]}}},
]
_SCRIPT: JsonValue = {"required": ["script"], "properties": {"script": {"type": "object"}}}
_BATCH: JsonValue = {"required": ["batch"], "properties": {"batch": {"type": "object"}}}


def _as_rules_have_it(schema: dict[str, Any]) -> None:
    """An editor marks a run without data, as `rules` refuses it; a script or a batch brings its own."""
    schema["required"] = ["name"]
    schema["allOf"] = [{"anyOf": [_SCRIPT, _BATCH, {"required": ["data", "train"], "anyOf": _DATA}]}]


class Run(Strict):
    """One training run, whole."""

    model_config = ConfigDict(json_schema_extra=_as_rules_have_it)

    name: RunName = Field(description="Name of the run and of its directory.")
    seed: int = Field(0, ge=0, lt=2**63, description="Seeds the weights and the order of the data.")
    model: Model = Field(default_factory=Model, description="The model.")
    data: Data = Field(description="The data.")
    train: Train = Field(description="The loop.")
    eval: Eval = Field(default_factory=Eval, description="Evaluation.")
    mesh: Mesh = Field(default_factory=Mesh, description="The layout over processes.")
    engine: Engine = Field(default_factory=Engine, description="The engine.")
    resources: Resources = Field(default_factory=Resources, description="The machine.")
    fleet: Fleet = Field(default_factory=Fleet, description="Islands.")
    checkpoint: Checkpoint = Field(default_factory=Checkpoint, description="Checkpoints.")
    track: Track = Field(default_factory=Track, description="Tracking.")
    guard: Guard = Field(default_factory=Guard, description="Failures.")
    plan: Plan = Field(default_factory=Plan, description="Planning.")
    launch: Launch = Field(default_factory=Launch, description="Launching.")
    swarm: Swarm = Field(default_factory=Swarm, description="Peers across the internet.")
    own: Own = Field(default_factory=Own, description="Your own code.")
    script: Script | None = Field(None, description="A script of yours in the place of all training.")
    batch: Batch | None = Field(None, description="One command over many units, in the place of all training.")

    @model_validator(mode="before")
    @classmethod
    def _a_script_needs_no_data(cls, values: Any) -> Any:
        """Nor does a batch, nor either a loop: what such a run has of both is empty."""
        if isinstance(values, dict) and (values.get("script") is not None or values.get("batch") is not None):
            return {"data": {}, "train": {}, **values}
        return values

    @property
    def foreign_work(self) -> str | None:
        """What is in the place of Shoal's own training, in words; None where nothing is."""
        if self.batch is not None:
            return f"a batch ({' '.join(self.batch.command)[:80]})"
        return None if self.script is None else f"a script ({self.script.path})"

    @property
    def steps(self) -> int:
        """`train.steps`, of a run whose length is closed (`decide/length.py`)."""
        if self.train.steps == "auto":
            raise SpecError("train.steps is not known yet: it follows from train.epochs or train.tokens; set it.")
        return self.train.steps

    @property
    def foreign(self) -> str | None:
        """The model that is not Shoal's, by the key that names it: of its shape nothing is known but its vocabulary."""
        if self.own.model is not None:
            return f"own.model {self.own.model}"
        return f"model.hf {self.model.hf}" if self.model.hf is not None else None

    @property
    def unplanned(self) -> str | None:
        """What of this run the planner knows neither memory nor speed of, as a sentence begins."""
        if self.foreign is not None:
            return f"what {self.foreign} computes and holds is not known"
        if self.engine.name == "deepspeed":
            return f"what engine.name deepspeed holds and sends with zero {self.engine.zero} is not known"
        return None

    @property
    def shard(self) -> int:
        """Windows that an island computes at once: the whole batch, where there is only one."""
        return self.train.batch if self.fleet.islands == 1 else self.train.batch // int(self.fleet.shards)

    @property
    def remote_checkpoints(self) -> str | None:
        """Where the copies of this run's checkpoints are."""
        remote = self.checkpoint.remote
        return None if remote is None else f"{remote.rstrip('/')}/{self.name}"
