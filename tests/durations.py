"""How long each file of tests takes: seconds on the wall clock and of CPU time, recorded in tests/durations.json.

Tests are ordered by it and laid side by side (tests/lanes.py). `make durations` records it anew. CPU time is that of
the file's process and of all that it waited for; it means the same on a busy machine, the wall clock does not.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median

FILE = Path(__file__).with_name("durations.json")


@dataclass(frozen=True)
class Took:
    wall_s: float
    cpu_s: float

    @property
    def share(self) -> float:
        """Of how many cores it makes use, on average."""
        return self.cpu_s / self.wall_s if self.wall_s > 0 else 1.0

    def __add__(self, other: Took) -> Took:
        return Took(self.wall_s + other.wall_s, self.cpu_s + other.cpu_s)


def read(file: Path = FILE) -> dict[str, Took]:
    """By the name of the work: a file, and which of its tests (`tests/train/test_saves.py slow`)."""
    if not file.exists():
        return {}
    return {name: Took(*both) for name, both in json.loads(file.read_text()).items()}


def typical(known: Mapping[str, Took]) -> Took:
    """For a file that was never recorded: as long as most, and a core of its own."""
    usual_s = median(took.wall_s for took in known.values()) if known else 1.0
    return Took(usual_s, usual_s)


def record(seen: Mapping[str, Took], root: Path, file: Path = FILE) -> None:
    """Puts what was seen in the place of what was known; what has no file any more is forgotten."""
    known = {**read(file), **seen}
    kept = {name: took for name, took in sorted(known.items()) if (root / name.split(" ")[0]).exists()}
    lines = [f"{json.dumps(name)}: [{took.wall_s:.1f}, {took.cpu_s:.1f}]" for name, took in kept.items()]
    file.write_text("{\n" + ",\n".join(lines) + "\n}\n")
