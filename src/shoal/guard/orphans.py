"""The end of a run whose supervisor has died: its islands go on, and the last agent to end closes the journal."""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shoal.errors import DONE, TOLD_TO_STOP, TRANSIENT
from shoal.journal.journal import Journal, Record
from shoal.journal.reading import told
from shoal.journal.rundir import RunDir


def agents_of(run_dir: RunDir) -> list[int]:
    """The living agents of a run, also where its supervisor has died: they go on without it."""
    said = [record for _, record in told(run_dir.journal_file).others(("island",)) if record["kind"] == "island"]
    newest = {record["island"]: int(record["agent"]) for record in said}
    return [pid for pid in newest.values() if _is_agent(pid, run_dir)]


def _is_agent(pid: int, run_dir: RunDir) -> bool:
    """A number alone may be another process by now."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return b"shoal.guard.island" in words and str(run_dir.path).encode() in words


def ended(run_dir: RunDir, journal: Journal, island: int, code: int, steps: int) -> None:
    """For an agent, as its last act. Nothing where a supervisor is there to say how the run has ended."""
    if not _orphan(_session(run_dir)):
        return
    with _one_at_a_time(run_dir):
        journal.append("ended", island=island, agent=os.getpid(), exit_code=code)
        said = _session(run_dir)
        codes = {int(r["agent"]): int(r["exit_code"]) for r in said if r["kind"] == "ended"}
        if any(r["kind"] == "close" for r in said) or set(agents_of(run_dir)) - set(codes):
            return
        status, code, reason = _how(set(codes.values()), steps)
        journal.append("close", session=said[0]["session"], status=status, exit_code=code, reason=reason)


def _how(codes: set[int], steps: int) -> tuple[str, int, str]:
    if DONE in codes:
        return "done", DONE, f"all {steps} steps are done"
    if codes == {TOLD_TO_STOP}:
        return "stopped", TOLD_TO_STOP, "all islands were told to stop; their supervisor had died before"
    return "failed", TRANSIENT, "no island could go on (their failures are above); their supervisor had died before"


def _session(run_dir: RunDir) -> list[Record]:
    """From its `open` on; without the steps."""
    said = [record for _, record in told(run_dir.journal_file).others(("open", "close", "ended"))]
    begin = max((i for i, r in enumerate(said) if r["kind"] == "open"), default=len(said))
    return said[begin:]


def _orphan(session: list[Record]) -> bool:
    if not session or session[0].get("host") != socket.gethostname():
        return False
    pid = int(session[0]["pid"])
    if os.getppid() == pid:
        return False
    try:
        return b"shoal" not in Path(f"/proc/{pid}/cmdline").read_bytes()  # nothing, of one that nobody has waited for
    except OSError:
        return True


@contextmanager
def _one_at_a_time(run_dir: RunDir) -> Iterator[None]:
    """Two that end in the same moment: the second one sees that the first has."""
    fd = os.open(run_dir.path, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
