"""Processes that pretend to be the ranks of a run: they write a real pulse, and have no model."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.guard.fake import until

from shoal.guard.classify import Failure
from shoal.guard.hang import Hang, Limits, Watch
from shoal.guard.progress import Progress
from shoal.guard.signs import ThreadClock
from shoal.journal.pulse_file import PulseFolder, read_sample

TICK_S = 0.25
COMPUTES_S = 1.0  # between two looks at a rank that computes
# A worker that has made some steps, then does what it is told by the code that follows. `ready` says that it is there.
PRELUDE = """
import ctypes, os, sys, threading, time
from pathlib import Path
from shoal.journal import pulse as pulses
pulses.SAMPLE_S = 0.2
pulse = pulses.Pulse(Path(sys.argv[1]), int(sys.argv[2]))
def ready(): Path(sys.argv[1], f"ready-{sys.argv[2]}").write_text(str(time.monotonic()))
def step(number):
    for phase in ("data", "exchange", "forward", "backward", "optimizer", "record"):
        pulse.mark(phase, number if phase == "data" else None)
for number in range(STEPS): step(number)
pulse.mark("data", STEPS)
"""


class Group:
    """Processes that pretend to be the ranks of a run, and a watch over them whose time is the test's own: a machine
    that is busy makes a test slow, and nothing else."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self.now = 0.0

    def start(self, *programs: str, limits: Limits | None = None, steps: int = 10, sampled: bool = True) -> Watch:
        """Returns when all are `ready`, and (`sampled`) have told where they are since then."""
        for rank, program in enumerate(programs):
            text = PRELUDE.replace("STEPS", str(steps)) + program
            command = [sys.executable, "-c", text, str(self.folder), str(rank)]
            self._processes[rank] = subprocess.Popen(command)
        until(lambda: all(map(self._ready, self.pids)), within_s=120)
        if sampled:
            until(lambda: all(self._sampled_at(r) > self._ready(r) for r in self.pids), within_s=120)
        self.now = time.monotonic()
        return Watch(self.pids, PulseFolder(self.folder), limits)

    @property
    def pids(self) -> dict[int, int]:
        return {rank: process.pid for rank, process in self._processes.items()}

    def named(self, watch: Watch, within_s: float = 60.0) -> Hang:
        found = next((h for h in self.asked(watch, within_s) if h is not None and not h.works), None)
        assert found is not None
        return found

    def never(self, watch: Watch, seconds: float, happens: Callable[[], object] = lambda: None) -> None:
        """`happens` is waited for before each look."""
        for hang in self.asked(watch, seconds, happens):
            assert hang is None, hang.evidence

    def looks(
        self, progress: Progress, seconds: float, happens: Callable[[], object] = lambda: None, tick_s: float = TICK_S
    ) -> Failure | None:
        for _ in range(round(seconds / tick_s)):
            happens()
            self.now += tick_s
            if failure := progress.look(self.now):
                return failure
        return None

    def computes(self, rank: int) -> Callable[[], object]:
        """Happens when that rank has used some CPU time: enough for a look at `COMPUTES_S`."""
        clock = ThreadClock(self.pids[rank])

        def happens() -> None:
            before = clock.look().worked_s
            until(lambda: clock.look().worked_s > before + 0.08, within_s=120)

        return happens

    def end(self) -> None:
        for process in self._processes.values():
            process.kill()
            process.wait()

    def asked(
        self, watch: Watch, seconds: float, happens: Callable[[], object] = lambda: None, tick_s: float = TICK_S
    ) -> Iterator[Hang | None]:
        for _ in range(round(seconds / tick_s)):
            happens()
            self.now += tick_s
            yield watch.verdict(self.now)

    def _ready(self, rank: int) -> float:
        file = self.folder / f"ready-{rank}"
        return float(file.read_text() or 0) if file.exists() else 0.0

    def _sampled_at(self, rank: int) -> float:
        sample = read_sample(self.folder, rank)
        return sample.t - 0.02 if sample and sample.stack and not sample.stack[0].endswith("ready") else 0.0


SLEEPS = "ready(); time.sleep(600)"
WAITS = 'pulse.mark("exchange"); ready(); time.sleep(600)'
ENDLESS = 'pulse.mark("forward"); ready()\nwhile True: pass'
