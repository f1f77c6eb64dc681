"""Asks workers for the Python stacks of all their threads (SIGUSR1, faulthandler) and reads what they wrote.

It works where nothing else does: the handler is C, so it needs neither the interpreter's lock nor a thread that runs.
For the same reason it reads frames that a running thread may be changing, and now and then the process dies of it
(Python 3.11: 4 of 50 times when one thread was busy). So only those are asked that are to be killed in any case.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from shoal.guard.signs import signs_of
from shoal.journal.pulse import short
from shoal.journal.pulse_file import dump_file, read_beat
from shoal.plain_file import open_plain

WAIT_S = 0.5
SPY_S, MOST_SPIED = 5.0, 8
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<name>.*)$')
_SPIED = re.compile(r"^    (?P<name>.+) \((?P<file>.*):(?P<line>\d+)\)$")  # py-spy's


def dumps(pids: Mapping[int, int], folder: Path) -> dict[int, str]:
    """What each rank writes when it is asked now; they may not survive it. One that has not begun its pulse is not
    asked, it has nothing to answer. One that is stopped goes on, and the first thing that it does is to answer."""
    asked = {}
    for rank, pid in pids.items():
        beat = read_beat(folder, rank)
        stopped = signs_of(pid).stopped
        if beat is None or beat.pid != pid:
            continue
        size = _size(dump_file(folder, rank))
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR1)
            if stopped:
                os.kill(pid, signal.SIGCONT)
            asked[rank] = size
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline and any(_size(dump_file(folder, r)) == size for r, size in asked.items()):
        time.sleep(0.01)
    time.sleep(0.02 if asked else 0.0)  # one that has begun to write ends soon
    return {rank: _from(dump_file(folder, rank), size) for rank, size in asked.items()}


def spied(pids: Mapping[int, int]) -> dict[int, str]:
    """What py-spy says of those, where it is installed and may look: for processes that cannot be asked."""
    beside = os.path.dirname(sys.executable)
    program = shutil.which("py-spy") or shutil.which("py-spy", path=beside)
    found: dict[int, str] = {}
    for rank, pid in list(pids.items())[:MOST_SPIED] if program else ():
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            asked = [str(program), "dump", "--nonblocking", "--pid", str(pid)]
            found[rank] = subprocess.run(asked, capture_output=True, text=True, timeout=SPY_S, check=True).stdout
    return found


def frames(dump: str) -> tuple[str, ...]:
    """Of the main thread, innermost first: the one that does not begin in `threading`. (Any thread may have taken the
    signal, so the one that is called current says nothing.)"""
    threads: list[list[str]] = []
    for line in dump.splitlines():
        if line.startswith(("Thread ", "Current thread ")):
            threads.append([])
        elif threads and (match := _FRAME.match(line) or _SPIED.match(line)):
            threads[-1].append(f"{short(match['file'])}:{match['line']} {match['name']}")
    return next((tuple(t) for t in threads if t and not t[-1].endswith(" _bootstrap")), ())


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _from(path: Path, offset: int) -> str:
    try:
        with open(open_plain(path), errors="replace") as file:
            file.seek(offset)
            return file.read()
    except OSError:
        return ""
