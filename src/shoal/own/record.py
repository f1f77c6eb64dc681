"""Which own code was checked, and what came of it: `.shoal/checks/HASH.json` in the workspace (`shoal check`)."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal import values
from shoal.own.files import digest
from shoal.plain_file import read_object
from shoal.spec.run import Run

FOLDER = ".shoal/checks"
MOST_BYTES = 1 << 20


@dataclass(frozen=True)
class Checked:
    passed: bool
    time: float
    failed: list[str]  # rows


def key(run: Run, files: Mapping[str, bytes]) -> str:
    """Of the code, what is named of it, and its settings; the rest of the run file may change."""
    named = json.dumps([run.own.objects, run.own.settings], sort_keys=True)
    return hashlib.sha256(f"{digest(files)} {named}".encode()).hexdigest()


def file_of(workspace: Path, run: Run, files: Mapping[str, bytes]) -> Path:
    return workspace / FOLDER / f"{key(run, files)[:16]}.json"


def write(path: Path, result: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".part")
    temporary.write_text(json.dumps(result, indent=2) + "\n")
    temporary.rename(path)


def read(path: Path) -> Checked | None:
    """None where it was not checked, or nobody can read what was found."""
    try:
        said = read_object(path, MOST_BYTES)
        return Checked(
            values.field(said, "passed", values.flag),
            values.field(said, "time", lambda one: values.real(one, values.LAST_YEAR, 0)),
            values.field(said, "failed", values.each(values.short)),
        )
    except (OSError, ValueError):
        return None


def sentence(workspace: Path, run: Run, files: Mapping[str, bytes], file: str) -> str:
    """For whoever is about to train it. `file`: the run file."""
    found = read(file_of(workspace, run, files))
    if found is None:
        return f"own code has not been checked: `shoal check {file}`"
    day = time.strftime("%Y-%m-%d", time.localtime(found.time))
    if found.passed:
        return f"own code was checked on {day}"
    return f"own code failed its check on {day} ({', '.join(found.failed)}): `shoal check {file}` says why"
