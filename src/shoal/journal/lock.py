"""One supervisor a run: a lock file that the kernel frees when its holder dies, however it dies."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from shoal import values
from shoal.errors import SetupError, UsageError
from shoal.journal.rundir import RunDir
from shoal.journal.suggested import command
from shoal.plain_file import NotPlain, open_plain

_held: dict[Path, int] = {}


@dataclass(frozen=True)
class Holder:
    pid: int
    host: str
    started: float


@contextmanager
def hold(run_dir: RunDir) -> Iterator[Holder]:
    """Holds the run, or refuses because another process does."""
    run_dir.path.mkdir(parents=True, exist_ok=True)
    # The file stays when the run ends: unlinking it would let two processes lock two files of the same name.
    try:
        fd = open_plain(run_dir.pid_file, os.O_RDWR | os.O_CREAT)
    except NotPlain as e:
        raise SetupError(f"{e}: move it away.") from None
    _held[run_dir.pid_file] = fd
    try:
        if not _lock(fd):
            raise UsageError(_already(run_dir, _read(fd)))
        me = Holder(os.getpid(), socket.gethostname(), time.time())
        os.ftruncate(fd, 0)
        os.pwrite(fd, json.dumps(me.__dict__).encode() + b"\n", 0)
        yield me
    finally:
        del _held[run_dir.pid_file]
        os.close(fd)


def fd_of(run_dir: RunDir) -> int | None:
    """The descriptor by which this process holds the run: whoever inherits it holds it too, until the last is gone."""
    return _held.get(run_dir.pid_file)


def holder(run_dir: RunDir) -> Holder | None:
    """Who runs it now; None when nobody does."""
    if not run_dir.supervised():
        return None
    fd = open_plain(run_dir.pid_file)
    try:
        return _read(fd) or Holder(0, "?", 0.0)
    finally:
        os.close(fd)


def _lock(fd: int) -> bool:
    """Tries for a moment: `shoal ps` holds a shared lock for microseconds while it asks whether a run is alive."""
    for left in range(4, -1, -1):
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if left:
                time.sleep(0.05)
    return False


def _read(fd: int) -> Holder | None:
    try:
        said = values.read_object(os.pread(fd, 4096, 0))
        return values.made(Holder, said, pid=values.pid, host=values.short, started=values.real)
    except values.BadValue:  # its holder is writing it right now
        return None


def _already(run_dir: RunDir, by: Holder | None) -> str:
    where = "" if by is None or by.host == socket.gethostname() else f" on {by.host}"
    who = f"as pid {by.pid}{where}" if by else "elsewhere"
    follow, stop = command("logs -f", run_dir), command("stop", run_dir)
    return f"run '{run_dir.name}' is already running {who}; {follow} follows it, {stop} ends it."
