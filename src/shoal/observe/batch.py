"""A batch in words: how many units are done, what became of the others, and how long it will take."""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

from shoal import readable
from shoal.journal.claims import Runner, listed, runners
from shoal.journal.journal import Record
from shoal.journal.rundir import RunDir
from shoal.journal.suggested import command
from shoal.journal.units import Failed, Folder, Plan, Summary, read_records, read_summary, standing, summary_of
from shoal.observe.causes import CAUSES, OF_BATCHES, OF_UNITS
from shoal.values import BadValue

MOST_NAMED = 3  # failed units in a sentence
MOST_LISTED = 20  # … and in a report
STEADY = 12  # `units` records by which the rate is told


@dataclass(frozen=True)
class Tally:
    units: int
    done: int = 0
    failed: int = 0
    running: int = 0
    tried: int = 0  # failed, and wait for another attempt
    causes: dict[str, int] = field(default_factory=dict)
    told: tuple[Failed, ...] = ()
    took_s: float = 0.0
    attempts: int = 0

    @property
    def waiting(self) -> int:
        return self.units - self.done - self.failed - self.running

    @property
    def over(self) -> bool:
        return self.done + self.failed == self.units

    def sentence(self) -> str:
        parts = [f"{self.done:,} of {self.units:,} units done"]
        if self.failed:
            parts.append(f"{self.failed:,} failed ({self._named()})")
        if self.running:
            parts.append(f"{self.running:,} {'runs' if self.running == 1 else 'run'}")
        if self.waiting:
            again = f" ({self.tried:,} of them after a failure)" if self.tried else ""
            parts.append(f"{self.waiting:,} {'waits' if self.waiting == 1 else 'wait'}{again}")
        return ", ".join(parts)

    def _named(self) -> str:
        said = [f"unit {one.unit} {became(one.cause)}" for one in self.told[:MOST_NAMED]]
        more = self.failed - len(said)
        return "; ".join([*said, *([f"and {more:,} more"] if more else [])])


def became(cause: str) -> str:
    return OF_UNITS.get(cause, f"failed ({cause})")


class Tallier:
    """Counts again and again: what is over is read once."""

    def __init__(self, run_dir: RunDir) -> None:
        self._folder, self._plan = Folder(run_dir), None if not run_dir.exists() else Folder(run_dir).plan()
        self._closed: dict[int, Summary] = {}

    def count(self) -> Tally | None:
        """None where it has not come to its first unit."""
        self._plan = self._plan or self._folder.plan()
        if self._plan is None or not self._folder.blocks.is_dir():
            return None
        plan, round_ = self._plan, newest_round(self._folder)
        parts, running, tried = list[Summary](), 0, 0
        for block, known in sorted(listed(self._folder).items()):
            if block >= plan.blocks:
                continue
            summary = self._closed.get(block)
            if summary is None and known.done:
                summary = self._summary(block)
            if summary is not None and (not summary.failed or summary.round >= round_):
                self._closed[block] = summary
                parts.append(summary)
                continue
            stands = standing(read_records(self._folder.records(block)), plan.units_of(block), round_)
            for one in stands.values():
                running += one.begun is not None
                tried += one.begun is None and bool(one.failures) and not one.done and one.failed is None
            parts.append(summary_of(stands, round_))
        return _summed(plan, parts, running, tried)

    def _summary(self, block: int) -> Summary | None:
        try:
            return read_summary(self._folder.done(block))
        except (OSError, BadValue):
            return None


def _summed(plan: Plan, parts: Iterable[Summary], running: int, tried: int) -> Tally:
    causes: dict[str, int] = {}
    told = list[Failed]()
    done = failed = attempts = 0
    took_s = 0.0
    for part in parts:
        done, failed, attempts = done + part.done, failed + len(part.failed), attempts + part.attempts
        took_s += part.took_s
        told += part.told[: MOST_LISTED - len(told)]
        for cause, count in part.causes.items():
            causes[cause] = causes.get(cause, 0) + count
    return Tally(plan.units, done, failed, running, tried, causes, tuple(told), took_s, attempts)


def newest_round(folder: Folder) -> int:
    with suppress(OSError):
        return max((int(path.name) for path in folder.rounds.iterdir() if path.name.isdecimal()), default=0)
    return 0


def tally_of(run_dir: RunDir) -> Tally | None:
    return Tallier(run_dir).count()


def left_s(records: Iterable[Record], now: float) -> float | None:
    """How long the rest will take, by the newest `units` records of a session; None where nobody can tell."""
    said: list[Record] = []
    for record in records:
        if record["kind"] == "open":
            said = []
        elif record["kind"] == "units":
            said.append(record)
    said = said[-STEADY:]
    if len(said) < 2:
        return None
    first, last = said[0], said[-1]
    over = last["done"] + last["failed"] - first["done"] - first["failed"]
    took_s = float(last["t"]) - float(first["t"])
    if over <= 0 or took_s <= 0:
        return None
    return max(0.0, (last["total"] - last["done"] - last["failed"]) * took_s / over - (now - float(last["t"])))


def doing(records: Iterable[Record], now: float) -> tuple[int, int | None, str] | None:
    """Units that are done, of how many, and a sentence, by the tail of the journal; None where it does not say."""
    records = list(records)
    newest = next((r for r in reversed(records) if r["kind"] == "units"), None)
    if newest is None:
        return None
    tally = Tally(newest["total"], newest["done"], newest["failed"], int(newest.get("running", 0)))
    parts = [f"{tally.done:,} of {tally.units:,} units done"]
    parts += [f"{tally.failed:,} failed"] if tally.failed else []
    parts += [f"{tally.running:,} run" if tally.running > 1 else "1 runs"] if tally.running else []
    parts += [f"{tally.waiting:,} wait"] if tally.waiting > 1 else ["1 waits"] if tally.waiting else []
    rest_s = left_s(records, now)
    parts += [] if rest_s is None else [f"about {readable.duration(rest_s)} left"]
    return tally.done, tally.units, ", ".join(parts)


@dataclass(frozen=True)
class Page:
    """All that is known of a batch, for `shoal report` and `shoal ps NAME`."""

    name: str
    status: str
    why: str
    tally: Tally | None
    left_s: float | None
    runners: tuple[Runner, ...]
    run_dir: RunDir

    def as_json(self) -> dict[str, Any]:
        tally = None if self.tally is None else {**asdict(self.tally), "waiting": self.tally.waiting}
        nodes = [{k: v for k, v in asdict(r).items() if k not in ("machine", "since")} for r in self.runners]
        about = {"name": self.name, "status": self.status, "why": self.why, "left_s": self.left_s}
        return {**about, "units": tally, "runners": nodes}

    def as_text(self) -> str:
        return "\n".join([f"now        {self.now()}", *self._failed(), *self._where()])

    def now(self) -> str:
        if self.tally is None:
            return f"{self.status}: {self.why}"
        parts = [self.tally.sentence()]
        if self.status == "running" and self.left_s is not None and not self.tally.over:
            parts.append(f"about {readable.duration(self.left_s)} left")
        said = f"{self.status}: {', '.join(parts)}"
        if self.status in ("running", "finished") or self.tally.over:
            return said
        return f"{self.status}: {self.why}" if self.status == "stopped" else f"{said}; {self.why}"

    def _failed(self) -> list[str]:
        tally = self.tally
        if tally is None or not tally.failed:
            return []
        lines = [
            f"failed     unit {one.unit}: {one.cause}, {_times(one.attempts)} tried: {one.evidence}"
            for one in tally.told
        ]
        more = tally.failed - len(lines)
        lines += [f"           and {more:,} more"] if more else []
        for cause, count in sorted(tally.causes.items(), key=lambda pair: -pair[1]):
            units = f"{count:,} unit{'s' * (count > 1)}"
            lines.append(f"why        {cause}, of {units}: {_advice(cause)}")
        first = tally.told[0].unit if tally.told else 0
        lines.append(f"next       {command('logs', self.run_dir, f'--unit {first}')} shows what it printed")
        if self.status != "running":
            lines.append(f"           {command('resume', self.run_dir)} tries the failed ones again")
        return lines

    def _where(self) -> list[str]:
        alive = [r for r in self.runners if r.left is None and not r.process_is_gone]
        if self.status != "running" or not alive:
            return []
        return [f"node {r.node:<5} {r.host} (pid {r.pid}), {r.at_once} at once" for r in alive]


def _advice(cause: str) -> str:
    return OF_BATCHES.get(cause) or CAUSES.get(cause) or "read its log"


def _times(count: int) -> str:
    return "once" if count == 1 else "twice" if count == 2 else f"{count} times"


def page_of(run_dir: RunDir, status: str, why: str, records: Iterable[Record], now: float | None = None) -> Page:
    now = time.time() if now is None else now
    tally = tally_of(run_dir)
    rest_s = left_s(records, now) if status == "running" else None
    folder = Folder(run_dir)
    return Page(run_dir.name, status, why, tally, rest_s, tuple(runners(folder)), run_dir)


def report_text(page: Page) -> str:
    lines = [f"{page.name}: a batch\n{page.now()}"]
    if page.tally is not None and page.tally.done:
        tally = page.tally
        each = tally.took_s / tally.done
        lines.append(
            f"units      {readable.duration(tally.took_s)} of work, {readable.duration(each)} each; "
            f"{tally.attempts:,} attempts for {tally.done:,} done"
        )
    nodes = {runner.node for runner in page.runners}
    if nodes:
        lines.append(f"runners    {len(page.runners)} so far, on {len(nodes)} node{'s' * (len(nodes) > 1)}")
    return "\n".join([*lines, *page._failed()])
