"""How fast checkpoints get to the disk of the workspace and back: past the page cache, as they are written and read."""

from __future__ import annotations

import mmap
import os
import time
from pathlib import Path

from shoal.bench.clock import digits
from shoal.checkpoint import direct
from shoal.plan.hardware_types import Row

LARGEST_BYTES = 256 << 20
PROBE_BYTES = 4 << 20


def measure(folder: Path, seconds: float) -> list[Row]:
    """Rows of read or write, GB/s. A small file first says how large the other one may be."""
    path = folder / f".shoal-bench-{os.getpid()}.tmp"
    try:
        probed_s = _write(path, PROBE_BYTES)
        fit = int(PROBE_BYTES / probed_s * seconds / 2)
        size = max(min(fit, LARGEST_BYTES) // PROBE_BYTES * PROBE_BYTES, PROBE_BYTES)
        written_s, read_s = _write(path, size), _read(path)
    finally:
        path.unlink(missing_ok=True)
    return [(name, digits(size / taken / 1e9)) for name, taken in (("write", written_s), ("read", read_s))]


def _write(path: Path, size: int) -> float:
    """Random bytes: some disks and file systems make little of zeros."""
    with mmap.mmap(-1, PROBE_BYTES) as piece:
        piece[:] = os.urandom(PROBE_BYTES)
        with memoryview(piece) as view:
            began_s = time.perf_counter()
            direct.write(path, (view for _ in range(size // PROBE_BYTES)))
            taken_s = time.perf_counter() - began_s
    return taken_s


def _read(path: Path) -> float:
    if hasattr(os, "posix_fadvise"):  # for a file system that only knows the way through the cache
        fd = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
    began_s = time.perf_counter()
    for _ in direct.read(path, 0, path.stat().st_size):
        pass
    return time.perf_counter() - began_s
