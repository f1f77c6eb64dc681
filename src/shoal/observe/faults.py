"""The faults that a journal tells of. Which steps each of them undid is in `shoal.observe.lives`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from shoal.journal.journal import Record

NOBODY = -1  # time that no fault has cost
LEFT = "left"  # why an island is gone that was told to stop
SAME_S = 120.0  # the supervisor and the other islands tell of the same loss within this
UNSEEN = ("hang",)  # causes whose `at` is when somebody lost patience, not when it happened


@dataclass(frozen=True)
class Fault:
    number: int  # in the journal's order
    cause: str
    record: Record  # the `failure`, or the `epoch` of those who noticed that an island was gone
    noticed: float | None  # Unix time
    happened: float | None  # … as far as it is known
    island: int | None = None
    epoch: int | None = None  # that was begun without it
    evidence: str = ""

    def within(self, after: int, before: int) -> tuple[int, int]:
        """When it happened and was noticed (µs), between the last sign of life and the record that tells of it."""
        noticed = before if self.noticed is None else min(max(round(self.noticed * 1e6), after), before)
        happened = after if self.happened is None else min(max(round(self.happened * 1e6), after), noticed)
        return happened, noticed


@dataclass
class Cost:
    """What a fault has cost: parts of the ledger, in microseconds."""

    fault: Fault
    detection_us: int = 0
    recovery_us: int = 0
    lost_us: int = 0
    lost_steps: int = 0  # done again later
    away_us: int = 0  # nobody was running; not in the ledger's total

    def add(self, part: str, duration_us: int) -> None:
        name = f"{part}_us"
        setattr(self, name, getattr(self, name) + duration_us)

    @property
    def total_us(self) -> int:
        return self.detection_us + self.recovery_us + self.lost_us

    def as_json(self) -> dict[str, Any]:
        record, fault = self.fault.record, self.fault
        return {
            "cause": fault.cause,
            "attempt": record.get("attempt"),
            "rank": record.get("rank"),
            "island": fault.island,
            "evidence": fault.evidence,
            "happened": fault.happened,
            "noticed": fault.noticed,
            "detection_s": self.detection_us / 1e6,
            "recovery_s": self.recovery_us / 1e6,
            "lost_s": self.lost_us / 1e6,
            "total_s": self.total_us / 1e6,
            "lost_steps": self.lost_steps,
            "away_s": self.away_us / 1e6,
        }


def faults_of(records: Iterable[Record]) -> list[Fault]:
    """Each `failure`, and each island that the others lost and the supervisor told nothing of. Steps tell nothing."""
    told = list(records)
    found = [(i, _failure(r, told, i)) for i, r in enumerate(told) if r.get("kind") == "failure"]
    found += [(i, _numerics(r)) for i, r in enumerate(told) if r.get("kind") in ("skip", "rewind")]
    stopping = False
    for i, epoch in enumerate(told):
        if epoch.get("kind") in ("open", "stopping"):
            stopping = epoch["kind"] == "stopping"
        if epoch.get("kind") != "epoch":
            continue
        noticed, number = float(epoch.get("noticed") or epoch["t"]), int(epoch["number"])
        for island, why in dict(epoch.get("left") or {}).items():
            if (same := _told_of(found, int(island), noticed)) is not None:
                place, fault = found[same]
                found[same] = (place, replace(fault, noticed=noticed, epoch=number))
            elif not (stopping and why == LEFT):  # when all are told to stop, each leaves: that is no fault
                cause = _why_left(told[:i], int(island)) if why == LEFT else "network"
                found.append((i, Fault(0, cause, epoch, noticed, None, int(island), number, str(why))))
    found.sort(key=lambda item: item[0])
    return [replace(fault, number=n) for n, (_, fault) in enumerate(found)]


def _why_left(told: list[Record], island: int) -> str:
    """An island that left by itself was told to, or kept the others waiting."""
    for record in reversed(told):
        if record.get("kind") == "straggler" and record.get("island") == island:
            return "straggler" if record.get("action") == "evict" else "preempted"
        if record.get("kind") == "epoch":
            break
    return "preempted"


def _numerics(record: Record) -> Fault:
    """A batch that was left out, or a stretch that was: no update was made from it, or it was undone."""
    return Fault(0, "numerics", record, record["t"], record["t"], evidence=str(record.get("why") or ""))


def _failure(record: Record, told: list[Record], place: int) -> Fault:
    cause, at = str(record.get("cause") or "unknown"), record.get("at")
    happened = record.get("since") or (None if cause in UNSEEN else at)
    island, said = record.get("island"), str(record.get("evidence") or "")
    noticed = record.get("noticed") or at
    if cause == "hang" and (hang := _hang(record, told, place)):  # it says for how long, when it was noticed
        noticed = float(hang["t"])
        happened = noticed - float(hang.get("seconds") or 0.0)
    return Fault(0, cause, record, noticed, happened, None if island is None else int(island), None, said)


def _hang(failure: Record, told: list[Record], place: int) -> Record | None:
    """The `hang` record that led to a failure: the last one since somebody was started."""
    for i in range(place - 1, -1, -1):
        record = told[i]
        if record.get("kind") in ("attempt", "island", "open"):
            return None
        if record.get("kind") == "hang" and record.get("rank") == failure.get("rank"):
            return record if record.get("island") == failure.get("island") else None
    return None


def _told_of(found: list[tuple[int, Fault]], island: int, noticed: float) -> int | None:
    """The failure by which the supervisor tells of the loss that the others have noticed."""
    apart = {
        i: abs(float(fault.record["t"]) - noticed)
        for i, (_, fault) in enumerate(found)
        if fault.island == island and fault.epoch is None
    }
    nearest = min(apart, key=lambda i: apart[i], default=None)
    return nearest if nearest is not None and apart[nearest] < SAME_S else None
