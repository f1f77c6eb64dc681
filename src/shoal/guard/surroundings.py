"""What the machine knows about a death: whether the kernel killed for memory, whether the disk is full."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path

FULL_BELOW_BYTES = 1 << 20


@dataclass(frozen=True)
class Change:
    """What changed around a worker group since it started."""

    oom_kills: int = 0
    oom_evidence: str = ""
    free_bytes: int | None = None

    @property
    def disk_is_full(self) -> bool:
        return self.free_bytes is not None and self.free_bytes < FULL_BELOW_BYTES


@dataclass(frozen=True)
class Surroundings:
    """Counters as they were when a worker group started; `change` says what happened since."""

    path: Path
    root: Path = Path("/")
    counts: dict[str, int] = field(default_factory=dict)

    @classmethod
    def now(cls, path: Path, root: Path = Path("/")) -> Surroundings:
        return cls(path, root, oom_counts(root))

    def change(self) -> Change:
        now = oom_counts(self.root)
        # The cgroup's own counter proves that it was one of ours; the machine's only that somebody was killed.
        for where in ("this control group", "this machine"):
            grown = now.get(where, 0) - self.counts.get(where, now.get(where, 0))
            if grown > 0:
                return Change(
                    grown, f"the kernel ran out of memory and killed {grown} process(es) in {where}", self._free()
                )
        return Change(free_bytes=self._free())

    def _free(self) -> int | None:
        try:
            stat = os.statvfs(self.path)
        except OSError:
            return None
        return stat.f_bavail * stat.f_frsize if stat.f_blocks else None


def oom_counts(root: Path = Path("/")) -> dict[str, int]:
    """Processes the kernel has killed for memory, from counters that need no privilege (the kernel log does)."""
    v1, v2 = root / "sys/fs/cgroup/memory", root / "sys/fs/cgroup"
    groups = []
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            groups.append(v2 / group.lstrip("/") / "memory.events")
        elif "memory" in controllers.split(","):
            groups.append(v1 / group.lstrip("/") / "memory.oom_control")
    # Inside a container the path that /proc names may not be mounted; its own group then is the root of the mount.
    groups += [v2 / "memory.events", v1 / "memory.oom_control"]
    places = {"this control group": groups, "this machine": [root / "proc/vmstat"]}
    counts = {}
    for where, files in places.items():
        for file in files:
            found = re.search(r"^oom_kill (\d+)$", _text(file), re.MULTILINE)
            if found:
                counts[where] = int(found[1])
                break
    return counts


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
