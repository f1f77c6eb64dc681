"""The checkpoints of one stage: those of any run, in the peer's folder, with the tensors of its own layers.

A peer has a disk of its own, so each saves by itself, all at the same steps. `shoal checkpoint join` puts the stages of
a step together; a whole checkpoint that lies in the peer's folder is gone on from as well, each stage takes its part.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from pathlib import Path

from shoal.checkpoint import ledger
from shoal.checkpoint.find import Skipped, open_checkpoint, published, quarantine
from shoal.checkpoint.interval import Cadence
from shoal.checkpoint.loading import load
from shoal.checkpoint.manifest import Corrupt
from shoal.checkpoint.names import Name
from shoal.checkpoint.setup import Setup
from shoal.checkpoint.store import Folder
from shoal.errors import CheckpointError, DataError, SpecError, TransientError
from shoal.spec.run import Run
from shoal.stages.before import old_states, read_old
from shoal.train.saves import Saves
from shoal.train.state import State
from shoal.train.training import Tell
from shoal.train.writers import AtOnce
from shoal.values import BadValue

LEAST = 2  # kept: a stage may be lost while the others save


def saves_at(run: Run) -> Callable[[int], bool]:
    """After which steps all peers save. A pure function of the step: what they have in common is gone on from."""
    asked = run.checkpoint
    every = run.swarm.stages.save_every if asked.every == "auto" else asked.every
    if isinstance(every, str):
        raise SpecError(
            f"checkpoint.every is {every}, and the peers of a cut model have no common clock: give a number of steps."
        )
    if asked.keep < LEAST:
        raise SpecError(
            f"checkpoint.keep is {asked.keep}, and a peer of a cut model needs {LEAST}: it may be lost while the "
            "others save."
        )
    multiples = [n for n in (every, asked.keep_every, asked.keep_best and run.eval.every) if n]
    return lambda step: step == run.steps or any(step % n == 0 for n in multiples)


class StageStates:
    def __init__(
        self, folder: Path, state: State, restore: Callable[[bytes], None], state_bytes: int, tell: Tell
    ) -> None:
        """`restore` fills the state with what a sibling, or an earlier version, has written; `state_bytes`: at most."""
        self._folder, self._state, self._restore, self._most, self._tell = folder, state, restore, state_bytes, tell
        self._store = Folder(folder / "checkpoints")
        self._term: int | None = None
        self._names = self._look()

    def saved(self) -> list[int]:
        """Steps that can be gone back to. Asked by another thread than the one that saves."""
        return sorted({0, *old_states(self._folder), *self._names})

    def save(self, step: int) -> None:
        """What is not saved yet. Only the last step of the run must succeed: an older state is enough otherwise."""
        if step in self._names or step == 0:  # the beginning is always there
            return
        if self._term is None:
            self.goes_on_from(0)
        self._saves.now(step, must=step == self._state.run.steps)
        self._names = self._look()
        if len(self._names) >= LEAST:
            self._forget_old(lambda old: old < min(self._names))

    def load(self, step: int) -> None:
        """Fills the state with that of a step; of 0 nothing is filled. What is newer is history no more."""
        self._forget_old(lambda old: old > step)
        if step in self._names:
            self._load(self._names[step])
        elif step in (old := old_states(self._folder)):
            self._load_old(old[step])
        elif step:
            raise CheckpointError(f"{self._folder} has no state of step {step} any more; it has {self.saved()}.")
        self.goes_on_from(step)

    def goes_on_from(self, step: int) -> None:
        """Also from a state that a sibling has handed over: claims the next term, as any start of a run does."""
        run, from_step = self._state.run, step or -1
        self._term = ledger.claim([self._store], from_step)
        keep = run.checkpoint
        setup = Setup(
            rank=0,
            world=1,
            term=self._term,
            from_step=from_step,
            stores=(self._store.where,),
            memory=None,
            keep=keep.keep,
            keep_every=keep.keep_every,
            keep_best=keep.keep_best,
            read_back=keep.read_back,
        )
        self._names = self._look()
        last = step if step in self._names else -1
        cadence = Cadence(0, step, time.monotonic())  # the peers know when it is due
        self._saves = Saves(self._state, AtOnce(setup, [self._store]), cadence, self._tell, last)

    def _load(self, name: Name) -> None:
        try:
            found = open_checkpoint(self._store, name)
            spec = self._state.refuse_another_run(found)
            if spec is not None:
                self._refuse_another_schedule(schedule_of(spec))
            if found.extra.get("skips", []) != self._state.skips.spans:
                raise CheckpointError(
                    f"checkpoint {found.where} has left out other batches than data.skip names, and a model cut over "
                    "peers leaves out those alone: go on with it by `shoal resume`."
                )
            load(found, self._state.tensors(), part=True)
        except Corrupt as e:
            quarantine(Skipped(self._store, name, str(e)))
            raise TransientError(
                f"{self._store.where}/{name} is damaged and will not be used again ({e}): start this peer again, and "
                "it goes on from an older state."
            ) from e

    def _load_old(self, file: Path) -> None:
        try:
            data, schedule = read_old(file, self._most)
            self._refuse_another_schedule(schedule or schedule_of(self._state.run))
            self._restore(data)
        except BadValue as e:
            raise DataError(f"{file} is damaged ({e}): delete it, and an older state is used.") from None

    def _refuse_another_schedule(self, known: str) -> None:
        """A longer run, or another schedule, would make the learning rate jump; peers have no way to choose how."""
        if known != schedule_of(self._state.run):
            raise SpecError(
                f"train.steps or train.schedule is not what the state in {self._folder} was trained with, and a model "
                "cut over peers is not prolonged: give them as they were, or another --folder."
            )

    def _look(self) -> dict[int, Name]:
        """By their steps, those that count."""
        good = [one for one in published(self._store) if one.there and one.on_history and not one.quarantined]
        return {one.name.step: one.name for one in reversed(good)}

    def _forget_old(self, which: Callable[[int], bool]) -> None:
        for step, file in old_states(self._folder).items():
            if which(step):
                with contextlib.suppress(OSError):
                    file.unlink()


def schedule_of(run: Run) -> str:
    return json.dumps({"steps": run.steps, **run.train.schedule.model_dump(mode="json")}, sort_keys=True)
