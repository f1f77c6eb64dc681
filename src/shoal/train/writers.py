"""The two ways in which saves are made: by a process in the background, or while training waits."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import cast

from shoal.checkpoint.error_text import not_saved
from shoal.checkpoint.find import Skipped
from shoal.checkpoint.interval import Cadence
from shoal.checkpoint.memory.nodes import Tier
from shoal.checkpoint.names import Name
from shoal.checkpoint.publish import prune
from shoal.checkpoint.saver import Event, Saver
from shoal.checkpoint.saving import SaveError, save
from shoal.checkpoint.setup import Setup
from shoal.checkpoint.store import Store
from shoal.errors import ShoalError
from shoal.parallel import agree
from shoal.train.saves import Savable, Saves

TICK_S = 0.01
COPY_WAIT_S = 600.0  # at the end of a run, for the copy in the second store


class Background:
    """`shoal.checkpoint.saver`, seen through by all ranks together where that is asked for."""

    def __init__(self, saver: Saver, tier: Tier | None = None, hurry_s: float = 10.0) -> None:
        """`hurry_s` is what a run that is told to stop can wait for the copy in the second store."""
        self._saver, self._tier, self._hurry_s = saver, tier, hurry_s

    @property
    def saving(self) -> bool:
        return self._saver.saving is not None

    @property
    def full(self) -> bool:
        return not self._saver.free

    @property
    def uploading(self) -> bool:
        return self._saver.uploading

    def begin(self, step: int, state: Savable, durable: bool, upload: bool) -> float:
        extra = state.extra(step) if agree.here()[0] == 0 else {}
        return self._saver.begin(step, state.tensors(), extra, durable, upload)

    def settle(self) -> None:
        self._saver.settle()

    def give_up(self) -> None:
        if self._saver.saving is not None and agree.here()[0] == 0:
            self._saver.give_up(self._saver.saving)

    def poll(self) -> list[Event]:
        return self._saver.poll()

    def finish(self) -> list[Event]:
        return self._together(lambda: self._saver.saving is not None or not self._saver.free)

    def see_through(self, step: int, hurry: bool) -> tuple[list[Event], str | None]:
        events = self._together(lambda: self._saver.saving is not None)
        if failed := agree.first_error(_wrong(events, step)):
            return events, not_saved(step, *failed)
        return events + self.see_copied(step, hurry), None

    def see_copied(self, step: int, hurry: bool) -> list[Event]:
        self._saver.upload(step)
        deadline = time.monotonic() + (self._hurry_s if hurry else COPY_WAIT_S)
        return self._together(lambda: self._saver.uploading and time.monotonic() < deadline)

    def _together(self, busy: Callable[[], bool]) -> list[Event]:
        """Collective: what happens until no rank is busy any more. However long one of them takes to write, nobody
        waits in a collective for it, which would end the run after some minutes."""
        events: list[Event] = []
        while True:
            new = self._saver.poll()
            events += new
            somebody_is_busy, somebody_failed = agree.anybody([busy(), any(e.kind == "failed" for e in new)])
            if somebody_failed:
                self.give_up()
            if not somebody_is_busy:
                return events
            time.sleep(TICK_S)

    def close(self, forget: bool) -> None:
        self._saver.close(forget)
        if self._tier is not None:
            self._tier.leave(forget)

    def set_aside(self) -> None:
        self.close(forget=False)
        self._saver.release()


class AtOnce:
    """Each save is on disk, and copied, when `begin` returns."""

    saving = full = uploading = False

    def __init__(self, setup: Setup, stores: Sequence[Store]) -> None:
        self._setup, self._stores = setup, stores
        self._events: list[Event] = []
        self._known_good: dict[str, set[Name]] = {store.where: set() for store in stores}

    def begin(self, step: int, state: Savable, durable: bool, upload: bool) -> float:
        began, setup, first = time.perf_counter(), self._setup, self._stores[0]
        if not durable:
            return 0.0
        for store in self._stores:
            try:
                saved = save(
                    store,
                    step,
                    state.tensors(),
                    state.extra(step),
                    setup.term,
                    state.holders(),
                    read_back=setup.read_back_of(store),
                )
            except SaveError as e:
                kind = "failed" if store is first else "upload-failed"
                self._events.append(Event(kind, step, {"error": e.why, "rank": e.rank}))
                break
            about = {"bytes": saved.bytes, "seconds": saved.seconds, "where": store.where, "name": str(saved.name)}
            self._events.append(Event("saved" if store is first else "uploaded", step, about))
            if setup.rank == 0:
                known_good = self._known_good[store.where]
                if setup.verifies(store):
                    known_good.add(saved.name)
                with contextlib.suppress(OSError, ShoalError):  # one too many is no reason to end a run
                    prune(store, setup.keep, setup.keep_every, setup.keep_best, setup.term, known_good, self._bad)
        return time.perf_counter() - began

    def _bad(self, bad: Skipped) -> None:
        self._events.append(Event("bad", bad.name.step, {"error": str(bad)}))

    def settle(self) -> None:
        return

    def give_up(self) -> None:
        return

    def poll(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    finish = poll

    def see_through(self, step: int, hurry: bool) -> tuple[list[Event], str | None]:
        events = self.poll()
        failed = next((e for e in events if e.step == step and e.kind in ("failed", "fenced")), None)
        return events, None if failed is None else not_saved(step, failed.fields["rank"], failed.error)

    def see_copied(self, step: int, hurry: bool) -> list[Event]:
        return self.poll()

    def close(self, forget: bool) -> None:
        return

    def set_aside(self) -> None:
        return


def unsaved() -> Saves:
    """For those who take steps without a run: nothing is ever due."""
    setup = Setup(rank=0, world=1, term=0, from_step=-1, stores=(), memory=None)
    nothing = cast("Savable", None)
    return Saves(nothing, AtOnce(setup, ()), Cadence(0, 0, 0.0), lambda kind, **fields: None, last=0)


def _wrong(events: list[Event], step: int) -> str | None:
    """What is wrong with the save of a step that has come to an end."""
    return next((e.error for e in events if e.step == step and e.kind in ("failed", "fenced")), None)
