"""Signs of life of a process that says nothing, as the kernel tells them (Linux; elsewhere there are none)."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterable
from dataclasses import dataclass

# The busiest thread works when it has this share of a core; or, where others have the cores, when it wants one for
# this share of the time and gets some of it. (One that sleeps and is woken ten times a second uses a thousandth.)
WORKS, WANTS, GETS = 0.05, 0.3, 0.01

MOST_CHILDREN = 1024

_TICKS_PER_S = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100


@dataclass(frozen=True)
class Signs:
    state: str = "?"  # R, S, D, T, t, Z
    io_bytes: int = 0  # read and written, pipes and files alike

    @property
    def stopped(self) -> bool:
        """By SIGSTOP, a terminal or a debugger."""
        return self.state in ("T", "t")


@dataclass(frozen=True)
class Threads:
    """What a process's threads have done, added up over the looks at it; compare two of them."""

    worked_s: float = 0.0  # CPU time of the busiest one
    wanted_s: float = 0.0  # … and the time that it was ready to run and waited for a core, which others had
    on_disk: bool = False  # one is in an uninterruptible wait now: a disk or a network file system

    def at_work_since(self, before: Threads, seconds: float) -> bool:
        worked, wanted = (self.worked_s - before.worked_s) / seconds, (self.wanted_s - before.wanted_s) / seconds
        return worked >= WORKS or (wanted >= WANTS and worked >= GETS)


class Kernel:
    """What the kernels of the machines that a group runs on say of its processes; this one is of this machine. One for
    each watcher: it remembers what it saw."""

    def __init__(self) -> None:
        self._clocks: dict[int, ThreadClock] = {}

    def signs(self, rank: int, pid: int) -> Signs:
        return signs_of(pid)

    def threads(self, rank: int, pid: int) -> Threads:
        if pid not in self._clocks:
            self._clocks[pid] = ThreadClock(pid)
        return self._clocks[pid].look()

    def moves(self, rank: int, pid: int) -> None:
        """It makes progress: what its threads do meanwhile is not counted."""
        self._clocks.pop(pid, None)

    def fresh(self) -> Iterable[int] | None:
        """The ranks of which something may have changed since this was last asked; None: of any."""
        return None

    def unheard(self, now: float, seconds: float) -> Iterable[int]:
        """The ranks of which nothing has been heard for longer than that, where others tell."""
        return ()

    def here(self, rank: int) -> bool:
        """Whether it can be asked for its stack."""
        return True


class Families(Kernel):
    """A process with all that it has started: a script may wait for the processes that load its data."""

    def __init__(self) -> None:
        super().__init__()
        self._told: dict[int, dict[int, tuple[Threads, int]]] = {}  # pid → of each of its family, when last asked
        self._sums: dict[int, tuple[float, float, int]] = {}  # pid → work, wanted, bytes; of those that are gone, too

    def signs(self, rank: int, pid: int) -> Signs:
        own = signs_of(pid)
        return Signs(own.state, own.io_bytes if pid not in self._sums else self._sums[pid][2])

    def threads(self, rank: int, pid: int) -> Threads:
        family = [pid, *descendants(pid)]
        now = {one: (super(Families, self).threads(rank, one), signs_of(one).io_bytes) for one in family}
        before = self._told.get(pid, {})
        worked, wanted, moved = self._sums.get(pid, (0.0, 0.0, now[pid][1]))
        for one, (threads, io_bytes) in now.items():
            then, io_then = before.get(one, (Threads(), 0 if before else io_bytes))
            worked, wanted = worked + threads.worked_s - then.worked_s, wanted + threads.wanted_s - then.wanted_s
            moved += max(0, io_bytes - io_then)
        for one in before.keys() - now.keys():
            self._clocks.pop(one, None)
        self._told[pid], self._sums[pid] = now, (worked, wanted, moved)
        return Threads(worked, wanted, any(threads.on_disk for threads, _ in now.values()))


def descendants(pid: int) -> list[int]:
    found: list[int] = []
    for parent in itertools.chain([pid], found):  # which grows meanwhile
        try:
            for task in os.listdir(f"/proc/{parent}/task"):
                with open(f"/proc/{parent}/task/{task}/children") as file:
                    found += [int(child) for child in file.read().split()][:MOST_CHILDREN]
        except (OSError, ValueError):  # it has ended; or a kernel that does not tell
            continue
        if len(found) > MOST_CHILDREN:
            break
    return found


class ThreadClock:
    """Of one process. Threads are told apart because a process that sleeps has some that wake up again and again: on a
    busy machine their short waits for a core add up to as much as one thread that computes."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._seen: dict[str, tuple[float, float]] = {}  # thread → CPU time, time that it wanted a core
        self._worked_s = self._wanted_s = 0.0

    def look(self) -> Threads:
        seen: dict[str, tuple[float, float]] = {}
        on_disk = False
        try:
            for task in os.listdir(f"/proc/{self._pid}/task"):
                with contextlib.suppress(OSError, IndexError, ValueError):  # it has ended
                    folder = f"/proc/{self._pid}/task/{task}"
                    fields = _after_name(f"{folder}/stat")
                    on_disk = on_disk or fields[0] == "D"
                    seen[task] = _run_and_wanted_s(folder) or (_cpu_s(fields), _cpu_s(fields))
        except OSError:
            return Threads(self._worked_s, self._wanted_s)
        steps = [tuple(a - b for a, b in zip(seen[t], self._seen.get(t, (0.0, 0.0)), strict=True)) for t in seen]
        if self._seen and steps:
            self._worked_s += max(worked for worked, _ in steps)
            self._wanted_s += max(wanted for _, wanted in steps)
        self._seen = seen
        return Threads(self._worked_s, self._wanted_s, on_disk)


def signs_of(pid: int) -> Signs:
    try:
        fields = _after_name(f"/proc/{pid}/stat")
    except (OSError, IndexError):
        return Signs()
    try:
        with open(f"/proc/{pid}/io") as file:
            counted = dict(line.split(": ") for line in file.read().splitlines())
        io_bytes = int(counted["rchar"]) + int(counted["wchar"])
    except (OSError, ValueError, KeyError):
        io_bytes = 0
    return Signs(fields[0], io_bytes)


def _cpu_s(fields: list[str]) -> float:
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


def _run_and_wanted_s(folder: str) -> tuple[float, float] | None:
    """Exact, and with the time in which the thread waited for a core; None where the kernel does not count it."""
    try:
        with open(f"{folder}/schedstat") as file:
            ran, waited, _ = map(int, file.read().split())
    except (OSError, ValueError):
        return None
    return ran / 1e9, (ran + waited) / 1e9


def _after_name(path: str) -> list[str]:
    """The fields after the name, which may itself have spaces and brackets in it."""
    with open(path) as file:
        return file.read().rsplit(")", 1)[1].split()
