"""What the journal says about a run so far, read once and then as it grows. Of a long one only the index is read."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from shoal.checkpoint.find import published
from shoal.checkpoint.memory.tier import Memory, memory_folder
from shoal.checkpoint.store import Folder
from shoal.errors import ShoalError
from shoal.journal.journal import LONG_BYTES, Record, read
from shoal.journal.rundir import RunDir

KINDS = frozenset(("start", "rewind", "failure", "checkpoint", "finished", "attempt", "open", "close", "decision"))


@dataclass
class History:
    path: Path
    sessions: int = 0  # begun so far
    attempts: int = 0  # begun so far, over all sessions; the next one has this number
    step: int = 0  # the furthest committed step of the run's life; going over old steps again is no progress
    at: int = 0  # the step at which it stands: after it fell back to an older checkpoint that is less
    loss: float | str | None = None  # of that step
    by_island: dict[int, int] = field(default_factory=dict)  # the furthest step in which each took part
    saved_step: int = 0  # of the newest checkpoint
    digest: str | None = None  # of the parameters, once the last step is done
    open: Record | None = None  # of the session that has not been closed
    last_close: Record | None = None
    auto: dict[str, Record] = field(default_factory=dict)  # decisions that Shoal made and may make anew, by key
    failed_in_a_row: int = 0  # without a new step; over the sessions that one scheduler's job has started, not a person
    _job: str | None = None
    _offset: int = 0

    @classmethod
    def of(cls, run_dir: RunDir) -> History:
        history = cls(run_dir.journal_file)
        history.refresh()
        return history

    def refresh(self) -> None:
        if not self.path.exists():
            return
        if self.path.stat().st_size - self._offset >= LONG_BYTES and not self._offset:
            self._take_all()
        for record, after in read(self.path, self._offset):
            self._take(record)
            self._offset = after

    def _take_all(self) -> None:
        """As `_take` of one record after the other, the steps between two others at once."""
        from shoal.journal.reading import told  # numpy: only those who look at a long run wait for it

        known, at = told(self.path), 0
        steps, losses = known.column("step"), known.column("loss")

        def take_steps(end: int) -> None:
            if end > at:
                loss = float(losses[end - 1])
                self._stands(int(steps[end - 1]), loss if math.isfinite(loss) else str(loss))
                self._reach(int(steps[at:end].max()))

        for place, record in known.others(KINDS):
            take_steps(place)
            at = place
            self._take(record)
        take_steps(known.rows)
        for islands, step in known.islands():
            self._took_part(islands, step)
        self._offset = known.end

    @property
    def finished(self) -> bool:
        return self.open is None and self.last_close is not None and self.last_close["status"] == "done"

    def _take(self, record: Record) -> None:
        match record["kind"]:
            case "step":
                self._took_part(record.get("islands", ()), record["step"])
                self._stands(record["step"], record["loss"])
                self._reach(record["step"])
            case "start":
                self._stands(record.get("step") or 0)
            case "rewind":
                self._stands(record["to"])
            case "failure":
                nobody_else = record.get("cause") == "supervisor-lost" and self._job is None
                self.failed_in_a_row += "island" not in record and not nobody_else
            case "checkpoint":
                self.saved_step = record["step"]
            case "finished":
                self.digest = record.get("digest")
            case "attempt":
                self.attempts = max(self.attempts, record["attempt"] + 1)
            case "open":
                self.sessions = max(self.sessions, record["session"] + 1)
                self.open = record
                job = record.get("job")
                if job is None or job != self._job:
                    self.failed_in_a_row = 0
                self._job = job
            case "close":
                self.open, self.last_close = None, record
            case "decision":
                if record.get("asked"):
                    self.auto.pop(record["key"], None)
                else:
                    self.auto[record["key"]] = record

    def _took_part(self, islands: Iterable[int], step: int) -> None:
        for island in islands:
            self.by_island[island] = max(step, self.by_island.get(island, 0))

    def _reach(self, step: int) -> None:
        if step > self.step:
            self.step = step
            self.failed_in_a_row = 0

    def _stands(self, step: int, loss: float | str | None = None) -> None:
        if loss is not None or step != self.at:  # who goes on from where it stood has its loss still
            self.at, self.loss = step, loss


def newest_checkpoint_step(run_dir: RunDir) -> int:
    """The step a restart will most likely go on from, from names alone; the worker verifies what it opens."""
    try:
        disk = Folder(run_dir.checkpoints)
        listed = published([Memory(memory_folder(run_dir.path, 0), [], [disk]), disk])
    except ShoalError:  # the worker will say what is wrong
        return 0
    return next((one.name.step for one in listed if one.there and one.on_history and not one.quarantined), 0)


def continues(run_dir: RunDir, steps: int) -> str:
    step = newest_checkpoint_step(run_dir)
    return f"run {run_dir.name} continues; its newest checkpoint is of step {step} of {steps}"
