"""The table of the GPU suite: a line a test, what it told or why it failed, and what the times mean."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

MARKS = {"passed": "pass", "failed": "FAIL", "skipped": "skip"}


@dataclass(frozen=True)
class Row:
    part: str
    test: str
    outcome: str  # passed, failed, skipped
    s: float
    told: str
    words: str  # why it failed or was skipped

    def line(self) -> str:
        said = "; ".join(text for text in (self.told, self.words) if text)
        return f"{MARKS[self.outcome]}  {self.s:6.1f} s  {_short(self.test)}{said and ': '}{said}"


class Part(Protocol):
    name: str
    what: str
    mps: str
    speed: bool
    s: float
    rows: list[Row]


def table(machine: str, parts: Sequence[Part], seconds: float) -> str:
    lines = [machine, ""]
    for part in parts:
        lines += [_of(part), *(f"  {row.line()}" for row in part.rows), ""]
    return "\n".join([*lines, summary(parts, seconds)])


def summary(parts: Sequence[Part], seconds: float) -> str:
    """Short, for whoever has seen the lines pass by: the parts, and what failed."""
    rows = [row for part in parts for row in part.rows]
    failed = [row for row in rows if row.outcome == "failed"]
    lines = [_of(part) for part in parts]
    lines.append(f"{len(rows) - len(failed)} of {len(rows)} hold, {len(failed)} failed, in {seconds / 60:.1f} minutes.")
    return "\n".join([*lines, *(f"  {row.part}: {row.line()}" for row in failed), ""])


def _of(part: Part) -> str:
    counts = Counter(row.outcome for row in part.rows)
    told = ", ".join(f"{counts[outcome]} {outcome}" for outcome in MARKS if counts[outcome])
    under = {"yes": "under MPS", "no": "without MPS"}.get(part.mps, f"without MPS: {part.mps}")
    means = "its times mean something" if part.speed else "what is right, nothing of speed"
    return f"{part.name}: {part.what}, {under} ({means}): {told or 'nothing'} in {part.s:.0f} s"


def _short(test: str) -> str:
    """The claim in words, and of which case."""
    name, _, case = test.partition("[")
    words = name.rpartition("::")[2].removeprefix("test_").replace("_", " ")
    return f"{words}{case and ' ['}{case}"
