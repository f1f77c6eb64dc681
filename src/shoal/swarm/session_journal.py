"""A peer's life in its run's journal, as a supervisor's is: when it began, each start of its trainer, how it ended.

So `shoal ps`, `report` and the mirrors know a peer of a swarm like any other run.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shoal.errors import DONE, TRANSIENT, ShoalError, Stopped
from shoal.journal.journal import Journal
from shoal.journal.reading import told
from shoal.masking import mask_arguments


class Session:
    def __init__(self, journal_file: Path) -> None:
        said = [record for _, record in told(journal_file).others(("open",))] if journal_file.exists() else []
        self.number = 1 + max((r["session"] for r in said if r["kind"] == "open"), default=-1)
        self._attempts = 1 + max((r["attempt"] for r in said if r["kind"] == "attempt"), default=-1)
        self._journal = Journal(journal_file)
        self._journal.note(
            "open",
            session=self.number,
            pid=os.getpid(),
            host=socket.gethostname(),
            argv=mask_arguments(sys.argv),
            resumed=self.number > 0,
            began=None,
        )

    def attempt(self) -> dict[str, str]:
        """The trainer is about to be started; what it has to find in its environment."""
        number, self._attempts = self._attempts, self._attempts + 1
        self._journal.note("attempt", attempt=number, world=1, pids=[])
        return {"SHOAL_ATTEMPT": str(number)}

    def warn(self, text: str) -> None:
        self._journal.note("warning", text=text)

    def close(self, status: str, exit_code: int, reason: str) -> None:
        self._journal.note("close", session=self.number, status=status, exit_code=exit_code, reason=reason)
        self._journal.close()


@contextmanager
def session(journal_file: Path, done: str = "all samples are used") -> Iterator[Session]:
    one = Session(journal_file)
    try:
        yield one
    except Stopped as e:
        one.close("stopped", e.exit_code, str(e))
        raise
    except BaseException as e:
        one.close("failed", e.exit_code if isinstance(e, ShoalError) else TRANSIENT, str(e) or type(e).__name__)
        raise
    one.close("done", DONE, done)
