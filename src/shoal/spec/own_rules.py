"""What own code (`own`) goes together with, and what it stands in the place of. Nothing of it is imported here."""

from __future__ import annotations

from collections.abc import Iterator

from shoal.spec.foreign_rules import ONE_MODEL
from shoal.spec.mesh.rules import Broken
from shoal.spec.run import Data, Run
from shoal.spec.schedule import Schedule

_NOT_CUT = ("tp", "cp")  # axes that cut a block in ways that only Shoal's own parts know


def own_rules(run: Run) -> Iterator[Broken]:
    own, train = run.own, run.train
    if own.block is not None:
        for axis in _NOT_CUT:
            if getattr(run.mesh, axis) not in (1, "auto"):
                yield (
                    (f"mesh.{axis}", "own.block"),
                    f"own.block {own.block} is not cut over mesh.{axis}: take dp_shard, dp_replicate or pp",
                )
        if train.precision == "fp8":
            yield ("train.precision", "own.block"), f"own.block {own.block} is not computed in fp8: take bf16"
        if run.model.weights is not None:
            yield (
                ("model.weights", "own.block"),
                f"own.block {own.block} does not fit the weights of another model: leave model.weights out",
            )
    if own.objective is not None and train.z_loss:
        yield (
            ("train.z_loss", "own.objective"),
            f"train.z_loss has no effect with own.objective {own.objective}, which is the whole loss: leave it out",
        )
    if own.optimizer is not None and train.optimizer.name != "adamw":
        yield (
            ("train.optimizer.name", "own.optimizer"),
            f"train.optimizer.name has no effect with own.optimizer {own.optimizer}: leave it out",
        )
    if own.schedule is not None:
        usual = Schedule()
        for name in Schedule.model_fields:
            if getattr(train.schedule, name) != getattr(usual, name):
                yield (
                    (f"train.schedule.{name}", "own.schedule"),
                    f"train.schedule.{name} has no effect with own.schedule {own.schedule}: leave it out",
                )
    if own.data is not None:
        yield from _own_data(run)
    if own.launcher is not None and run.launch.on != "local":
        yield (
            ("launch.on", "own.launcher"),
            f"launch.on {run.launch.on} has no effect with own.launcher {own.launcher}: leave one of them out",
        )
    if own.loop is not None and run.fleet.islands > 1:
        yield (
            ("own.loop", "fleet.islands"),
            "islands take their steps themselves: leave own.loop out, or set fleet.islands to 1",
        )
    named = own.objects or own.launcher
    unused = [name for name in ("settings", "folder") if getattr(own, name)] if not named else []
    for name in unused:
        yield (f"own.{name}",), f"own.{name} has no effect where `own` names no code: leave it out"


def _own_data(run: Run) -> Iterator[Broken]:
    own, data, usual = run.own.data, run.data, Data()
    if data.train:
        yield ("data.train.0.path", "own.data"), f"data.train has no effect with own.data {own}: leave one of them out"
    if run.model.vocab_size == "auto":
        yield (
            ("model.vocab_size", "own.data"),
            f"model.vocab_size is auto, and own.data {own} is asked by those who train alone: set model.vocab_size",
        )
    if run.train.epochs is not None:
        yield (
            ("train.epochs", "own.data"),
            f"train.epochs needs the number of windows, and own.data {own} is asked by those who train alone: set "
            "train.steps or train.tokens",
        )
    for name in ("mask_documents", "packing", "cache_dir", "cache_gb"):
        if not data.eval and getattr(data, name) != getattr(usual, name):
            yield (
                (f"data.{name}", "own.data"),
                f"data.{name} has no effect with own.data {own}, which makes its windows itself: leave it out",
            )


def closed_by_own(run: Run) -> Run:
    """The run with what its own code leaves no choice about: a block is not cut, nor is a model that is not Shoal's,
    and a row is whole."""
    shut = [axis for axis in _NOT_CUT if run.own.block or (axis == "cp" and run.own.objective)]
    if run.foreign:
        # Of its size nothing is known here, and sharding always saves memory.
        both = run.mesh.dp_replicate == run.mesh.dp_shard == "auto"
        shut = [*ONE_MODEL, *(["dp_replicate"] if both else [])]
    chosen = {axis: 1 for axis in shut if getattr(run.mesh, axis) == "auto"}
    return run.model_copy(update={"mesh": run.mesh.model_copy(update=chosen)}) if chosen else run
