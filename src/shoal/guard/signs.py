"""Signs of life of a process that says nothing, as the kernel tells them (Linux; elsewhere there are none)."""

from __future__ import annotations

import os
from dataclasses import dataclass

_TICKS_PER_S = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100


@dataclass(frozen=True)
class Signs:
    state: str = "?"  # R, S, D, T, t, Z
    cpu_s: float = 0.0  # of all its threads, since it began
    io_bytes: int = 0  # read and written, pipes and files alike

    @property
    def stopped(self) -> bool:
        """By SIGSTOP, a terminal or a debugger."""
        return self.state in ("T", "t")


class Kernel:
    """What the kernels of the machines that a group runs on say of its processes; this one is of this machine."""

    def signs(self, rank: int, pid: int) -> Signs:
        return signs_of(pid)

    def waits_for_disk(self, rank: int, pid: int) -> bool:
        return waits_for_disk(pid)

    def here(self, rank: int) -> bool:
        """Whether it can be asked for its stack."""
        return True


HERE = Kernel()


def signs_of(pid: int) -> Signs:
    try:
        fields = _after_name(f"/proc/{pid}/stat")
    except (OSError, IndexError):
        return Signs()
    cpu_s = (int(fields[11]) + int(fields[12])) / _TICKS_PER_S
    try:
        with open(f"/proc/{pid}/io") as file:
            counted = dict(line.split(": ") for line in file.read().splitlines())
        io_bytes = int(counted["rchar"]) + int(counted["wchar"])
    except (OSError, ValueError, KeyError):
        io_bytes = 0
    return Signs(fields[0], cpu_s, io_bytes)


def waits_for_disk(pid: int) -> bool:
    """Whether one of its threads is in an uninterruptible wait now: a disk or a network file system."""
    try:
        return any(_after_name(f"/proc/{pid}/task/{task}/stat")[0] == "D" for task in os.listdir(f"/proc/{pid}/task"))
    except (OSError, IndexError):
        return False


def _after_name(path: str) -> list[str]:
    """The fields after the name, which may itself have spaces and brackets in it."""
    with open(path) as file:
        return file.read().rsplit(")", 1)[1].split()
