"""Named points of a save at which tests make something go wrong. Does nothing unless SHOAL_FAULT is set.

SHOAL_FAULT=before-publish            kill -9 there
SHOAL_FAULT=write@1                   only on rank 1
SHOAL_FAULT=write:sleep=5             a slow disk
SHOAL_FAULT=write:error=ENOSPC*2      that error, the first two times
"""

from __future__ import annotations

import errno
import os
import re
import signal
import time
from dataclasses import dataclass

POINTS = (
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
class _Fault:
    point: str
    rank: str | None
    action: str
    value: str
    left: int


def _parse(text: str) -> _Fault | None:
    match = re.fullmatch(r"([a-z-]+)(?:@(\d+))?(?::(kill|sleep|error)(?:=([\w.]+))?(?:\*(\d+))?)?", text)
    if not match or match[1] not in POINTS:
        return None
    return _Fault(match[1], match[2], match[3] or "kill", match[4] or "", int(match[5] or 1 << 30))


_fault = _parse(os.environ.get("SHOAL_FAULT", ""))


def reach(point: str) -> None:
    if _fault is None or _fault.point != point or _fault.left < 1:
        return
    if _fault.rank not in (None, os.environ.get("RANK", "0")):
        return
    _fault.left -= 1
    if _fault.action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif _fault.action == "sleep":
        time.sleep(float(_fault.value))
    else:
        number = getattr(errno, _fault.value)
        raise OSError(number, os.strerror(number))
