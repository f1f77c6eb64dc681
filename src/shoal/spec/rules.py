"""What must agree between the values of a run file: each rule names them and says in a sentence what to change."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise

from shoal.spec.accelerate import Accelerate, Dynamo
from shoal.spec.asked_rules import asked_rules
from shoal.spec.batch import GIVEN as OF_UNITS
from shoal.spec.batch import MOST_ITEM, MOST_LISTED, PLACE
from shoal.spec.drivers import driver_of, refusals
from shoal.spec.engine_rules import engine_rules
from shoal.spec.foreign_rules import foreign_rules
from shoal.spec.length import WAYS, decay_steps, steps_for_tokens, warmup_steps
from shoal.spec.mesh.refusal import refusal
from shoal.spec.mesh.rules import Broken, Work
from shoal.spec.model_rules import model_rules
from shoal.spec.own_rules import own_rules
from shoal.spec.precision import problem
from shoal.spec.problems import is_missing, is_wrong
from shoal.spec.run import Run
from shoal.spec.script import CHECKPOINT, GIVEN, Script


def broken(run: Run) -> list[Broken]:
    """Every rule that `run` breaks: the dotted names it is about, and a sentence without its full stop."""
    rules = _RULES_OF_BATCHES if run.batch is not None else _RULES if run.script is None else _RULES_OF_SCRIPTS
    return [found for rule in rules for found in rule(run)]


def _windows(run: Run) -> Iterator[Broken]:
    wanted, longest = run.data.seq_len, run.model.max_seq_len
    if wanted > longest:
        yield (
            ("data.seq_len", "model.max_seq_len"),
            f"data.seq_len {wanted} is longer than model.max_seq_len {longest}; lower it, or set model.max_seq_len to "
            f"{wanted} if the model is meant for that",
        )


def _data(run: Run) -> Iterator[Broken]:
    path = ("data", "train")
    if not run.data.train and run.own.data is None:
        said = is_wrong(path, []) if "train" in run.data.model_fields_set else is_missing(path)
        yield ("data.train",), said.removesuffix(".")


def _held_out(run: Run) -> Iterator[Broken]:
    trained = {source.path for source in run.data.train}
    for i, source in enumerate(run.data.eval):
        if source.path in trained:
            yield (
                (f"data.eval.{i}.path",),
                f"data.eval {source.path} is also in data.train, so its loss would say nothing; hold out other data",
            )
    if run.eval.every and not (run.data.eval or run.eval.tasks or run.eval.samples):
        yield ("eval.every", "data.eval"), f"eval.every {run.eval.every} needs held-out data; set data.eval"


def _precision(run: Run) -> Iterator[Broken]:
    if sentence := problem(run.train.precision, run.eval.precision):
        yield ("eval.precision", "train.precision"), sentence


def _best(run: Run) -> Iterator[Broken]:
    if run.checkpoint.keep_best and not run.data.eval:
        yield (
            ("checkpoint.keep_best", "data.eval"),
            f"checkpoint.keep_best {run.checkpoint.keep_best} goes by the loss on held-out data; set data.eval",
        )


def _somewhere(run: Run) -> Iterator[Broken]:
    if not run.checkpoint.local and not run.checkpoint.remote:
        yield (
            ("checkpoint.local", "checkpoint.remote"),
            "checkpoint.local false leaves no place for checkpoints; set checkpoint.remote",
        )


def _length(run: Run) -> Iterator[Broken]:
    said = [".".join(way) for way in WAYS if getattr(run.train, way[-1]) not in (None, "auto")]
    if not said:
        yield (
            ("train.steps",),
            "train.steps is missing; add `steps:` with a whole number of at least 1, or say train.epochs or "
            "train.tokens, from which the steps follow",
        )
    elif len(said) > 1:
        yield tuple(said), f"{' and '.join(said)} each say how long the run is; keep one of them"


def _schedule(run: Run) -> Iterator[Broken]:
    steps, schedule = known_steps(run), run.train.schedule
    if steps is None:
        return  # asked again once the data has been counted
    long = f"train.steps {steps}" if run.train.steps != "auto" else f"the {steps} steps of train.tokens"
    if schedule.past:
        ends = [0, *(piece.until for piece in schedule.past)]
        if any(a >= b for a, b in pairwise(ends)):
            yield (
                ("train.schedule.past",),
                f"train.schedule.past is until steps {', '.join(map(str, ends[1:]))}, which do not ascend; "
                "`shoal resume` writes them, so leave them as they were, or remove them",
            )
        if ends[-1] >= steps:
            return  # none of its own steps comes any more
        then = next((piece.then for piece in reversed(schedule.past) if piece.then not in (None, "jump")), None)
        if then in ("keep", "decay"):
            return  # no warm-up and no decay of its own comes any more
        if then == "rewarm" and schedule.past[-1].then == then:
            steps, long = steps - ends[-1], f"the {steps - ends[-1]} steps that are left"
    warmup = warmup_steps(schedule.warmup_steps, steps)
    if warmup >= steps:
        yield (
            ("train.schedule.warmup_steps", "train.steps"),
            f"train.schedule.warmup_steps {warmup} is not below {long}; lower it, or take a share of the run, such as "
            "5%",
        )
    elif schedule.name == "wsd":
        decay = decay_steps(schedule.decay_steps, steps)
        if warmup + decay > steps:
            yield (
                ("train.schedule.decay_steps", "train.schedule.warmup_steps", "train.steps"),
                f"train.schedule.warmup_steps {warmup} and the decay of {decay} steps exceed {long}; shorten one, or "
                "take shares of the run, such as 20%",
            )


def _z_loss(run: Run) -> Iterator[Broken]:
    if run.train.z_loss and run.train.precision == "fp8" and run.train.fp8_head:
        yield (
            ("train.z_loss", "train.fp8_head"),
            f"train.z_loss {run.train.z_loss:g} is not computed by an output layer in 8 bits; set "
            "train.fp8_head to false",
        )


def _fleet(run: Run) -> Iterator[Broken]:
    fleet, batch = run.fleet, run.train.batch
    # What only islands do, or do not do. Swarms and stages refuse all that is about islands, and more (`trainable`).
    for name, sentence in refusals(run, driver_of(run)):
        yield (name, "fleet.islands"), sentence
    if fleet.islands == 1:
        return
    if fleet.shards != "auto" and (batch % fleet.shards or fleet.shards < fleet.islands):
        yield (
            ("fleet.shards", "train.batch", "fleet.islands"),
            f"fleet.shards {fleet.shards} must divide train.batch {batch} and not be below fleet.islands "
            f"{fleet.islands}; change one",
        )
    if _copies_twice(run):
        yield (
            ("mesh.dp_replicate", "fleet.islands"),
            f"mesh.dp_replicate {run.mesh.dp_replicate} makes copies inside an island, and fleet.islands "
            f"{fleet.islands} are copies already; set it to 1",
        )


def _layout(run: Run) -> Iterator[Broken]:
    if _copies_twice(run):
        return  # it is told above, and the nearest mesh would be one with copies
    found = refusal(run.mesh, Work.of(run))
    if found:
        yield found


def _copies_twice(run: Run) -> bool:
    return run.fleet.islands > 1 and run.mesh.dp_replicate not in (1, "auto")


def _accelerate(script: Script, asked: Accelerate) -> Iterator[Broken]:
    at = "script.accelerate"
    for name in sorted(script.env):
        if name.startswith(("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_")):
            yield (f"script.env.{name}", at), f"script.env.{name} is what {at} says; leave one of them out"
    if asked.fsdp is not None and asked.deepspeed is not None:
        yield (
            (f"{at}.fsdp", f"{at}.deepspeed"),
            f"{at} has fsdp and deepspeed, which do the same; leave one out",
        )
    if asked.deepspeed is not None and asked.dynamo != Dynamo():
        yield (
            (f"{at}.dynamo", f"{at}.deepspeed"),
            f"`accelerate launch` does not tell a script with DeepSpeed of {at}.dynamo; leave it out",
        )
    if asked.deepspeed is not None and asked.deepspeed.config_file is not None:
        others = asked.deepspeed.model_fields_set - {"config_file"}
        if others:
            one = f"{at}.deepspeed.{min(others)}"
            yield (
                (one, f"{at}.deepspeed.config_file"),
                f"{at}.deepspeed.config_file says {one} itself; leave it out",
            )
    if asked.parallelism is not None and asked.fsdp is None:
        yield (f"{at}.parallelism", f"{at}.fsdp"), f"{at}.parallelism is for FSDP2; add {at}.fsdp"


def _script(run: Run) -> Iterator[Broken]:
    assert run.script is not None
    for name, sentence in refusals(run, "script"):
        yield (name, "script"), sentence
    for name in sorted(run.script.env.keys() & GIVEN):
        yield (f"script.env.{name}",), f"script.env.{name} is what Shoal tells each process; leave it out"
    if run.script.accelerate is not None:
        yield from _accelerate(run.script, run.script.accelerate)
    if CHECKPOINT in " ".join(run.script.args):
        yield (
            ("script.args", "script.resume"),
            f"script.args has {CHECKPOINT}, which is known at a restart alone; move it to script.resume",
        )


def _batch(run: Run) -> Iterator[Broken]:
    assert run.batch is not None
    batch = run.batch
    for name, sentence in refusals(run, "batch"):
        yield (name, "batch"), sentence
    for name in sorted(batch.env.keys() & OF_UNITS):
        yield (f"batch.env.{name}",), f"batch.env.{name} is what Shoal tells each unit; leave it out"
    if batch.units is None and batch.items is None:
        yield ("batch",), "batch says neither how many units there are nor which; set batch.units or batch.items"
    elif batch.units is not None and batch.items is not None:
        yield ("batch.units",), "batch.units and batch.items both say how many units there are; leave batch.units out"
    if isinstance(batch.items, tuple):
        if not batch.items:
            yield ("batch.items",), "batch.items is empty, so there is nothing to do; name at least one item"
        if len(batch.items) > MOST_LISTED:
            many = f"{len(batch.items):,} items stand in the run file, where at most {MOST_LISTED:,} are sensible"
            yield ("batch.items",), f"{many}; put them into a file, one a line, and name that in batch.items"
        for item in batch.items:
            if "\n" in item or len(item) > MOST_ITEM:
                yield (
                    ("batch.items",),
                    f"batch.items: an item is one line of at most {MOST_ITEM:,} characters; put more into a file and "
                    "name that",
                )
                break
    used = {found[1] for word in (*batch.command, batch.outputs or "") for found in PLACE.finditer(word)}
    if "item" in used and batch.items is None:
        yield (
            ("batch.command", "batch"),
            "{item} stands in the batch, and there is no batch.items; set it, or use {index}",
        )
    if batch.outputs is not None and not used & {"index", "item"} & {f[1] for f in PLACE.finditer(batch.outputs)}:
        yield (
            ("batch.outputs",),
            "batch.outputs is the same file for every unit, so it proves none of them; put {index} or {item} into it",
        )


def _tracking(run: Run) -> Iterator[Broken]:
    address = run.track.mlflow
    if not isinstance(address, str):
        return
    scheme, found, rest = address.partition("://")
    if not found and address != "databricks":
        whole = f"http://{address or 'localhost:5000'}"
        yield ("track.mlflow",), f"track.mlflow '{address}' is no address; write it whole, such as {whole}"
    elif scheme.startswith("http") and "@" in rest.split("/")[0]:
        # A run file is copied, committed and shown; the environment is not.
        yield (
            ("track.mlflow",),
            "track.mlflow holds a user or password; set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD instead",
        )


def known_steps(run: Run) -> int | None:
    """The steps of a run, where it needs no look at the data."""
    if run.train.steps != "auto":
        return run.train.steps
    tokens = run.train.tokens
    return None if tokens is None else steps_for_tokens(tokens, run.train.batch, run.data.seq_len)


_RULES: tuple[Callable[[Run], Iterator[Broken]], ...] = (
    model_rules,
    _windows,
    _data,
    _held_out,
    asked_rules,
    _precision,
    _best,
    _somewhere,
    _length,
    _schedule,
    _z_loss,
    _fleet,
    _layout,
    _tracking,
    own_rules,
    foreign_rules,
    engine_rules,
)
_RULES_OF_SCRIPTS: tuple[Callable[[Run], Iterator[Broken]], ...] = (_script, _tracking)
_RULES_OF_BATCHES: tuple[Callable[[Run], Iterator[Broken]], ...] = (_batch,)
