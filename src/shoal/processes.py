"""Which process of which machine: a number alone may be another process by now, or one of another machine."""

from __future__ import annotations

import os
from pathlib import Path


def began(pid: int) -> str:
    """In ticks since the machine's start, as the kernel says; empty where there is no such process (any more)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]


def boot() -> str:
    """Of this start of the machine; empty where the system does not say."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def machine() -> str:
    """Where numbers of processes mean what they mean here: this start of this machine, and this container."""
    try:
        return f"{boot()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # no Linux: its numbers are believed of nobody
        return ""
