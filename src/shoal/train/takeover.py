"""A start of the workers takes the run over: loads the newest good state, claims the next term, sets up its saves."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from shoal.checkpoint import ledger
from shoal.checkpoint.error_text import words_of
from shoal.checkpoint.find import published
from shoal.checkpoint.interval import Cadence, Seen
from shoal.checkpoint.memory.nodes import Tier, join_memory
from shoal.checkpoint.memory.tier import Memory, memory_folder
from shoal.checkpoint.saver import Saver
from shoal.checkpoint.setup import Setup
from shoal.checkpoint.store import Folder, Store, store_of
from shoal.errors import CheckpointError, SetupError, TransientError
from shoal.journal.reading import told
from shoal.journal.rundir import RunDir
from shoal.parallel import agree
from shoal.parallel.place import Place
from shoal.spec.run import Run
from shoal.train.saves import Saves, Writer
from shoal.train.state import State
from shoal.train.training import Tell
from shoal.train.writers import AtOnce, Background

_HOPELESS = (errno.EACCES, errno.EPERM, errno.EROFS)


def stores_of_run(run: Run, run_dir: RunDir) -> list[Store]:
    """Where the checkpoints of a run are: what is written to, then what it is copied to."""
    stores: list[Store] = [Folder(run_dir.checkpoints)] if run.checkpoint.local else []
    if run.remote_checkpoints:
        stores.append(store_of(run.remote_checkpoints))
    return stores


def saves_of_first(run: Run, run_dir: RunDir, place: Place, state: State, step: int, tell: Tell) -> Saves:
    """Of an island that has become the first one, at this step: it claims the next term, and what others of the fleet
    have saved up to here stays on history. Collective over the island's ranks."""
    stores = stores_of_run(run, run_dir)
    reached = _reached(stores, tell)
    saved = [one.name.step for one in published(reached) if one.there and one.on_history and not one.quarantined]
    setup = _setup(run, place, stores, _claim(reached, step or -1), step or -1, None)
    writer: Writer = AtOnce(setup, stores)
    if run.checkpoint.background:
        writer = Background(Saver(setup, state.tensors(), state.holders()), None, hurry_s=run.guard.grace_s / 3)
    seen = Seen.of(told(run_dir.journal_file)) if place.rank == 0 else Seen()
    cadence = Cadence.of(run, step, time.monotonic(), place.world, seen)
    return Saves(state, writer, cadence, tell, max([s for s in saved if s <= step], default=-1))


def restore(run: Run, run_dir: RunDir, state: State, tell: Tell, at_most: int | None = None) -> int | None:
    """The step of the newest good checkpoint (up to `at_most`), which the state is then filled with. Collective."""
    found = state.restore(_reached(stores_of_run(run, run_dir), tell), tell, at_most)
    if found is None and agree.here()[0] == 0:
        _refuse_lost_history(run_dir)
    return None if found is None else found.step


def _setup(run: Run, place: Place, stores: Sequence[Store], term: int, from_step: int, tier: Tier | None) -> Setup:
    return Setup(
        rank=place.rank,
        world=place.world,
        term=term,
        from_step=from_step,
        stores=tuple(store.where for store in stores),
        memory=None if tier is None else str(tier.folder),
        next_keeper=None if tier is None else tier.next_keeper,
        token="" if tier is None else tier.token.hex(),
        keep=run.checkpoint.keep,
        keep_every=run.checkpoint.keep_every,
        keep_best=run.checkpoint.keep_best,
        read_back=run.checkpoint.read_back,
    )


def good_before(run: Run, run_dir: RunDir, step: int) -> int:
    """The newest saved step up to this one, from names alone; -1 where there is none. Collective."""

    def look() -> int:
        stores = stores_of_run(run, run_dir)
        memory = Memory(memory_folder(run_dir.path, int(os.environ.get("GROUP_RANK", "0"))), [], stores)
        listed = (one for one in published([memory, *stores]) if one.there and one.on_history and not one.quarantined)
        return next((one.name.step for one in listed if one.name.step <= step), -1)

    return _by_rank_0(look)


def take_over(
    run: Run, run_dir: RunDir, place: Place, state: State, tell: Tell, at_most: int | None = None
) -> tuple[int | None, Saves]:
    """(the step that the state stands at; None for a new run, the run's saves). Collective.

    `at_most`: goes back to that step, or to the one saved before it; what was saved after it is history no more.
    """
    stores = stores_of_run(run, run_dir)
    reached = _reached(stores, tell)
    tier = _memory(run, run_dir, tell)
    with ExitStack() as stack:
        memory = stack.enter_context(tier.stores(reached)) if tier else []
        found = state.restore([*memory, *reached], tell, at_most)
    if found is None and at_most is not None:
        raise CheckpointError(f"no checkpoint of step {at_most} or older can be used any more, to go back to.")
    if found is None and place.rank == 0:
        _refuse_lost_history(run_dir)
    from_step = -1 if found is None else found.step
    if tier is not None:
        tier.settle(found)
    setup = _setup(run, place, stores, _claim(reached, from_step), from_step, tier)
    every = run.checkpoint.memory if isinstance(run.checkpoint.memory, int) else 0
    writer: Writer = AtOnce(setup, stores)
    if run.checkpoint.background:
        saver = Saver(setup, state.tensors(), state.holders(), slots=3 if every else 1)
        if not saver.in_memory and tier is not None:
            room = "the memory folder has no room for a snapshot (in a container: a larger /dev/shm, or SHOAL_MEMORY)"
            tell("warning", text=f"{room}; saves go on, and a restart reads them from the disk")
        writer = Background(saver, tier, hurry_s=run.guard.grace_s / 3)
    seen = Seen.of(told(run_dir.journal_file)) if place.rank == 0 else Seen()
    cadence = Cadence.of(run, max(from_step, 0), time.monotonic(), place.world, seen)
    only_in_memory = found is not None and isinstance(found.store, Memory)
    if only_in_memory and found is not None:
        tell("warning", text=f"step {found.step} was found in memory, newer than what is on disk; it is saved next")
    last = -1 if only_in_memory else from_step
    saves = Saves(state, writer, cadence, tell, last, every, due_now=only_in_memory)
    return None if found is None else found.step, saves


def _memory(run: Run, run_dir: RunDir, tell: Tell) -> Tier | None:
    if not run.checkpoint.background or run.checkpoint.memory == "off":
        return None
    joined = join_memory(run_dir.path)
    if isinstance(joined, Tier):
        return joined
    tell("warning", text=f"snapshots are not kept in memory, since {joined}")
    return None


def _reached(stores: Sequence[Store], tell: Tell) -> list[Store]:
    """Without the copies where they cannot be reached now, if there is something here to go on from. Collective."""

    def count() -> int:
        try:
            published(stores[1:])
        except TransientError as e:
            if not published(stores[0]):
                raise
            tell("warning", text=f"going on from what is here, since {e}")
            return 1
        return len(stores)

    return list(stores[: _by_rank_0(count)])


def _claim(stores: Sequence[Store], from_step: int) -> int:
    return _by_rank_0(lambda: ledger.claim(stores, from_step))


def _by_rank_0(work: Callable[[], int]) -> int:
    """A number that rank 0 finds out, on every rank; what it raises all raise, and whether a retry can help is kept."""
    number, words = 0, None
    if agree.here()[0] == 0:
        try:
            number = work()
        except Exception as e:  # whatever it is, the others must not wait for this rank
            hopeless = isinstance(e, SetupError) or (isinstance(e, OSError) and e.errno in _HOPELESS)
            words = f"{'!' if hopeless else ''}{words_of(e)}"
    if failed := agree.first_error(words):
        kind = SetupError if failed[1].startswith("!") else TransientError
        raise kind(f"this start cannot take over the run's checkpoints: {failed[1].removeprefix('!').rstrip('.')}.")
    return agree.from_rank_0(number)


def _refuse_lost_history(run_dir: RunDir) -> None:
    """A run that has saved something and has nothing to restore does not quietly begin again."""
    saved = [record["step"] for _, record in told(run_dir.journal_file).others() if record["kind"] == "checkpoint"]
    if saved:
        raise CheckpointError(
            f"run '{run_dir.name}' had a checkpoint of step {max(saved)}, and {run_dir.checkpoints} is empty: put it "
            f"back, or start anew with `shoal train {run_dir.spec_file} --fresh`."
        )
