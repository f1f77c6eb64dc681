"""Which cores of a node each of its processes computes on: near its GPU where the kernel tells, else an even share.

A thread on the other socket reaches a GPU and the memory of its pinned buffers through the link between sockets, and
threads that wander evict each other's caches. The share lies within what this process may use (a cgroup, Slurm, taskset
and numactl say that). Memory needs no order of its own: Linux takes it from the node of the core that first touches it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from shoal.devices import here

CORES = "SHOAL_CORES"  # in the environment of a process that was bound, and of its children: `0-11,96-107`
MOST_CORES = 1 << 16
_RANGE = re.compile(r"(\d{1,6})(?:-(\d{1,6}))?")


@dataclass(frozen=True)
class Share:
    cores: frozenset[int]
    near: bool  # of the NUMA node that its GPU is on

    def __str__(self) -> str:
        return f"cores {ranges(self.cores)}" + " near its GPU" * self.near


def shares(
    processes: int, own: Sequence[str | None], every: Sequence[str | None], may: Collection[int], root: Path = Path("/")
) -> list[Share] | None:
    """Of each process of this node. None where there is nothing to gain: fewer cores than processes, or one NUMA node
    without GPUs. `own` are the buses of the processes' GPUs (none on a CPU run), `every` those of all GPUs here."""
    if len(may) < processes:
        return None
    nodes = {node: cores & set(may) for node, cores in numa_nodes(root).items() if cores & set(may)}
    near = _near_gpus(list(own[:processes]), list(every), nodes, set(may), root) if len(own) >= processes else None
    if near is not None:
        return near
    if not own and len(nodes) < 2:
        return None
    home = {core: node for node, cores in nodes.items() for core in cores}
    every_core = sorted(may, key=lambda core: (home.get(core, -1), *_with_siblings(core, root)))
    return [Share(frozenset(part), False) for part in _parts(every_core, processes)]


def _near_gpus(
    own: list[str | None], every: list[str | None], nodes: dict[int, set[int]], may: set[int], root: Path
) -> list[Share] | None:
    """A GPU's share of its node's cores. All GPUs there share them where nobody has cut this process's cores, so that
    two runs on one machine do not meet; else those of this run alone, since what was cut was meant for it."""
    sharing = every if may >= _online(root) and set(own) <= set(every) else own
    homes = {bus: _home(bus, root) for bus in {*own, *sharing}}
    if any(homes[bus] not in nodes for bus in own):
        return None
    found: dict[str | None, Share] = {}
    for node in {homes[bus] for bus in own}:
        assert node is not None
        there = [other for other in dict.fromkeys(sharing) if homes[other] == node]
        if len(nodes[node]) < len(there):
            return None
        cores = sorted(nodes[node], key=lambda core: _with_siblings(core, root))
        found |= {bus: Share(frozenset(part), True) for bus, part in zip(there, _parts(cores, len(there)), strict=True)}
    return [found[bus] for bus in own]


def bind(gpus: bool, local_rank: int, processes: int, root: Path = Path("/")) -> Share | None:
    """Binds this process, with all threads that it has, and says where; None: it stays where it may be. Cores that it
    was bound to before count as what it may use."""
    if not hasattr(os, "sched_setaffinity") or CORES in os.environ:
        return None
    own = here.on_the_bus(root) if gpus else []
    found = shares(processes, own, here.all_on_the_bus(root) if gpus else [], os.sched_getaffinity(0), root)
    if found is None or local_rank >= processes:
        return None
    share = found[local_rank]
    try:
        os.sched_setaffinity(0, share.cores)
        for thread in os.listdir("/proc/self/task"):
            with suppress(OSError):  # it has just ended
                os.sched_setaffinity(int(thread), share.cores)
    except OSError:  # the system has changed its mind about what we may use
        return None
    os.environ[CORES] = ranges(share.cores)
    return share


def threads(asked: int) -> int:
    """To compute with: no more than there are cores to compute on."""
    mine = read_ranges(os.environ.get(CORES, ""))
    return min(asked, len(mine)) if mine else asked


def numa_nodes(root: Path = Path("/")) -> dict[int, set[int]]:
    found = {}
    for file in (root / "sys/devices/system/node").glob("node*/cpulist"):
        number = file.parent.name[4:]
        if number.isdecimal() and (cores := read_ranges(_text(file))):
            found[int(number)] = cores
    return dict(sorted(found.items()))


def read_ranges(text: str) -> set[int]:
    """`0-3,8` as the kernel writes it; what is no such list is empty."""
    found: set[int] = set()
    for part in text.strip().split(",") if text.strip() else ():
        match = _RANGE.fullmatch(part.strip())
        if match is None:
            return set()
        first, last = int(match[1]), int(match[2] or match[1])
        if not first <= last < MOST_CORES:
            return set()
        found |= set(range(first, last + 1))
    return found


def ranges(cores: Collection[int]) -> str:
    parts: list[list[int]] = []
    for core in sorted(cores):
        if parts and core == parts[-1][1] + 1:
            parts[-1][1] = core
        else:
            parts.append([core, core])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


def _parts(cores: list[int], count: int) -> list[list[int]]:
    """As even as can be, each of neighbours."""
    return [cores[len(cores) * i // count : len(cores) * (i + 1) // count] for i in range(count)]


def _with_siblings(core: int, root: Path) -> tuple[int, int]:
    """Threads of one core lie side by side, so that no two processes share one."""
    siblings = read_ranges(_text(root / f"sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list"))
    return (min(siblings, default=core), core)


def _online(root: Path) -> set[int]:
    return read_ranges(_text(root / "sys/devices/system/cpu/online")) or set().union(*numa_nodes(root).values())


def _home(bus: str | None, root: Path) -> int | None:
    """The NUMA node of a device; None where the kernel does not know it."""
    text = "" if bus is None else _text(root / f"sys/bus/pci/devices/{bus}/numa_node").strip()
    return int(text) if text.isdecimal() else None


def _text(file: Path) -> str:
    try:
        return file.read_text(errors="replace")
    except OSError:
        return ""
