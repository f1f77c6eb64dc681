"""The two ways in which saves are made: by a process in the background, or while training waits."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import cast

from shoal.checkpoint import peers
from shoal.checkpoint.find import Skipped
from shoal.checkpoint.interval import Cadence
from shoal.checkpoint.memory.nodes import Tier
from shoal.checkpoint.names import Name
from shoal.checkpoint.publish import prune
from shoal.checkpoint.saver import Event, Saver
from shoal.checkpoint.saving import SaveError, save
from shoal.checkpoint.setup import Setup
from shoal.checkpoint.store import Store
from shoal.checkpoint.words import not_saved
from shoal.errors import ShoalError
from shoal.train.saves import Savable, Saves

TICK_S = 0.01
COPIED = ("uploaded", "sent", "upload-failed")
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
        extra = state.extra(step) if peers.here()[0] == 0 else {}
        return self._saver.begin(step, state.tensors(), extra, durable, upload)

    def settle(self) -> None:
        self._saver.settle()

    def give_up(self) -> None:
        if self._saver.saving is not None and peers.here()[0] == 0:
            self._saver.give_up(self._saver.saving)

    def poll(self) -> list[Event]:
        return self._saver.poll()

    def finish(self) -> list[Event]:
        events: list[Event] = []
        while True:
            new = self._saver.poll()
            events += new
            busy = self._saver.saving is not None or not self._saver.free
            somebody_is_busy, somebody_failed = peers.anybody([busy, any(e.kind == "failed" for e in new)])
            if somebody_failed:
                self.give_up()
            if not somebody_is_busy:
                return events
            time.sleep(TICK_S)

    def see_through(self, step: int, hurry: bool) -> tuple[list[Event], str | None]:
        patience_s = self._saver.setup.patience_s
        events = self._wait(step, ("written", "saved"), patience_s)
        wrong = _wrong(events, step, "it was not written in time")
        if failed := peers.first_error(wrong):
            self.give_up()
            events += self.finish()
            return events, not_saved(step, *failed)
        if peers.here()[0] == 0 and not any(e.kind == "saved" and e.step == step for e in events):
            events += self._wait(step, ("saved",), 2 * patience_s)
        wrong = _wrong(events, step, "it was not published in time")
        if failed := peers.first_error(wrong):
            return events, not_saved(step, *failed)
        on_its_way = len(self._saver.setup.stores) > 1 and not any(e.kind in COPIED and e.step == step for e in events)
        if on_its_way:
            events += self._wait(step, COPIED, self._hurry_s if hurry else COPY_WAIT_S)
        return events, None

    def copy(self, step: int) -> list[Event]:
        self._saver.upload(step)
        return self._wait(step, COPIED, self._hurry_s)

    def close(self, forget: bool) -> None:
        self._saver.close(forget)
        if self._tier is not None:
            self._tier.leave(forget)

    def _wait(self, step: int, kinds: Sequence[str], timeout_s: float) -> list[Event]:
        return self._saver.wait_for(step, (*kinds, "failed", "fenced"), timeout_s)


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
                if setup.read_back_of(store) == "full":
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

    def copy(self, step: int) -> list[Event]:
        return []  # it is

    def see_through(self, step: int, hurry: bool) -> tuple[list[Event], str | None]:
        events = self.poll()
        failed = next((e for e in events if e.step == step and e.kind in ("failed", "fenced")), None)
        return events, None if failed is None else not_saved(step, failed.fields["rank"], failed.error)

    def close(self, forget: bool) -> None:
        return


def unsaved() -> Saves:
    """For those who take steps without a run: nothing is ever due."""
    setup = Setup(rank=0, world=1, term=0, from_step=-1, stores=(), memory=None)
    nothing = cast("Savable", None)
    return Saves(nothing, AtOnce(setup, ()), Cadence(0, 0, 0.0), lambda kind, **fields: None, last=0)


def _wrong(events: list[Event], step: int, otherwise: str) -> str | None:
    """What is wrong with the save of a step; None when it is well under way or done."""
    mine = [e for e in events if e.step == step]
    for event in mine:
        if event.kind in ("failed", "fenced"):
            return event.error
    return None if any(e.kind in ("written", "saved") for e in mine) else otherwise
