"""One session of a batch on one node, from `open` to `close`: what it journals, what it shows, how it ends."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Iterable
from contextlib import closing, suppress
from pathlib import Path

from shoal.batch.attempt import Work
from shoal.batch.runner import Batched
from shoal.batch.screen import Screen
from shoal.decide.batch import DecidedBatch, items_of
from shoal.decide.decision import Decision
from shoal.errors import DONE, TOLD_TO_STOP, TRANSIENT, WRONG_ENVIRONMENT, ShoalError
from shoal.guard.began import began
from shoal.guard.crew import Decision as Asked
from shoal.guard.history import History
from shoal.guard.signals import Signals, signal_name
from shoal.journal.journal import Journal
from shoal.journal.rundir import RunDir
from shoal.journal.suggested import command
from shoal.journal.units import Folder
from shoal.masking import mask_arguments
from shoal.observe.batch import Tallier, Tally

TELL_EVERY_S = 5.0  # a `units` record; the more a look costs, the fewer
OURS = ("SHOAL_TOKEN", "SHOAL_HEAD")  # what agents know each other by is no business of a unit


def run_batch(
    run_dir: RunDir,
    decided: DecidedBatch,
    *,
    node: int = 0,
    nodes: int = 1,
    job: str | None = None,
    asked: Iterable[Asked] = (),
    fresh: bool = True,
) -> int:
    """This node's part, to its end. Node 0 writes the run's journal and leaves with the run's exit code. `fresh`: what
    was decided is journaled."""
    folder = Folder(run_dir)
    items = items_of(decided.batch, folder)
    data = None if items is None else ("\n".join(items) + "\n").encode()
    plan = folder.begin(len(items) if items is not None else int(decided.batch.units or 0), data)
    with Signals() as signals, closing(Journal(_journal_of(run_dir, folder, node))) as journal:
        runner = Batched(folder, plan, decided.run, work_of(decided, plan.units, items), node, nodes, job)
        with closing(Screen(plan.units, node)) as screen:
            session = Session(run_dir, node, journal, screen)
            session.open(job, [*(decided.decisions if fresh else ()), *asked])
            try:
                code = runner.run(signals, session.tick)
            except BaseException as e:
                known = isinstance(e, ShoalError)
                session.close(
                    "failed", e.exit_code if isinstance(e, ShoalError) else TRANSIENT, str(e) if known else repr(e)
                )
                raise
            stopped_by = signal_name(signals.stops[0]) if signals.stops else ""
            code, status, reason = session.end(code, stopped_by)
            session.close(status, code, reason)
        session.summary(status, reason)
    return code


def work_of(decided: DecidedBatch, units: int, items: list[str] | None) -> Work:
    env = {name: value for name, value in os.environ.items() if name not in OURS}
    if decided.run.resources.threads != "auto" or "OMP_NUM_THREADS" not in env:
        env["OMP_NUM_THREADS"] = str(decided.threads)
    env |= {"PYTHONUNBUFFERED": "1", "SHOAL_BATCH": decided.run.name, **decided.batch.env}
    return Work(decided.batch, units, items, env, decided.gpus, decided.at_once)


def _journal_of(run_dir: RunDir, folder: Folder, node: int) -> Path:
    """Of one writer each: a line appended from two nodes over NFS may be lost."""
    return run_dir.journal_file if node == 0 else folder.path / f"node-{node:05d}.jsonl"


class Session:
    def __init__(self, run_dir: RunDir, node: int, journal: Journal, screen: Screen) -> None:
        self._run_dir, self._node, self._journal, self._screen = run_dir, node, journal, screen
        self._tallier, self._told = Tallier(run_dir), Tally(1)
        self._number = History.of(run_dir).sessions if node == 0 else 0
        self._next = 0.0

    def open(self, job: str | None, decisions: Iterable[Decision | Asked]) -> None:
        self._journal.append(
            "open",
            session=self._number,
            pid=os.getpid(),
            host=socket.gethostname(),
            argv=mask_arguments(sys.argv),
            resumed=self._number > 0,
            began=began(),
            **({} if job is None else {"job": job}),
        )
        for one in decisions:
            self._journal.append("decision", key=one.key, value=one.value, why=one.why)
        self.count()

    def tick(self, runner: Batched) -> None:
        if runner.lost_before:
            text = f"{runner.lost_before} processes of a runner that was killed were still there, and were ended"
            self._note("warning", text=text)
            runner.lost_before = 0
        for unit, failure, again_s in runner.news:
            self._screen.failed(unit, failure, again_s)
        runner.news.clear()
        if time.monotonic() >= self._next:
            self.count()

    def count(self) -> Tally:
        began_at = time.monotonic()
        tally = self._tallier.count() or self._told
        if tally != self._told:
            self._told = tally
            if self._node == 0:
                self._note("units", done=tally.done, failed=tally.failed, running=tally.running, total=tally.units)
            self._screen.show(tally)
        self._next = time.monotonic() + max(TELL_EVERY_S, 50 * (time.monotonic() - began_at))
        return tally

    def end(self, code: int, stopped_by: str) -> tuple[int, str, str]:
        """Exit code, status and a sentence."""
        tally = self.count()
        if code == TOLD_TO_STOP:
            return code, "stopped", f"told to stop ({stopped_by}); {tally.sentence()}"
        if self._node != 0:
            return DONE, "done", f"nothing is left that node {self._node} could take; {tally.sentence()}"
        if tally.failed:
            return WRONG_ENVIRONMENT, "failed", tally.sentence()
        return DONE, "done", f"all {tally.units:,} units are done"

    def close(self, status: str, code: int, reason: str) -> None:
        self._note("close", session=self._number, status=status, exit_code=code, reason=reason)

    def summary(self, status: str, reason: str) -> None:
        name = self._run_dir.name
        with suppress(OSError):
            if status == "failed":
                print(f"shoal: batch {name} failed: {reason}.", file=sys.stderr)
            else:
                print(f"{f'node {self._node} of ' if self._node else ''}batch {name} {status}: {reason}.")
            print(f"  directory  {self._run_dir.path}")
            if status == "failed":
                first = next((one.unit for one in self._told.told), 0)
                print(f"  next       {command('report', self._run_dir)}: which failed, and why")
                print(f"             {command('logs', self._run_dir, f'--unit {first}')}: what it printed")
            if status != "done":
                again = "tries the failed ones again" if status == "failed" else "goes on"
                print(f"  next       {command('resume', self._run_dir)}: {again}")
            sys.stdout.flush()

    def _note(self, kind: str, **said: object) -> None:
        self._journal.note(kind, **said)
