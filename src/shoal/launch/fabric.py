"""Looks whether NCCL can use the InfiniBand or RoCE that a node has: one sentence if not. Never imports torch.

NCCL falls back to TCP without a word (at NCCL_DEBUG=WARN), and a run is then several times slower on all its nodes.
That is told and not refused: a card of this kind may be there for plain Ethernet alone.
"""

from __future__ import annotations

import ctypes
import os
import resource
from collections.abc import Callable
from pathlib import Path

LIBRARY = "libibverbs.so.1"
LEAST_LOCKED_BYTES = 64 << 20  # NCCL pins some MB for each connection


def problem(
    root: Path = Path("/"),
    load: Callable[[str], object] = ctypes.CDLL,
    locked_bytes: int | None = None,
) -> str | None:
    """What keeps NCCL from the fabric, as a sentence without its full stop; None where nothing does, or there is none.
    `locked_bytes` is what a process may lock in memory; asked of the system unless given."""
    cards = sorted(path.name for path in (root / "sys/class/infiniband").glob("*"))
    if not cards:
        return None
    has = f"this node has InfiniBand or RoCE ({', '.join(cards[:3])}{', …' if len(cards) > 3 else ''})"
    slow = "NCCL will use TCP, at about a tenth of the speed"
    try:
        load(LIBRARY)
    except OSError:
        return f"{has}, and {LIBRARY} cannot be loaded: {slow}; install libibverbs1 and ibverbs-providers"
    doors = sorted((root / "dev/infiniband").glob("uverbs*"))
    if not any(os.access(door, os.R_OK | os.W_OK) for door in doors):
        what = "are closed to this user" if doors else "are not here"
        return f"{has}, and its devices /dev/infiniband/uverbs* {what}: {slow}; give the job or the container access"
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] if locked_bytes is None else locked_bytes
    if limit != resource.RLIM_INFINITY and limit < LEAST_LOCKED_BYTES:
        return (
            f"{has}, and a process may lock {limit >> 10} KiB of memory (ulimit -l): registering buffers will fail; "
            "set memlock to unlimited for jobs"
        )
    return None
