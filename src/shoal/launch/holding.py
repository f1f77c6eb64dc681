"""The run's lock, for an agent that a scheduler has started."""

from __future__ import annotations

import time
from contextlib import ExitStack

from shoal.errors import TransientError, UsageError
from shoal.guard.history import History
from shoal.journal import lock
from shoal.journal.rundir import RunDir

EARLIER_START_S = 60.0  # longer than schedulers wait between SIGTERM and SIGKILL


def hold(stack: ExitStack, run_dir: RunDir, job: str | None) -> None:
    """The run's lock. An earlier start of this very job may still hold it, on a node that the scheduler has given up
    and whose processes it is yet to end: that is no reason to refuse the run for good."""
    deadline = time.monotonic() + EARLIER_START_S
    while True:
        try:
            stack.enter_context(lock.hold(run_dir))
            return
        except UsageError:
            by, before = lock.holder(run_dir), History.of(run_dir).open
            if by is not None and (job is None or before is None or before.get("job") != job):
                raise
            if time.monotonic() > deadline:
                where = f"on {by.host} " if by else ""
                raise TransientError(
                    f"an earlier start of job {job} still holds run '{run_dir.name}' {where}after "
                    f"{EARLIER_START_S:g} s; end its processes there."
                ) from None
            time.sleep(0.5)
