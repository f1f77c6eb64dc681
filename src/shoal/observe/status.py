"""What a run is doing, and why, from the ends of its journal: cheap enough for a thousand runs at once."""

from __future__ import annotations

import re
import time
from collections.abc import Container
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from shoal import readable, values
from shoal.errors import SetupError, ShoalError
from shoal.journal.journal import Odd, Record, read
from shoal.journal.rundir import RunDir, damaged_in, runs_in
from shoal.journal.suggested import going_on
from shoal.journal.tail import REMARKS, head, telling
from shoal.observe.throughput import Rate, recent
from shoal.plain_file import read_object, read_plain

TAIL_BYTES = (8 * 1024, 512 * 1024)  # the second only where the first holds no step
MOST_BYTES = 1 << 24  # of a run file
SILENT_S = 120.0  # a run without a supervisor (torchrun) that says nothing for so long is taken for dead
NAMES = {"done": "finished", "stopped": "stopped", "failed": "failed"}
# The resolved run file is plain block YAML: its `steps` is found without parsing all of it, a thousand times faster.
_STEPS = re.compile(r"^train:\n(?:[ #].*\n|\n)*?  steps: *(\d+)", re.MULTILINE)


@dataclass(frozen=True)
class Status:
    name: str
    status: str  # running, finished, stopped, failed, dead, damaged
    step: int
    total: int | None
    loss: float | None
    tokens_per_s: float | None
    started: float
    updated: float
    why: str

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "loss": readable.json_number(self.loss)}


def status_of(run_dir: RunDir, now: float | None = None, alive: bool = False) -> Status:
    """`alive`: somebody else knows that it is (a scheduler); locks do not reach from every node to here."""
    now = time.time() if now is None else now
    first = head(run_dir.journal_file) or {"t": _begun(run_dir)}
    records = telling(run_dir.journal_file, TAIL_BYTES[0])
    if run_dir.is_batch:
        return _of_batch(run_dir, first, records, now, alive)
    if not any(r.get("kind") == "step" for r in records):
        records = telling(run_dir.journal_file, TAIL_BYTES[1])
    said = [r for r in records if r.get("kind") not in REMARKS]
    last = said[-1] if said else first
    updated = float(last.get("t", 0.0))
    total = _total(run_dir, records)
    speed = (rate.tokens_per_s or None) if (rate := _rate(records)) else None  # nobody counts those of a script
    step, loss = _stands(records)
    name, why = _state(run_dir, said, last, step, total, now, alive)
    return Status(run_dir.name, name, step, total, loss, speed, float(first.get("t", 0.0)), updated, why)


def _of_batch(run_dir: RunDir, first: Record, records: list[Record], now: float, alive: bool) -> Status:
    """Units in the place of steps."""
    from shoal.observe.batch import doing  # most runs are none

    said = [r for r in records if r.get("kind") not in REMARKS]
    last = said[-1] if said else first
    known = doing(records, now)
    done, total, sentence = known or (0, None, "starting")
    name, why = _state(run_dir, said, last, done, total, now, alive, "unit")
    why = sentence if name == "running" else why
    times = float(first.get("t", 0.0)), float(last.get("t", 0.0))
    return Status(run_dir.name, name, done, total, None, None, *times, why)


def _begun(run_dir: RunDir) -> float:
    """When a run began that has not written a whole line yet. A journal of lines that are no records is no such."""
    odd = Odd()
    next(read(run_dir.journal_file, odd=odd), None)
    if odd.count:
        raise SetupError(
            f"{run_dir.journal_file.name}: none of its lines is a record, so nothing of the run is known; restore "
            f"{run_dir.journal_file} from a copy, or move the run's directory away."
        )
    return run_dir.journal_file.stat().st_mtime


def damaged(name: str, what: str, at: float) -> Status:
    """In the place of one that cannot be read."""
    return Status(name, "damaged", 0, None, None, None, at, at, f"damaged: {what}")


def statuses(folder: Path, without: Container[str] = ()) -> list[Status]:
    """Every run of a workspace but those, the newest last; one that cannot be read does not hide the others."""
    now = time.time()
    found = []
    for run_dir in runs_in(folder):
        if run_dir.name in without:
            continue
        try:
            found.append(status_of(run_dir, now))
        except Exception as e:  # whatever is wrong with one of them
            kind = "" if isinstance(e, ShoalError | values.BadValue | OSError) else f"{type(e).__name__}: "
            found.append(damaged(run_dir.name, f"{kind}{e}".replace(f"{run_dir.path}/", "", 1), now))
    found += [damaged(name, what, now) for name, what in damaged_in(folder).items() if name not in without]
    return sorted(found, key=lambda s: s.started)


def _state(
    run_dir: RunDir,
    said: list[Record],
    last: Record,
    step: int,
    total: int | None,
    now: float,
    alive: bool,
    counted: str = "step",
) -> tuple[str, str]:
    if last.get("kind") == "close":
        name = NAMES.get(str(last.get("status")), str(last.get("status")))
        reason = str(last.get("reason") or name)
        if name == "finished" or "shoal resume" in reason:
            return name, reason
        return name, f"{reason.rstrip('.')}; {going_on(run_dir, last.get('exit_code'))}"
    silent_s = now - float(last.get("t", now))
    if alive or run_dir.supervised() or (not run_dir.pid_file.exists() and silent_s < SILENT_S):
        return "running", _doing(said, step, total, silent_s)
    ago = readable.duration(max(0.0, silent_s))
    who = _holder(run_dir)
    more = going_on(run_dir, None)
    at = f"at step {step}" if counted == "step" else f"with {step:,} {counted}s done"
    return "dead", f"{who} went away without a word {ago} ago, {at}; {more}"


def _doing(said: list[Record], step: int, total: int | None, silent_s: float) -> str:
    """Of a live run: the newest thing that has begun."""
    for record in reversed(said):
        match record.get("kind"):
            case "step" | "eval" | "checkpoint" | "checkpoint_failed":
                return f"training{_left(said, step, total)}" + (
                    f"; no step for {readable.duration(silent_s)}" if silent_s > 60 else ""
                )
            case "failure":
                return f"recovering: {readable.failure(record)}"
            case "stopping":
                return f"told to stop ({record.get('signal')}); saving the state"
            case "start" if record.get("script"):
                return "the script runs, and no step of it has been seen"
            case "open" | "attempt" | "start" | "decision":
                if any(r.get("kind") == "failure" for r in said):
                    continue
                return "starting"
    return "running"


def _left(said: list[Record], step: int, total: int | None) -> str:
    rate = _rate(said)
    if total is None or rate is None:
        return ""
    return f", {readable.duration(max(0.0, rate.step_s * (total - step)))} left"


def _rate(said: list[Record]) -> Rate | None:
    steps, starts = ([r for r in said if r.get("kind") == kind] for kind in ("step", "start"))
    return recent(steps, starts)


def _holder(run_dir: RunDir) -> str:
    try:
        known = read_object(run_dir.pid_file)
        pid, host = values.field(known, "pid", values.pid), values.field(known, "host", values.short)
        return f"its supervisor (pid {pid} on {host})"
    except (OSError, values.BadValue):
        return "its supervisor"


def _stands(records: list[Record]) -> tuple[int, float | None]:
    """The step at which it stands, and its loss: one that fell back to an older checkpoint stands there again."""
    losses = {int(r["step"]): float(r["loss"]) for r in records if r.get("kind") == "step"}
    for record in reversed(records):
        if record.get("kind") in ("step", "start", "rewind"):
            step = int(record.get("to" if record["kind"] == "rewind" else "step") or 0)
            return step, losses.get(step)
    return 0, None


def _last(records: list[Record], kind: str) -> Record:
    return next((r for r in reversed(records) if r.get("kind") == kind), {})


def _total(run_dir: RunDir, records: list[Record]) -> int | None:
    if total := _last(records, "start").get("total"):
        return int(total)
    return total_steps(run_dir.spec_file)


def total_steps(spec_file: Path) -> int | None:
    """`train.steps` of a run file."""
    try:
        text = read_plain(spec_file, MOST_BYTES).decode()
        if found := _STEPS.search(text):
            return int(found[1])
        spec = yaml.safe_load(text)
    except (OSError, ValueError, yaml.YAMLError, RecursionError):
        return None
    train = spec.get("train") if isinstance(spec, dict) else None
    steps = train.get("steps") if isinstance(train, dict) else None
    return steps if isinstance(steps, int) else None
