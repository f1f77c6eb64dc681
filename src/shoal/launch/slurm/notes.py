"""What a job remembers from one start to the next: `.shoal/slurm/JOB.json` in the workspace.

Slurm forgets an ended job within minutes (MinJobAge) unless the cluster keeps accounts, and never knew whether a start
made progress.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path

from shoal import values
from shoal.plain_file import read_object

FOLDER = ".shoal/slurm"


@dataclass(frozen=True)
class Notes:
    furthest: int = 0  # the run's furthest step when a start ended
    in_a_row: int = 0  # starts without progress up to now
    excluded: dict[str, str] = field(default_factory=dict)  # nodes that failed the check, and why
    code: int | None = None  # of the newest start that ended
    why: str = ""  # what follows from it, in words
    over: bool = False  # there is no other start
    time: float | None = None


def file_of(workspace: Path, job: str) -> Path:
    return workspace / FOLDER / f"{job}.json"


def read(path: Path) -> Notes | None:
    """None where there are none, or none that can be read: a job goes on without its memory."""
    try:
        return values.made(
            Notes,
            read_object(path, 1 << 20),
            furthest=values.whole,
            in_a_row=values.whole,
            excluded=values.by_name(values.short),
            code=values.maybe(lambda said: values.whole(said, 255)),
            why=values.short,
            over=values.flag,
            time=values.maybe(lambda said: values.real(said, values.LAST_YEAR, 0)),
        )
    except (OSError, values.BadValue):
        return None


def write(path: Path, notes: Notes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(asdict(notes), indent=2) + "\n")
    temporary.rename(path)
