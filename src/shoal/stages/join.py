"""The checkpoints of all stages of a cut model, from their peers' folders, as one run: `shoal checkpoint join`.

Tensors are copied one after the other, in the memory of one of them, and compared with their checksums on the way. With
the state of the optimizer and the place in the data, `shoal resume` goes on from it. Of a model in a subspace
(`swarm.stages.rank`) only the weights of the plain model that computes the same are written: another model has other
moments.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from shoal.checkpoint.extra import stage_of
from shoal.checkpoint.find import Found, open_checkpoint
from shoal.checkpoint.foreign.bring_in import write
from shoal.checkpoint.foreign.incoming import Box, Incoming, of_checkpoint
from shoal.checkpoint.foreign.start_from import check_fits
from shoal.checkpoint.locate import Place
from shoal.checkpoint.manifest import Corrupt
from shoal.checkpoint.names import Name
from shoal.checkpoint.store import Folder
from shoal.errors import CheckpointError, UsageError
from shoal.guard.begin import write_spec
from shoal.journal.journal import Journal
from shoal.journal.rundir import RunDir
from shoal.spec.before import as_then
from shoal.spec.begun import differences
from shoal.spec.run import Run
from shoal.spec.shape import Shape, shape_of
from shoal.spec.swarm import Stages
from shoal.stages.subspace import EMBEDDING, Space, multiplied, multiplied_shape

PassedOver = Callable[[str], None]


@dataclass(frozen=True)
class Part:
    """A stage's checkpoint, and the folder of the peer that saved it."""

    found: Found
    place: Place

    @property
    def spec(self) -> Run:
        try:
            return Run.model_validate(as_then(self.found.extra["spec"]))
        except (KeyError, ValueError, TypeError, AttributeError):
            raise CheckpointError(f"{self.found.where} does not say what run it is of.") from None


def join(
    places: Sequence[Place],
    out: Path,
    step: int | None = None,
    passed_over: PassedOver = lambda words: None,
    on_bytes: Callable[[int], None] = lambda n: None,
) -> Found:
    """Makes `out` the directory of a run. Its one checkpoint is of the newest step that all stages have, or of `step`.
    Several peers of a stage may be given; the first that has the step is used."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"{out} is there already: name a new folder.")
    parts = _of_one_step([_saved(place, passed_over) for place in places], step)
    spec = parts[0].spec
    for part in parts[1:]:
        _refuse_another_run(parts[0], part)
    tensors = {name: t for part in parts for name, t in of_checkpoint(part.found).items()}
    rank = spec.swarm.stages.rank
    spec = spec.model_copy(update={"swarm": spec.swarm.model_copy(update={"stages": Stages()})})
    extra = {key: value for key, value in parts[0].found.extra.items() if key != "stage"}
    weights = {name.removeprefix("model."): t for name, t in tensors.items() if name.startswith("model.")}
    rows = weights[EMBEDDING].shape[:1] if EMBEDDING in weights else ()
    shape = shape_of(spec.model, rows[0] if rows else 1)
    if rank:
        weights = _multiplied(weights, shape, Space(shape, rank, spec.seed, "cpu"))
        tensors = {f"model.{name}": t for name, t in weights.items()}
        extra = {"step": extra["step"], "spec": spec.model_dump(mode="json")}  # no run goes on from it
    check_fits({name: t.shape for name, t in weights.items()}, shape, "what the stages hold together")
    run_dir = RunDir(out)
    out.mkdir(parents=True, exist_ok=True)
    found = write(Folder(run_dir.checkpoints), Name(parts[0].found.step, 0), tensors, extra, on_bytes)
    write_spec(run_dir, spec)
    _copy_journal(parts, run_dir, found)
    return found


def size_of(places: Sequence[Place]) -> int:
    """Bytes to be read, about, for a progress bar."""
    return sum(max((part.found.bytes for part in _saved(place, lambda words: None)), default=0) for place in places)


def _saved(place: Place, passed_over: PassedOver) -> list[Part]:
    """The good checkpoints of a peer."""
    found = []
    for one in place.listed():
        if not one.there or not one.on_history or one.quarantined:
            continue
        try:
            found.append(Part(open_checkpoint(one.store, one.name), place))
        except Corrupt as e:
            passed_over(f"{one.store.where}/{one.name}: {e}")
    if not found:
        raise CheckpointError(f"{place.label} has no checkpoint of a stage.")
    return found


def _of_one_step(peers: Iterable[list[Part]], step: int | None) -> list[Part]:
    """A part for each stage, in their order."""
    stages: dict[int, dict[int, Part]] = {}  # by stage, by step
    counts: dict[int, str] = {}
    for parts in peers:
        for part in parts:
            if "stage" not in part.found.extra:
                raise UsageError(f"{part.found.where} is a whole model already.")
            number, of = stage_of(part.found.extra["stage"])
            counts.setdefault(of, part.found.where)
            stages.setdefault(number, {}).setdefault(part.found.step, part)
    if len(counts) > 1:
        a, b = list(counts)[:2]
        raise UsageError(f"{counts[a]} is of a model cut into {a} and {counts[b]} of one cut into {b}: give one run's.")
    missing = [str(n) for n in range(1, next(iter(counts)) + 1) if n not in stages]
    if missing:
        raise UsageError(f"stage {', '.join(missing)} of {next(iter(counts))} is missing: give the folders of all.")
    common = set.intersection(*(set(steps) for steps in stages.values()))
    chosen = max(common, default=None) if step is None else step
    if chosen not in common:
        has = "; ".join(f"stage {n} has {', '.join(map(str, sorted(stages[n])))}" for n in sorted(stages))
        wanted = "a step in common" if step is None else f"step {step}"
        raise CheckpointError(f"the stages do not all have {wanted}: {has}.")
    return [stages[n][chosen] for n in sorted(stages)]


def _refuse_another_run(one: Part, other: Part) -> None:
    a, b = one.found, other.found
    differ = [d for d in differences(one.spec, other.spec, auto_is_equal=False) if not d.safe]
    if differ or a.extra.get("data") != b.extra.get("data"):
        why = str(differ[0]) if differ else "its data is another"
        raise UsageError(f"{b.where} is not of the same run as {a.where} ({why}).")


def _multiplied(weights: Mapping[str, Incoming], shape: Shape, space: Space) -> dict[str, Incoming]:
    made = {}
    for name, tensor in weights.items():
        size = multiplied_shape(name, tensor.shape, shape.dim)
        read = partial(lambda name, tensor: multiplied(name, tensor.whole(), space), name, tensor)
        made[name] = Incoming(tensor.dtype, size, (Box((0,) * len(size), size, read),))
    return made


def _copy_journal(parts: Sequence[Part], run_dir: RunDir, found: Found) -> None:
    """The steps, as the first stage's peer has told them. A folder of checkpoints alone has none."""
    first = parts[0].place.run_dir
    if first is not None:
        shutil.copyfile(first.journal_file, run_dir.journal_file)
    with contextlib.closing(Journal(run_dir.journal_file)) as journal:
        journal.append("assembled", step=found.step, stages=[part.found.where for part in parts])
