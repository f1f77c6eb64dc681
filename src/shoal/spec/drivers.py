"""Which names of the run file each driver obeys. A name has its effect or is refused with a reason; none is ignored.

A driver is what takes the steps: the plain loop, islands, a peer of a swarm, a peer of a swarm whose model is cut, a
stage whose peers a file names, somebody's script, a batch of units.
The table says what each does not do, and what to do instead; everything else it must read (`tests/spec/test_drivers.py`
looks for the place in its modules). Two sections are of other verbs and are no driver's business: `plan` is read by
`shoal plan`, `launch` by `shoal launch`; `swarm` belongs to `shoal swarm` in the same way, so that a run file can be
tried alone before others join.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from shoal.spec.layers import leaves
from shoal.spec.names import Path, dotted, lookup, names
from shoal.spec.run import Run

Driver = Literal["loop", "islands", "swarm", "cut", "stages", "script", "batch"]
CALLED: dict[Driver, str] = {
    "loop": "`shoal train` without islands",
    "islands": "training on islands",
    "swarm": "a peer of a swarm",
    "cut": "a swarm whose model is cut over peers",
    "stages": "a model cut over peers",
    "script": "a run that is a script",
    "batch": "a batch",
}
# Sections and names that another verb reads, and that verb.
_ALONE = {"plan": "shoal plan", "launch": "shoal launch"}
OTHERS: dict[Driver, dict[str, str]] = {
    "loop": {**_ALONE, "swarm": "shoal swarm", "own.launcher": "shoal launch"},
    "islands": {**_ALONE, "swarm": "shoal swarm", "own.launcher": "shoal launch"},
    "swarm": _ALONE,
    "cut": _ALONE,
    "stages": _ALONE,
    "script": {"launch": "shoal launch"},
    "batch": {"launch": "shoal launch"},
}
FOREIGN: tuple[Driver, ...] = ("script", "batch")  # which take no steps of Shoal's


@dataclass(frozen=True)
class No:
    """Not obeyed: why, or what to do instead. `fits`: values besides the default that ask for what happens anyway."""

    why: str
    fits: tuple[Any, ...] = ()


OBEYED = None  # in a section that is not
Table = dict[str, No | None]
_RESTART = "a peer's node starts its trainer again, by guard.restarts; leave it out"
_SNAPSHOTS = "a peer saves between two steps, on its own disk alone; leave it out"
_BETWEEN = "a peer saves its layers between two steps, on its own disk alone; leave it out"
_CUT = "peers are not islands: set fleet.islands to 1, and name the peers of each stage in the file of --peers"
_ROUNDS = "stages exchange every step, not in rounds; leave it out"

_CODE = No("a charter brings no code to other people's machines; leave it out, or train with `shoal train`")
_ANY = No("peers train the families that Shoal has; take model.weights, or train it with `shoal train`")
_SCRIPT = No("a script takes its own steps, and this trains with Shoal's; leave it out, or use `shoal run`")
_UNITS = No("it is about a batch, and this trains; leave it out, or use `shoal batch`")
_COMMAND = No("a batch runs your command and trains nothing itself; leave it out, and give it in batch.command")
_ITS_OWN = No("the script decides that itself; leave it out, and give it as one of script.args")
_ONE_NODE = No(
    "a script runs on one node; set it to 1, and its processes by launch.gpus or script.processes", (1, None)
)
_ENGINE = No("DeepSpeed shards the model of a run that trains alone; leave it out, or use `shoal train`")
_ASKED = No("peers measure the loss on held-out data alone; leave it out, and ask a checkpoint with `shoal eval`")
_ASKED_NAMES = ("eval.tasks", "eval.limit", "eval.samples", "eval.sample_tokens")
_LENGTH = No("all peers have agreed on the length of the run, and none changes it; leave it out")

# A name or a section; the longest that fits counts.
REFUSED: dict[Driver, Table] = {
    "loop": {
        "script": _SCRIPT,
        "batch": _UNITS,
        "fleet.shards": No("it is about islands, and fleet.islands is 1; leave it out, or set fleet.islands"),
        "fleet.deterministic": No("one island alone is deterministic anyway; leave it out"),
        "guard.on_straggler": No("it is about islands, and fleet.islands is 1; leave it out, or set fleet.islands"),
    },
    "islands": {
        "script": _SCRIPT,
        "batch": _UNITS,
        "checkpoint.memory": No(
            "islands hold each other's state instead; leave it out, or set fleet.islands to 1", ("off",)
        ),
        "guard.replay": No("it does not work with islands yet; leave it out, or set fleet.islands to 1"),
        "engine": No("islands send each other what FSDP2 has sharded; leave it out, or set fleet.islands to 1"),
    },
    "swarm": {
        "own": _CODE,
        "model.hf": _ANY,
        "model.hf_config": _ANY,
        "script": _CODE,
        "batch": _UNITS,
        "engine": _ENGINE,
        **dict.fromkeys(_ASKED_NAMES, _ASKED),
        "data.skip": No("peers use samples in ranges that they agree on, not in numbered batches; leave it out"),
        "train.schedule.prolong": _LENGTH,
        "train.schedule.past": _LENGTH,
        "fleet": No("a peer of a swarm is one island: set fleet.islands to 1 (swarm.peers says how many train)"),
        "checkpoint": No(_SNAPSHOTS),
        "checkpoint.every": OBEYED,
        "checkpoint.keep": OBEYED,
        "checkpoint.keep_every": OBEYED,
        "checkpoint.memory": No(_SNAPSHOTS, ("off",)),
        "checkpoint.keep_best": No("snapshots are not measured one by one; set checkpoint.keep or keep_every"),
        "checkpoint.remote": No("a peer copies nothing to a store; its snapshots are in runs/NAME/checkpoints"),
        "guard": No(_RESTART),
        "guard.restarts": OBEYED,
        "guard.numerics": No("a peer always skips such a step, and ends after 100 in a row; leave it out"),
        "guard.skips": No("a peer ends after 100 such steps in a row; leave it out"),
        "guard.spikes": No("bad parts are judged by swarm.robust; leave it out", ("off",)),
        "guard.rewinds": No("a swarm never goes back; leave it out"),
        "guard.replay": No("peers compare the digests of their weights after every round; leave it out"),
        "swarm.stages": No(
            "swarm.stages.count is 1, so every peer holds the whole model; leave it out, or set the count"
        ),
    },
    "stages": {
        "own": _CODE,
        "model.hf": _ANY,
        "model.hf_config": _ANY,
        "script": _CODE,
        "batch": _UNITS,
        "engine": _ENGINE,
        **dict.fromkeys(_ASKED_NAMES, _ASKED),
        "model.weights": No("stages begin with new weights; train such a model with `shoal train` or `shoal swarm`"),
        "model.preset": OBEYED,
        "model.experts": No("experts are not balanced over peers; take a model without them"),
        "model.mamba": No("stages have not been tried with state-space layers; take a model without them"),
        "model.mla": No("stages have not been tried with latent attention; take a model without it"),
        "train.schedule.prolong": _LENGTH,
        "train.schedule.past": _LENGTH,
        "train.fp8_head": No("stages compute in fp32 or bf16; leave it out"),
        "train.fp8_scaling": No("stages compute in fp32 or bf16; leave it out"),
        "train.compile": No("stages are not compiled; leave it out", (False,)),
        "train.kernels": No("stages use whatever kernels fit; leave it out"),
        "mesh": No("a stage is one process: its peers are named in the file of --peers; leave it out", (1,)),
        "mesh.micro_batch": OBEYED,
        "mesh.schedule": No("micro-batches go to whoever is fast; leave it out"),
        "mesh.cp_method": No("a stage is one process; leave it out"),
        "mesh.reduce": No("a stage is one process; leave it out"),
        "mesh.recompute": No("stages compute nothing twice; leave it out", ("none",)),
        "resources.processes": No("a stage is one process; leave it out", (1,)),
        "fleet": No(_CUT),
        "checkpoint": No(_BETWEEN),
        "checkpoint.every": OBEYED,
        "checkpoint.keep": OBEYED,
        "checkpoint.keep_every": OBEYED,
        "checkpoint.keep_best": OBEYED,
        "checkpoint.read_back": OBEYED,
        "checkpoint.memory": No(_BETWEEN, ("off",)),
        "guard": No("nobody watches a stage: whoever started it starts it again, and it goes on; leave it out"),
        "guard.numerics": No("a loss or gradient that is not finite ends the run anyway; leave it out"),
        "guard.skips": No("a loss or gradient that is not finite ends the run anyway; leave it out"),
        "guard.spikes": No("peers do not agree on batches to leave out; watch the loss, and use data.skip", ("off",)),
        "guard.rewinds": No("peers go back only when a stage is lost; leave it out"),
        "guard.replay": No("siblings compare the digests of their weights at every step; leave it out"),
        "track": No("stages keep a journal in their --folder and mirror it nowhere; leave it out", (False,)),
        "swarm": No(_ROUNDS),
        "swarm.peers": No("the file of --peers says who trains; leave it out"),
        "swarm.stages": OBEYED,
        "swarm.silent": OBEYED,
        "swarm.chunk": OBEYED,
        "swarm.keep": OBEYED,
    },
    "script": {
        "batch": No("a run is a script or a batch; leave one of them out"),
        **dict.fromkeys(("seed", "model", "data", "train", "eval", "mesh"), _ITS_OWN),
        "engine": _ITS_OWN,
        "own": No("Shoal's loop calls own code, and a script takes its own steps; leave it out"),
        "resources": No("the script chooses its devices; leave it out, or set CUDA_VISIBLE_DEVICES in script.env"),
        "resources.processes": No("it is script.processes of a script; set that"),
        "resources.threads": OBEYED,
        "fleet": No("islands take Shoal's own steps; leave it out"),
        "checkpoint": No("the script saves by itself; leave it out (script.checkpoints says where)"),
        "guard.on_straggler": No("it is about islands; leave it out"),
        "guard.numerics": No("Shoal sees the losses of a script and changes none of its steps; leave it out"),
        "guard.skips": No("Shoal sees the losses of a script and changes none of its steps; leave it out"),
        "guard.spikes": No("Shoal sees the losses of a script and changes none of its steps; leave it out", ("off",)),
        "guard.rewinds": No("Shoal sees the losses of a script and changes none of its steps; leave it out"),
        "guard.replay": No("Shoal does not take the steps of a script, so it cannot repeat one; leave it out"),
        "plan": No("nobody can predict a script; leave it out"),
        "launch.nodes": _ONE_NODE,
        "launch.min_nodes": _ONE_NODE,
        "swarm": No("a script is no peer of a swarm; leave it out"),
    },
    "batch": {
        **dict.fromkeys(("seed", "model", "data", "train", "eval", "mesh", "engine"), _COMMAND),
        "script": No("a run is a script or a batch; leave one of them out"),
        "own": No("Shoal's loop calls own code, and a batch runs commands; leave it out"),
        "resources": No("it is batch.at_once of a batch; set that, or CUDA_VISIBLE_DEVICES in batch.env"),
        "resources.threads": OBEYED,
        "fleet": No("islands take Shoal's own steps; leave it out"),
        "checkpoint": No("a unit that is done stays done, and there is nothing else to save; leave it out"),
        "guard": No("units are watched by batch.timeout and batch.retries; leave it out"),
        "guard.restarts": No("it is batch.retries of a batch; set that"),
        "guard.hang": No("a unit may be silent; set batch.timeout"),
        "guard.backoff_s": OBEYED,
        "guard.grace_s": OBEYED,
        "track": No("a batch has no losses to track; leave it out", (False,)),
        "plan": No("nobody can predict a batch; leave it out"),
        "launch.min_nodes": No("a batch goes on with whatever nodes there are; leave it out", (1, None)),
        "launch.processes": No("it is batch.at_once of a batch; set that", ("auto",)),
        "launch.kubernetes.metrics": No("a batch has no losses to show; leave it out", (False,)),
        "swarm": No("a batch is no peer of a swarm; leave it out"),
    },
}
REFUSED["cut"] = REFUSED["stages"] | {
    "mesh": No("a stage is one process; leave it out", (1,)),
    "fleet": No("peers are not islands: set fleet.islands to 1 (swarm.peers says how many train)"),
    "guard": No("nobody watches a stage: `shoal swarm join RUN` starts it again, and it goes on; leave it out"),
    "track": No("a stage keeps a journal in runs/NAME and mirrors it nowhere; leave it out", (False,)),
    "swarm.peers": OBEYED,
}


def driver_of(run: Run) -> Driver:
    """Who trains it where no other verb was asked for."""
    if run.script is not None:
        return "script"
    if run.batch is not None:
        return "batch"
    return "islands" if run.fleet.islands > 1 else "loop"


def swarm_driver_of(run: Run) -> Driver:
    """Who trains it with `shoal swarm`."""
    return "cut" if run.swarm.stages.count > 1 else "swarm"


def rule(name: str, driver: Driver) -> No | None:
    """Why a driver refuses a name; None: it obeys it, or another verb does (`other_verb`)."""
    table, part = REFUSED[driver], name
    while part:
        if part in table:
            return table[part]
        part = part.rpartition(".")[0]
    return None


def other_verb(name: str, driver: Driver) -> str | None:
    """The verb that reads a name which is none of this driver's business."""
    if rule(name, driver) is not None:
        return None
    return OTHERS[driver].get(name) or OTHERS[driver].get(name.partition(".")[0])


@cache
def obeyed(driver: Driver) -> tuple[str, ...]:
    """All names that have their effect in it."""
    whole = (n.dotted for n in names() if n.section is None)
    return tuple(n for n in whole if rule(n, driver) is None and other_verb(n, driver) is None)


def sections(run: Run) -> dict[str, Any]:
    """The values of a run by section; of a script or a batch those that it or its launcher obeys something of."""
    values, driver = run.model_dump(mode="json"), driver_of(run)
    if driver not in FOREIGN:
        return values
    known = {name.partition(".")[0] for name in (*obeyed(driver), *OTHERS[driver])}
    return {section: value for section, value in values.items() if section in known}


def refusals(run: Run, driver: Driver) -> list[tuple[str, str]]:
    """Each value that was set and would have no effect: its name, and a sentence without its full stop."""
    found: dict[str, str] = {}
    for path, value in leaves(run.model_dump(mode="json")):
        path = path if lookup(path) else path[:-1]  # of a value with names of a person's own
        no = rule(_starred(path), driver)
        if no is None or _same(value, _usual(path, driver)) or any(_same(value, fit) for fit in no.fits):
            continue
        name = dotted(_as_set(path))
        found[name] = f"{name} has no effect in {CALLED[driver]}: {no.why}"
    return list(found.items())


def _as_set(path: Path) -> Path:
    """What a person has set: of a section that may be left out, the section."""
    above = (path[:length] for length in range(1, len(path)))
    return next((part for part in above if (name := lookup(part)) is not None and name.optional), path)


def _same(a: Any, b: Any) -> bool:
    return a == b and isinstance(a, bool) == isinstance(b, bool)


def _usual(path: Path, driver: Driver) -> Any:
    """What a value is where nobody has set it; of an item in a list, what its type says."""
    known, name = _defaults(driver), lookup(path)
    return known[path] if path in known or name is None else name.field.get_default(call_default_factory=True)


def _defaults(driver: Driver) -> dict[Path, Any]:
    return _leaves_of(driver if driver in FOREIGN else None)


@cache
def _leaves_of(foreign: Driver | None) -> dict[Path, Any]:
    rest: dict[str, Any] = {"data": {"train": "."}, "train": {"steps": 1}}
    if foreign is not None:
        rest = {"script": {"path": "."}} if foreign == "script" else {"batch": {"command": ["x"], "units": 1}}
    least = Run.model_validate({"name": "usual", **rest})
    return dict(leaves(least.model_dump(mode="json")))


def _starred(path: Path) -> str:
    return ".".join("*" if isinstance(part, int) else part for part in path)
