"""The agents of all islands of a run on this machine, as the supervisor sees them. Never imports torch.

They are not tied to it: when it dies they go on, and hold the run's lock until the last of them has ended.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from shoal.errors import DONE, TOLD_TO_STOP
from shoal.guard.classify import Failure
from shoal.guard.island import command, logs_of
from shoal.guard.signals import Signals
from shoal.guard.watch import TICK_S, Ended
from shoal.track.journal import records
from shoal.track.rundir import RunDir

AGAIN_S = 1.0  # before an agent that was killed is started again
FINISH_S = 5.0  # for the other islands, when one has ended the run
MARGIN_S = 10.0  # on top of the grace that the agents give their islands


def agents_of(run_dir: RunDir) -> list[int]:
    """The living agents of a run, also where its supervisor has died: they go on without it."""
    newest = {r["island"]: int(r["agent"]) for r in records(run_dir.journal_file) if r["kind"] == "island"}
    return [pid for pid in newest.values() if _is_agent(pid, run_dir)]


def _is_agent(pid: int, run_dir: RunDir) -> bool:
    """A number alone may be another process by now."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return b"shoal.guard.island" in words and str(run_dir.path).encode() in words


class Agents:
    def __init__(self, run_dir: RunDir, islands: int, lock_fd: int | None = None) -> None:
        self._run_dir = run_dir
        self._lock = [] if lock_fd is None else [lock_fd]
        self._alive = {island: self._start(island) for island in range(islands)}
        self._again: dict[int, float] = {}
        self.codes: dict[int, int] = {}

    @property
    def pids(self) -> dict[int, int]:
        return {island: process.pid for island, process in self._alive.items()}

    def watch(
        self, signals: Signals, grace_s: float, stopping: Callable[[int], None], tick: Callable[[], None]
    ) -> Ended:
        """Returns once no island is left."""
        told, deadline, finish = False, float("inf"), float("inf")
        while self._alive or self._again:
            if DONE in self.codes.values():  # all is trained and saved: whoever comes back now has nothing to do
                finish = min(finish, time.monotonic() + FINISH_S)
                self._again.clear()
            if time.monotonic() > finish:
                self._signal(signal.SIGKILL)
            if signals.told_to_stop and not told:
                told, deadline = True, time.monotonic() + grace_s + MARGIN_S
                stopping(signals.stops[0])
                self._again.clear()
                self._signal(signal.SIGTERM)
            if signals.told_twice or time.monotonic() > deadline:
                self._signal(signal.SIGTERM)
                self._signal(signal.SIGINT)  # after any stop this means: at once
                deadline = float("inf")
            self._reap(told)
            signals.wait(TICK_S)
            tick()
        return self._ended(signals)

    def close(self) -> None:
        self._signal(signal.SIGKILL)  # their workers are tied to them
        for process in self._alive.values():
            process.wait()

    def _reap(self, told: bool) -> None:
        for island, process in list(self._alive.items()):
            code = process.poll()
            if code is None:
                continue
            del self._alive[island]
            if code < 0 and not told:  # somebody has killed the agent, and its island with it
                self._again[island] = time.monotonic() + AGAIN_S
            else:
                self.codes[island] = code
        for island in [island for island, at in self._again.items() if time.monotonic() > at]:
            del self._again[island]
            self._alive[island] = self._start(island)

    def _ended(self, signals: Signals) -> Ended:
        codes = set(self.codes.values())
        if DONE in codes:
            return Ended(())
        if signals.told_to_stop or codes <= {TOLD_TO_STOP}:
            number = signals.stops[0] if signals.stops else signal.SIGTERM
            return Ended((), number, saved=TOLD_TO_STOP in codes)
        island, code = next((i, c) for i, c in sorted(self.codes.items()) if c != TOLD_TO_STOP)
        evidence = f"all islands have ended; island {island} with exit code {code} (its own failure is above)"
        return Ended((), None, Failure(None, "unknown", evidence, code, at=time.time()))

    def _signal(self, number: signal.Signals) -> None:
        for process in self._alive.values():
            process.send_signal(number)

    def _start(self, island: int) -> subprocess.Popen[bytes]:
        logs = logs_of(self._run_dir, island)
        logs.parent.mkdir(parents=True, exist_ok=True)
        with open(logs.with_suffix(".log"), "ab", buffering=0) as out:
            return subprocess.Popen(
                command(self._run_dir, island),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
                pass_fds=self._lock,
                env=os.environ | {"PYTHONUNBUFFERED": "1"},
            )
