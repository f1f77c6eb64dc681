"""When a run saves itself while it trains. All ranks decide alike, from what they exchange during each step.

The exchange carries six numbers beside the loop's own: whether a rank is still writing a save out, whether it has no
memory free for a snapshot (nobody begins another one then: that is the back-pressure of a slow disk), whether rank 0
finds that one is due, whether a rank could not write its part, whether one still copies an earlier save to the second
store (this one is not copied then), and whether a newer start has taken over (then all end). Nothing else is exchanged
on the way of a save.
A save that fails is journaled and tried again; training goes on. Only the last one must succeed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from shoal.checkpoint.error_text import not_saved
from shoal.checkpoint.interval import Cadence, shown
from shoal.checkpoint.ledger import Fenced
from shoal.checkpoint.saver import Event
from shoal.checkpoint.saving import SaveError
from shoal.parallel import agree

Tell = Callable[..., None]
AGAIN_S = 10.0  # after a failed save
NEWS = 1.25  # an interval that changes by more than this is worth a line in the journal


class Savable(Protocol):
    def tensors(self) -> dict[str, torch.Tensor]: ...
    def holders(self) -> dict[str, list[int]] | None: ...
    def extra(self, step: int) -> dict[str, Any]: ...


class Writer(Protocol):
    """How saves are made: in the background, or while training waits (`shoal.train.writers`)."""

    @property
    def saving(self) -> bool: ...
    @property
    def full(self) -> bool: ...
    @property
    def uploading(self) -> bool: ...

    def begin(self, step: int, state: Savable, durable: bool, upload: bool) -> float:
        """`upload`: to the second store, if there is one."""
        ...

    def settle(self) -> None: ...
    def give_up(self) -> None: ...
    def poll(self) -> list[Event]: ...

    def finish(self) -> list[Event]:
        """Collective: returns when nothing is under way on any rank."""
        ...

    def see_through(self, step: int, hurry: bool) -> tuple[list[Event], str | None]:
        """Collective: returns when the save of that step is published (and copied, unless there is a hurry), or what is
        wrong with it, on all ranks."""
        ...

    def see_copied(self, step: int, hurry: bool) -> list[Event]:
        """Collective: the save of that step is published; returns when it is copied too, unless there is a hurry."""
        ...

    def close(self, forget: bool) -> None: ...

    def set_aside(self) -> None:
        """Another one takes over in this process: what is in memory stays to be found, what it took is given back."""
        ...


@dataclass(frozen=True)
class Agreed:
    """What the ranks have said together: as each stood before a step, heard when it is computed."""

    saving: float = 0.0
    full: float = 0.0
    due: float = 0.0
    failed: float = 0.0
    uploading: float = 0.0
    fenced: float = 0.0


class Pace:
    """How much longer steps take while a save is being written: the hidden part of what it costs."""

    def __init__(self) -> None:
        self._at: float | None = None
        self._quiet_s: float | None = None  # of a step without a save, averaged
        self._taken_s = 0.0

    def step(self, now: float, saving: bool) -> None:
        """A step begins; `saving` says what was under way until now."""
        if self._at is not None:
            length_s = now - self._at
            if saving and self._quiet_s is not None:
                self._taken_s += length_s - self._quiet_s
            elif not saving:
                self._quiet_s = length_s if self._quiet_s is None else 0.9 * self._quiet_s + 0.1 * length_s
        self._at = now

    def taken_s(self) -> float:
        """What it was since the last call."""
        taken_s, self._taken_s = self._taken_s, 0.0
        return taken_s


class Saves:
    """The saves of one rank."""

    def __init__(
        self,
        state: Savable,
        write: Writer,
        cadence: Cadence,
        tell: Tell,
        last: int,
        memory_every: int = 0,
        due_now: bool = False,
    ) -> None:
        """`last` is the step that is saved already. `due_now`: what the state was restored from is on no disk."""
        self._state, self._write, self._cadence, self._tell = state, write, cadence, tell
        self._last = last
        self._memory_every = memory_every
        self._agreed = Agreed()
        self._begun: dict[int, tuple[float, float]] = {}  # step → (Unix time, seconds that training stood still)
        self._waits = False  # one is due, and the one before is still being written
        self._failed = False  # to be told to the others
        self._fenced: str | None = None
        self._not_copied = False  # the last one
        self._retried: set[int] = set()  # steps whose copy is
        self._unkept = False
        self._again_at: float | None = 0.0 if due_now else None
        self._newest = -1  # that was begun
        self._pace = Pace()
        self._told_s = 0.0
        self._all_saved = False

    def votes(self, step: int) -> tuple[float, ...]:
        """Before step `step` begins; about the moment when it will be done."""
        write = self._write
        self._pace.step(time.monotonic(), write.saving)
        self._hear(write.poll())
        failed, self._failed = self._failed, False
        mine = (write.saving, write.full, self._due(step + 1), failed, write.uploading, self._fenced is not None)
        return tuple(map(float, mine))

    def heard(self, *together: float) -> None:
        self._agreed = Agreed(*together)
        if self._agreed.fenced:
            raise Fenced(self._fenced or "another process of this run was told that a newer start has taken over.")
        if self._agreed.failed:
            self._write.give_up()

    def settle(self) -> None:
        """Before the weights change."""
        began = time.perf_counter()
        self._write.settle()
        if self._newest in self._begun:
            begin, stall_s = self._begun[self._newest]
            self._begun[self._newest] = (begin, stall_s + time.perf_counter() - began)

    def after(self, done: int) -> None:
        """A step is committed: saves, if that is due and nobody is busy."""
        if self._agreed.due and not self._agreed.saving:  # snapshots for memory always leave it a slot
            self._begin(done, upload=not self._agreed.uploading)
        elif self._agreed.due and not self._waits:
            self._waits = True
            still = f"that of step {self._newest} is still being written"
            self._tell("warning", text=f"the checkpoint that is due at step {done} waits: {still}")
        elif self._memory_every and done % self._memory_every == 0 and not self._agreed.full:
            self._write.begin(done, self._state, durable=False, upload=False)

    def now(self, step: int, must: bool) -> None:
        """Saves what is not saved yet, and returns when it is published. `must`: raises when that fails, everywhere."""
        self._hear(self._write.finish())
        self._end_if_fenced()
        if agree.from_rank_0(int(self._last == step)):
            self._all_saved = True  # told to stop right after a checkpoint
            self._hear(self._write.see_copied(step, hurry=not must))
            return
        self._begin(step, upload=True)
        events, wrong = self._write.see_through(step, hurry=not must)
        self._hear(events)
        self._end_if_fenced()
        self._all_saved = wrong is None
        if wrong and must:
            raise SaveError(wrong)

    def close(self) -> None:
        """What is published need not stay in memory; what is not waits there for the next start."""
        self._write.close(forget=self._all_saved)

    def set_aside(self) -> None:
        """Collective: what was begun is finished; then this process takes the run over anew."""
        self._hear(self._write.finish())
        self._end_if_fenced()
        self._write.set_aside()

    def _due(self, done: int) -> bool:
        if agree.here()[0] > 0:
            return False
        now = time.monotonic()
        return now >= self._again_at if self._again_at is not None else self._cadence.due(done, now)

    def _end_if_fenced(self) -> None:
        """Collective."""
        if replaced := agree.first_error(self._fenced):
            raise Fenced(replaced[1])

    def _begin(self, step: int, upload: bool) -> None:
        begin = round(time.time(), 6)
        self._again_at = None
        self._newest = step
        self._waits = False
        if not upload and not self._not_copied:
            text = f"checkpoint {step} and those after it are not copied while an earlier one is on its way"
            self._tell("warning", text=text)
        self._not_copied = not upload
        self._begun[step] = (begin, self._write.begin(step, self._state, durable=True, upload=upload))
        self._cadence.begun(step, time.monotonic())

    def _hear(self, events: list[Event]) -> None:
        for event in events:
            match event.kind:
                case "saved":
                    self._saved(event)
                case "failed":
                    self._not_saved(event)
                case "fenced":
                    self._fenced = event.error  # all ranks end together
                case "retry":
                    self._tell("warning", text=f"the checkpoint of step {event.step} is tried again: {event.error}")
                case "bad":
                    self._tell("warning", text=f"checkpoint found damaged and quarantined: {event.error}")
                case "uploaded":
                    self._tell("uploaded", step=event.step, **event.fields)
                case "unkept" if not self._unkept:  # said once, until one is again
                    self._unkept = True
                    self._tell("warning", text=f"snapshots are not kept in memory, or have no copy: {event.error}")
                case "copied":
                    self._unkept = False
                case "upload-retry" if event.step not in self._retried:  # said once; a server may be away for a day
                    self._retried.add(event.step)
                    self._tell("warning", text=f"the copy of checkpoint {event.step} is tried again: {event.error}")
                case "upload-failed":
                    self._tell("warning", text=f"checkpoint {event.step} was not copied: {event.error}")

    def _saved(self, event: Event) -> None:
        begin, stall_s = self._begun.pop(event.step, (round(time.time(), 6), 0.0))
        persist_s = event.fields["seconds"]
        self._last = max(self._last, event.step)
        self._tell(
            "checkpoint",
            step=event.step,
            begin=begin,
            bytes=event.fields["bytes"],
            path=event.fields["name"],
            stall_s=round(stall_s, 6),
            persist_s=round(persist_s, 6),
        )
        self._cadence.saved(stall_s, persist_s, max(0.0, self._pace.taken_s() - stall_s))
        now = time.monotonic()
        interval_s = self._cadence.interval_s(now)
        if self._cadence.automatic and not 1 / NEWS < interval_s / max(self._told_s, 1e-9) < NEWS:
            self._told_s = interval_s
            self._tell("decision", key="checkpoint.every", value=shown(interval_s), why=self._cadence.why(now))

    def _not_saved(self, event: Event) -> None:
        begin, _ = self._begun.pop(event.step, (round(time.time(), 6), 0.0))
        self._failed = True
        self._again_at = time.monotonic() + AGAIN_S
        error = not_saved(event.step, int(event.fields.get("rank", 0)), event.error)
        self._tell("checkpoint_failed", step=event.step, begin=begin, error=error)
