"""Named points of a save at which tests and drills make something go wrong. Does nothing unless SHOAL_FAULT is set.

SHOAL_FAULT=before-publish            kill -9 there
SHOAL_FAULT=write@1                   only on rank 1
SHOAL_FAULT=write:sleep=5             a slow disk
SHOAL_FAULT=write:error=ENOSPC*2      that error, the first two times
SHOAL_FAULT=step:memory=64            ask for memory until it is refused, at most 64 MiB more than there is now
SHOAL_FAULT=step:pace=0.2             no fault: that much more for each, whatever tokens there are
SHOAL_FAULT=write:error=EIO;step      several
SHOAL_FAULT_TOKENS=FOLDER             only while FOLDER has files that nobody has used yet: one each, over all processes
                                      (one named `step@` or `step@4242` is for that point, and that process, alone)
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import signal
import time
from dataclasses import dataclass
from pathlib import Path

POINTS = (
    "step",  # the trainer is about to compute one; no part of a save
    "snapshot",  # the trainer is about to copy its state
    "snapshot-done",  # … has copied it, and the persister has not heard of it
    "write",  # a rank's file is about to be written
    "written",  # … is on disk, and its part is not
    "read-back",  # … and has been read again
    "part",  # the part is on disk
    "before-manifest",  # rank 0: all parts are there
    "before-publish",
    "published",  # it is, and the ledger does not know
    "before-delete",  # retention has chosen
    "done",
)


@dataclass
class Fault:
    point: str
    rank: str | None
    action: str
    value: str
    left: int


def parse(text: str) -> Fault | None:
    if not text:
        return None
    match = re.fullmatch(r"([a-z-]+)(?:@(\d+))?(?::(kill|sleep|pace|error|memory)(?:=([\w.]+))?(?:\*(\d+))?)?", text)
    if not match or match[1] not in POINTS:
        raise ValueError(f"SHOAL_FAULT={text} is none of those that shoal.checkpoint.fault_points describes")
    return Fault(match[1], match[2], match[3] or "kill", match[4] or "", int(match[5] or 1 << 30))


_first, *_rest = os.environ.get("SHOAL_FAULT", "").split(";")
fault, others = parse(_first), [parse(text) for text in _rest]


def reach(point: str) -> None:
    for one in (fault, *others):
        if one is not None and one.point == point:
            _happen(one)


def _happen(fault: Fault) -> None:
    if fault.action == "pace":
        time.sleep(float(fault.value))
        return
    if fault.left < 1 or fault.rank not in (None, os.environ.get("RANK", "0")) or not _takes_a_token(fault.point):
        return
    fault.left -= 1
    if fault.action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault.action == "sleep":
        time.sleep(float(fault.value))
    elif fault.action == "memory":
        _ask_for_memory(int(fault.value or 64) << 20)
    else:
        number = getattr(errno, fault.value)
        raise OSError(number, os.strerror(number))


def _ask_for_memory(more_bytes: int) -> None:
    """The limit is this process's own: the machine has memory left, whatever happens here."""
    import resource

    with open("/proc/self/statm") as f:
        size = int(f.read().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (size + more_bytes, before[1]))
    taken = []
    while True:  # until MemoryError
        taken.append(bytearray(1 << 20))


def _takes_a_token(point: str) -> bool:
    folder = os.environ.get("SHOAL_FAULT_TOKENS")
    if folder is None:
        return True
    for token in sorted(path for path in Path(folder).iterdir() if path.suffix != ".used"):
        whose, at, pid = token.name.partition("@")
        if at and (whose != point or pid not in ("", str(os.getpid()))):
            continue
        with contextlib.suppress(FileNotFoundError):  # another process was faster
            token.rename(f"{token}.used")
            return True
    return False
