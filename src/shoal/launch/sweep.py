"""Many runs of one run file: sent as an array where the scheduler has them, else one by one, so many at once.

What a sweep is stands in `.shoal/sweeps/NAME/sweep.json`; how its runs go stands in their own directories. So the
command may be stopped and given again at any time: it goes on with what is not done, and sends nothing twice.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, cast

from shoal import values
from shoal.errors import SetupError, ShoalError, SpecError, UsageError
from shoal.journal.rundir import RunDir
from shoal.journal.suggested import needs_mending
from shoal.journal.tail import tail
from shoal.launch.backend import Backend, Rendered, backend, backend_of
from shoal.launch.grid import Point
from shoal.launch.halving import Curve, losers, rungs
from shoal.launch.job import Job, remembered
from shoal.launch.request import Request
from shoal.launch.send import alone, remember_sent, send
from shoal.launch.watch import Seen, look, visible
from shoal.plain_file import NotPlain, read_plain
from shoal.readable import json_number
from shoal.spec.run import Run

MOST_BYTES = 64 << 20  # of its file: 100,000 runs
LOOK_EVERY_S = {"local": 0.5}
LOOK_EVERY_ELSE_S = 10.0


class Arrays(Protocol):
    """What a scheduler can do beside the rest that has arrays of jobs."""

    def render_array(self, requests: Sequence[Request], at_once: int) -> list[Rendered]: ...
    def submit_array(self, requests: Sequence[Request], at_once: int) -> list[Job]: ...


def arrays(of: Backend) -> Arrays | None:
    return cast(Arrays, of) if hasattr(of, "submit_array") else None


@dataclass
class Sweep:
    name: str
    points: dict[str, Point]  # by the names of the runs
    total: int | None  # steps of each, where they can be told here
    early: bool
    file: Path
    stopped: dict[str, dict[str, Any]] = field(default_factory=dict)  # by this sweep: at which rung, with which loss

    @classmethod
    def of(cls, name: str, points: Sequence[Point], base: Run, early: bool, workspace: Path) -> Sweep:
        """The one of that name, begun or gone on with; another one of that name is refused."""
        width = max(3, len(str(len(points) - 1)))
        named = {f"{name}-{i:0{width}}": point for i, point in enumerate(points)}
        total = None if base.train.steps == "auto" else base.steps
        if early and total is None:
            raise UsageError(
                "--stop-early compares runs at shares of train.steps, and how many train.epochs are is known only "
                "where the data is; set train.steps or train.tokens."
            )
        new = cls(name, named, total, early, file_of(name, workspace))
        if not new.file.exists():
            if taken := next((run for run in named if RunDir.of(run, workspace).path.exists()), None):
                raise SpecError(f"run '{taken}' exists and is not of this sweep; `--name OTHER` begins one of its own.")
            return new
        old = cls.read(name, workspace)
        if old.points != new.points or old.total != new.total:
            raise SpecError(
                f"sweep '{name}' exists with other runs ({new.file}); `--name OTHER` begins one of its own, and the "
                "command it was begun with goes on with it."
            )
        old.early = early
        return old

    @classmethod
    def read(cls, name: str, workspace: Path) -> Sweep:
        file = file_of(name, workspace)
        try:
            told = values.read_object(read_plain(file, MOST_BYTES), most_bytes=MOST_BYTES)
            points = values.field(told, "points", values.by_name(values.each(values.short)))
            if name != told.get("name"):
                raise values.BadValue(f"it is of another sweep than '{name}'", "name")
            with values.inside("points"):
                points = {values.below(run): point for run, point in points.items()}
            return cls(
                name,
                {run: tuple(point) for run, point in points.items()},
                values.field(told, "total", values.maybe(values.whole)),
                values.field(told, "early", values.flag),
                file,
                values.field(told, "stopped", values.by_name(_stopped)),
            )
        except FileNotFoundError:
            raise SpecError(
                f"there is no sweep '{name}' in {workspace}; `shoal sweep RUN.yaml …` begins one."
            ) from None
        except NotPlain as e:
            raise SetupError(f"{e}: move it away, the runs themselves are not in it.") from None
        except values.BadValue as e:
            raise SetupError(f"{file} cannot be read ({e}); move it away, the runs themselves are not in it.") from None

    def save(self) -> None:
        told = {k: getattr(self, k) for k in ("name", "points", "total", "early", "stopped")}
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            temporary = self.file.with_name(f".sweep.{os.getpid()}")
            temporary.write_text(json.dumps(told, indent=2) + "\n")
            temporary.rename(self.file)
        except OSError as e:
            raise SetupError(f"cannot write {self.file} ({e.strerror}); mend that, or name another --workspace.") from e


def _stopped(said: object) -> dict[str, Any]:
    loss = values.field(said, "loss", lambda told: told if told in ("nan", "inf", "-inf") else values.real(told))
    return {"step": values.field(said, "step", values.whole), "loss": loss}


def file_of(name: str, workspace: Path) -> Path:
    return workspace / ".shoal" / "sweeps" / name / "sweep.json"


@dataclass(frozen=True)
class Row:
    """How one run of a sweep goes."""

    run: str
    point: Point
    status: str
    step: int
    loss: float | None
    eval_loss: float | None
    why: str
    on: str = "-"

    @property
    def best_by(self) -> tuple[bool, float]:
        """Of held-out data where there are any: such a run comes before one without."""
        loss = self.eval_loss if self.eval_loss is not None else self.loss
        return self.eval_loss is None, float("inf") if loss is None else loss


def rows(sweep: Sweep, workspace: Path) -> list[Row]:
    """All of them, the best first."""
    jobs = _jobs(sweep, workspace)
    seen = look(jobs.values(), workspace)
    found = []
    for run, point in sweep.points.items():
        one = seen.get(run)
        if one is None:
            found.append(Row(run, point, "to come", 0, None, None, "not sent yet"))
            continue
        curve = Curve(visible(one.job, workspace).journal_file)
        curve.refresh()
        status, why = one.status.status, one.status.why
        if run in sweep.stopped and one.over:
            at = sweep.stopped[run]
            status, why = (
                "stopped early",
                f"worse than half of the others at step {at['step']} (loss {float(at['loss']):.4g})",
            )
        found.append(Row(run, point, status, curve.step, curve.last_train, curve.last_eval, why, one.on))
    return sorted(found, key=lambda row: row.best_by)


class Drive:
    """Sends, watches and stops until all are over. Each run is sent at most once in the life of the command."""

    def __init__(self, sweep: Sweep, requests: dict[str, Request], at_once: int, say: Callable[[str], None]) -> None:
        self.sweep, self.requests, self.at_once, self.say = sweep, requests, at_once, say
        first = next(iter(requests.values()))
        self.workspace, self.on = first.workspace, first.launch.on
        self._sent: set[str] = set()
        self._curves: dict[str, Curve] = {}

    def run(self) -> None:
        every_s = LOOK_EVERY_S.get(self.on, LOOK_EVERY_ELSE_S)
        try:
            while self.turn():
                time.sleep(every_s)
        except ShoalError:
            if not _jobs(self.sweep, self.workspace):  # a sweep of which nothing could be sent is none
                self.sweep.file.unlink(missing_ok=True)
            raise

    def turn(self) -> bool:
        """One look at all of them, and what follows from it; False once nothing is left to do."""
        jobs = _jobs(self.sweep, self.workspace)
        seen = look(jobs.values(), self.workspace)
        alive = [run for run, one in seen.items() if not one.over]
        to_send = [run for run in self.sweep.points if run not in self._sent and self._wanted(run, seen.get(run))]
        if self.sweep.early:
            self._stop_the_worst(seen)
        room = max(0, self.at_once - len(alive))
        if to_send and room:
            self._send(to_send if arrays(backend(self.on)) else to_send[:room])
        return bool(alive or to_send)

    def _wanted(self, run: str, one: Seen | None) -> bool:
        """What was never sent, and what has ended before its time and may be cured by another start."""
        if run in self.sweep.stopped:
            return False
        if one is None:
            return True
        ended = one.over and one.status.status not in ("finished", "running")
        return ended and not needs_mending(self._exit_code(one))

    def _exit_code(self, one: Seen) -> int | None:
        """The scheduler's word, or the journal's: schedulers forget what has ended."""
        journal = visible(one.job, self.workspace).journal_file
        if one.state.exit_code is not None or not journal.exists():
            return one.state.exit_code
        return next((r.get("exit_code") for r in reversed(tail(journal)) if r.get("kind") == "close"), None)

    def _send(self, names: list[str]) -> None:
        of = backend(self.on)
        array = arrays(of)
        if array is not None and len(names) > 1:
            requests = [self.requests[name] for name in names]
            for request, job in zip(requests, array.submit_array(requests, self.at_once), strict=True):
                remember_sent(job, request)
            self.say(f"sent {len(names)} runs to {self.on} as an array, {self.at_once} at once")
        else:
            for name in names:
                with alone(RunDir.of(name, self.workspace)):
                    send(self.requests[name])
                self.say(f"sent {name}: {' '.join(self.sweep.points[name])}")
        self._sent.update(names)

    def _stop_the_worst(self, seen: dict[str, Seen]) -> None:
        at = rungs(self.sweep.total or 0)
        for run, one in seen.items():
            curve = self._curves.setdefault(run, Curve(visible(one.job, self.workspace).journal_file, at))
            curve.refresh()
        for rung in at:
            come = {run: loss for run, curve in self._curves.items() if (loss := curve.at(rung)) is not None}
            for run in losers(come):
                if run in self.sweep.stopped or seen[run].over:
                    continue
                self.sweep.stopped[run] = {"step": rung, "loss": json_number(come[run])}
                self.sweep.save()  # before the order: a run that was stopped must not be taken for one that failed
                backend_of(seen[run].job).stop(seen[run].job, now=False)
                self.say(f"stopped {run}: loss {come[run]:.4g} at step {rung} is worse than half of the others'")


def _jobs(sweep: Sweep, workspace: Path) -> dict[str, Job]:
    found = {run: remembered(RunDir.of(run, workspace)) for run in sweep.points}
    return {run: job for run, job in found.items() if job is not None}
