"""The agent of one island: starts its processes, names what ended them, and starts them again. Never imports torch.

    python -m shoal.guard.island RUN_DIR ISLAND

There is one for each island and they need nobody above them: an agent that dies takes its island with it, the others
go on, and whoever started it starts another. When all that started them is gone they still end the run by themselves.
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from shoal.decide.load import load
from shoal.errors import DONE, TOLD_TO_STOP, TRANSIENT
from shoal.guard import orphans
from shoal.guard.budget import Budget
from shoal.guard.classify import Failure
from shoal.guard.history import History
from shoal.guard.progress import Progress, kin_of, of_attempt
from shoal.guard.signals import Signals, signal_name
from shoal.guard.surroundings import Surroundings
from shoal.guard.watch import Ended, watch
from shoal.guard.workers import Workers, log_file, threads_for
from shoal.journal.journal import Journal
from shoal.journal.rundir import RunDir
from shoal.leaving import exit_code, leave_at_once
from shoal.spec.run import Run
from shoal.streams import steady

ISLAND = "SHOAL_ISLAND"


def command(run_dir: RunDir, island: int) -> list[str]:
    return [sys.executable, "-m", "shoal.guard.island", str(run_dir.path), str(island)]


def logs_of(run_dir: RunDir, island: int) -> Path:
    return run_dir.logs / f"island-{island:03d}"


class Agent:
    def __init__(self, run_dir: RunDir, run: Run, island: int, signals: Signals) -> None:
        self._run_dir, self._run, self._island, self._signals = run_dir, run, island, signals
        self._journal = Journal(run_dir.journal_file)
        self._history = History.of(run_dir)
        logs = logs_of(run_dir, island)
        self._start = len(list(logs.iterdir())) if logs.exists() else 0

    def run(self) -> int:
        """Until the island is done, told to leave, or beyond help."""
        code = self._attempts()
        with suppress(OSError):  # a full disk
            orphans.ended(self._run_dir, self._journal, self._island, code, self._run.steps)
        return code

    def _attempts(self) -> int:
        budget, furthest = Budget(self._run.guard.restarts, self._run.guard.backoff_s), self._step
        while True:
            ended = self._attempt()
            self._history.refresh()
            failure = ended.failure
            if failure is None:
                return TOLD_TO_STOP if ended.stop_signal is not None else DONE
            if ended.stop_signal is not None:
                self._fail(failure, "stop")
                return TOLD_TO_STOP
            if not failure.retry:
                self._fail(failure, "give up this island: a retry cannot help")
                assert failure.exit_code is not None
                return failure.exit_code
            wait_s = budget.spend(progressed=self._step > furthest)
            furthest = self._step
            if wait_s is None:
                self._fail(failure, f"give up this island: {budget.restarts} restarts in a row made no progress")
                return TRANSIENT
            self._fail(failure, f"restart island {self._island} in {wait_s:g} s; the others go on")
            until = time.monotonic() + wait_s
            while not self._signals.told_to_stop and (left := until - time.monotonic()) > 0:
                self._signals.wait(left)
            if self._signals.told_to_stop:
                return TOLD_TO_STOP

    @property
    def _step(self) -> int:
        """The furthest in which this island took part: what the others do without it is not its progress."""
        return self._history.by_island.get(self._island, 0)

    def _attempt(self) -> Ended:
        start, self._start = self._start, self._start + 1
        around = Surroundings.now(self._run_dir.path)
        world = int(self._run.resources.processes)
        os.environ[ISLAND] = str(self._island)
        worker = [sys.executable, "-m", "shoal.islands", str(self._run_dir.path)]
        threads = threads_for(self._run.resources.threads, world * self._run.fleet.islands)
        with closing(Workers(worker, world, start, logs_of(self._run_dir, self._island), threads)) as workers:
            pids = list(workers.pids.values())
            self._note("island", island=self._island, start=start, agent=os.getpid(), pids=pids)
            logs = log_file(logs_of(self._run_dir, self._island), start, 0).parent
            note = of_attempt(self._note, island=self._island, start=start)
            kin = kin_of(self._run.mesh)
            progress = Progress(workers.pids, workers.pulses, logs, self._run.guard, note, kin=kin)
            grace_s = self._run.guard.grace_s
            return watch(workers, self._signals, around, grace_s, self._stopping, lambda: None, progress)

    def _stopping(self, number: int) -> None:
        self._note("leaving", island=self._island, signal=signal_name(number))

    def _fail(self, failure: Failure, action: str) -> None:
        self._note("failure", island=self._island, start=self._start - 1, **failure.fields(), action=action)

    def _note(self, kind: str, **fields: Any) -> None:
        self._journal.note(kind, **fields)


def main(argv: list[str]) -> int:
    run_dir, island = RunDir(Path(argv[0])), int(argv[1])
    with Signals() as signals:
        return Agent(run_dir, load(run_dir.spec_file).run, island, signals).run()


if __name__ == "__main__":
    steady()
    leave_at_once(exit_code(lambda: main(sys.argv[1:])))
