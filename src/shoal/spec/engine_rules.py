"""What DeepSpeed's engine (`engine.name: deepspeed`) goes together with. Nothing of it is imported here."""

from __future__ import annotations

from collections.abc import Iterator

from shoal.spec.engine import Engine
from shoal.spec.mesh.rules import Broken
from shoal.spec.run import Run

_KEY = "engine.name"
_ONE = ("pp", "dp_replicate", "cp", "tp", "ep")  # ZeRO is over all processes, which are those of dp_shard
_NATIVE = "or set engine.name to native"


def engine_rules(run: Run) -> Iterator[Broken]:
    engine, usual = run.engine, Engine()
    if engine.name == "native":
        for name in ("zero", "offload"):
            if getattr(engine, name) != getattr(usual, name):
                yield (
                    (f"engine.{name}", _KEY),
                    f"engine.{name} has no effect with engine.name native: leave it out, or set engine.name to "
                    "deepspeed",
                )
        return
    for axis in _ONE:
        if getattr(run.mesh, axis) not in (1, "auto"):
            yield (
                (f"mesh.{axis}", _KEY),
                f"engine.name deepspeed does not cut a model over mesh.{axis}: set it to 1, and mesh.dp_shard to the "
                f"number of processes, {_NATIVE}",
            )
    for name, wrong, instead in _refused(run):
        if wrong:
            yield (name, _KEY), f"engine.name deepspeed {instead}, {_NATIVE}"


def _refused(run: Run) -> Iterator[tuple[str, bool, str]]:
    """(name, whether it is set to what ZeRO does not do, what to do instead)."""
    train, own, mesh = run.train, run.own, run.mesh
    yield "mesh.reduce", mesh.reduce == "micro_batch", "says itself when gradients travel: leave mesh.reduce out"
    yield "train.precision", train.precision == "fp8", "does not compute in fp8: take bf16"
    yield "train.compile", train.compile is True, "is not compiled: set train.compile to false"
    yield "train.optimizer.name", train.optimizer.name != "adamw", "updates flat pieces of all matrices: take adamw"
    yield "train.optimizer.moments", train.optimizer.moments != "fp32", "keeps its moments in float32: take fp32"
    yield "model.experts", run.model.experts is not None, "has not been tried with experts: take a model without them"
    yield "model.hf", run.model.hf is not None, "trains the families that Shoal has: take model.weights"
    yield "own.model", own.model is not None, "trains the families that Shoal has: leave own.model out"
    yield "own.optimizer", own.optimizer is not None, "has an optimizer of its own: leave own.optimizer out"
    yield "guard.replay", run.guard.replay > 0, "cannot compute a batch twice: set guard.replay to 0"


def closed_by_engine(run: Run) -> Run:
    """The run with what DeepSpeed's engine leaves no choice about."""
    if run.engine.name == "native":
        return run
    mesh = {axis: 1 for axis in _ONE if getattr(run.mesh, axis) == "auto"}
    mesh |= {"reduce": "step"} if run.mesh.reduce == "auto" else {}  # type: ignore[dict-item]
    train = {"compile": False} if run.train.compile == "auto" else {}
    return run.model_copy(
        update={"mesh": run.mesh.model_copy(update=mesh), "train": run.train.model_copy(update=train)}
    )
