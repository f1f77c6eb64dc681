"""The checkpoints of a script: which there are, and the newest that is whole."""

from __future__ import annotations

import bisect
import glob
import itertools
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from shoal.journal.reading import told
from shoal.journal.rundir import RunDir
from shoal.script.finished import Folder, unfinished
from shoal.script.whole import MOST_FILES, problem
from shoal.spec.script import Script

BY_TORCH_SAVE = "torch.save"  # what the probe sees
BY_CALLBACK = "callback"  # what a framework has told: whole folders, of which the probe sees single files
MOST_TRIED = 8  # of those that are not whole; each is read to its end
MORE_COMPARED = 4  # older ones, by their names alone


@dataclass(frozen=True)
class Found:
    path: str
    step: int | None  # at which the probe saw it; None: it did not
    written: float


def newest_whole(
    run_dir: RunDir, script: Script, verified: set[Found], say: Callable[[str], None] = lambda _: None
) -> Found | None:
    """`verified` are known to be whole, and get another; `say` hears of each that is newer and is not whole."""
    all_of_them = candidates(run_dir, script)
    wrong = unfinished(_folders(run_dir, all_of_them[: MOST_TRIED + MORE_COMPARED]))
    for found in all_of_them[:MOST_TRIED]:
        path = Path(found.path)
        said = None if found in verified else problem(path) or wrong.get(path)
        if said is None:
            verified.add(found)
            return found
        say(f"checkpoint {found.path} is not used: it {said}")
    return None


def _folders(run_dir: RunDir, some: list[Found]) -> list[Folder]:
    begun = [r for _, r in told(run_dir.journal_file).others(frozenset(("start",))) if r["kind"] == "start"]
    times, worlds = [float(r["t"]) for r in begun], [int(r.get("world", 0)) for r in begun]
    starts = [(found, bisect.bisect_right(times, found.written) - 1) for found in some if os.path.isdir(found.path)]
    return [Folder(Path(found.path), start, worlds[start] if start >= 0 else 0) for found, start in starts]


def candidates(run_dir: RunDir, script: Script) -> list[Found]:
    """The newest first. A file that lay there before the run began is none of its own."""
    records = [record for _, record in told(run_dir.journal_file).others(frozenset(("open", "checkpoint")))]
    began = next((float(record["t"]) for record in records if record["kind"] == "open"), 0.0)
    saves = [record for record in records if record["kind"] == "checkpoint"]
    by = BY_CALLBACK if any(record.get("by") == BY_CALLBACK for record in saves) else BY_TORCH_SAVE
    seen = {str(record["path"]): int(record["step"]) for record in saves if record.get("by") == by}
    paths = list(seen)
    if script.checkpoints is not None:
        pattern = os.path.join(script.folder or os.getcwd(), os.path.expanduser(script.checkpoints))
        paths = [os.path.abspath(path) for path in glob.glob(pattern, recursive=True)]
    times = {path: at for path in paths if (at := written(path)) is not None and at >= began}
    return [Found(p, seen.get(p), times[p]) for p in sorted(times, key=lambda p: (times[p], p), reverse=True)]


def written(path: str) -> float | None:
    """Of a folder, when the newest file in it was."""
    try:
        inside = itertools.islice(Path(path).rglob("*"), MOST_FILES) if os.path.isdir(path) else ()
        return max([os.stat(path).st_mtime, *(entry.lstat().st_mtime for entry in inside)])
    except OSError:
        return None
