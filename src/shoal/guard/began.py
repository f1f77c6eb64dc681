"""When this process was started, by the kernel's word: what a run costs begins before its first line of Python."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path


def began() -> float | None:
    """Unix time. None where the process is not Shoal's own (a notebook, a test), or the system does not say."""
    program = Path(sys.argv[0] if sys.argv else "")
    if program.name != "shoal" and not (program.name == "__main__.py" and "shoal" in program.parts[-3:]):
        return None
    try:
        stat = Path("/proc/self/stat").read_text()
        ticks = int(stat.rpartition(")")[2].split()[19])  # field 22, starttime; the name before it may hold anything
        age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return None
    return time.time() - max(0.0, age_s)
