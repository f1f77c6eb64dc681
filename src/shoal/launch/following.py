"""The logs of a launched run: of its processes where the run directory can be seen from here, else of its agents."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

from shoal.journal.rundir import RunDir
from shoal.launch.backend import OVER, Backend, State, backend_of
from shoal.launch.job import Job, on
from shoal.launch.send import state_of
from shoal.launch.watch import visible
from shoal.observe import logs, unit_logs

ASK_EVERY_S = {"local": 0.3}  # of a scheduler that costs nothing to ask
ASK_EVERY_ELSE_S = 5.0
PATIENCE_S = 30.0  # a job that runs for so long and shows no run directory writes it out of sight
LAST_WORDS = 20


class Asked:
    """What the scheduler says of one job, asked now and then; `say` hears of it when it has changed."""

    def __init__(self, job: Job, of: Backend, say: Callable[[str], None]) -> None:
        self._job, self._of, self._say = job, of, say
        self._every_s = ASK_EVERY_S.get(job.backend, ASK_EVERY_ELSE_S)
        self._at = self._since = 0.0
        self._state: State | None = None

    @property
    def state(self) -> State:
        now = time.monotonic()
        if self._state is None or now - self._at >= self._every_s:
            said = state_of(self._job, self._of)
            self._at = now
            if self._state is None or (said.phase, said.why) != (self._state.phase, self._state.why):
                self._since = now
                if said.phase not in ("running", *OVER):
                    self._say(f"{said.phase} on {on(self._job)}: {said.why}")
            self._state = said
        return self._state

    def over(self) -> bool:
        return self.state.phase in OVER

    @property
    def for_s(self) -> float:
        """How long it has said the same."""
        return time.monotonic() - self._since


def lines(
    job: Job,
    workspace: Path,
    follow: bool,
    last: int | None,
    say: Callable[[str], None],
    rank: int | None = None,
    attempt: int | None = None,
    island: int | None = None,
) -> Iterator[str]:
    of = backend_of(job)
    run_dir = visible(job, workspace)
    if not follow:
        yield from _so_far(run_dir, job, of, last, lambda: logs.merged(run_dir, rank, attempt, last, island))
        return
    asked = Asked(job, of, say)
    while not _begun(run_dir := visible(job, workspace), job):
        if asked.over():
            yield from _so_far(run_dir, job, of, last, lambda: logs.merged(run_dir, rank, attempt, last, island))
            say(f"{asked.state.phase}: {asked.state.why}")
            return
        if asked.state.phase == "running" and asked.for_s > PATIENCE_S:
            yield from of.logs(job, True, last)
            return
        time.sleep(logs.POLL_EVERY_S)
    shown, before = False, 20 if last is None else last
    if run_dir.is_batch:
        said = unit_logs.follow(run_dir, None, attempt, before, asked.over)
    else:
        said = logs.follow(run_dir, rank, attempt, before, island, asked.over)
    for line in said:
        shown = True
        yield line
    if not shown or asked.state.phase in ("failed", "gone"):
        say(f"{asked.state.phase}: {asked.state.why}")


def _begun(run_dir: RunDir, job: Job) -> bool:
    """Whether the run directory that can be seen is written by this job, and not only by a start before it."""
    return run_dir.exists() and run_dir.journal_file.stat().st_mtime >= job.submitted


def _so_far(
    run_dir: RunDir, job: Job, of: Backend, last: int | None, merged: Callable[[], Iterator[str]]
) -> Iterator[str]:
    there = run_dir.exists() and any(logs.attempts(folder) for folder in logs.groups(run_dir).values())
    if not (there and _begun(run_dir, job)):
        said = list(of.logs(job, False, last))  # what its agents say, perhaps before there was a run
        if said or not there:
            yield from said
            return
    yield from merged()
