"""The folders of a save: hidden while it is written, there or not there afterwards, gone when it has grown old.

A rename makes a checkpoint appear, whole; a rename makes it disappear, whole. Whatever a crash leaves in between has a
hidden name that no reader looks at and that the next `prune` deletes. No torch here.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from pathlib import Path

from shoal.checkpoint.files import sync_folder
from shoal.checkpoint.find import folder_of, matching, open_checkpoint, published
from shoal.errors import CheckpointError

TEMPORARY = re.compile(r"\.tmp-step-\d{8,}-attempt-(\d+)")
SET_ASIDE = re.compile(r"\.(?:bad|old)-step-(\d{8,})")


def temporary_folder(root: Path, step: int, attempt: int) -> Path:
    """With the attempt in its name: a zombie of an earlier attempt never writes into ours."""
    return root / f".tmp-step-{step:08d}-attempt-{attempt}"


def begin(folder: Path) -> None:
    """An empty temporary folder, whatever an earlier try of this save has left in it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()


def publish(folder: Path, root: Path, step: int) -> Path:
    """Makes a complete temporary folder the checkpoint of its step. A bad one that has its place is set aside."""
    sync_folder(folder)
    final = folder_of(root, step)
    if final.exists():
        _set_aside(final, "bad")
    os.rename(folder, final)  # refuses to replace a folder that has appeared since
    sync_folder(root)
    return final


def prune(root: Path, keep: int, attempt: int | None = None) -> list[Path]:
    """Deletes what is older than the newest `keep` good ones, and what dead saves have left. Returns what it deleted.

    For one process (rank 0), while nobody saves. The newest good checkpoint always stays. Bad ones that are newer than
    the oldest kept stay too, as evidence, until they have grown old. With `attempt` given, temporary folders of that
    attempt and of later ones stay.
    """
    keep = max(keep, 1)
    good: list[int] = []
    for step, path in published(root):
        if len(good) < keep and _is_good(path):
            good.append(step)
    old = [path for step, path in published(root) if len(good) == keep and step < good[-1]]
    leftovers = [path for _, path in matching(root, SET_ASIDE)]
    leftovers += [path for of, path in matching(root, TEMPORARY) if attempt is None or of < attempt]
    deleted = []
    # What cannot be deleted now is left for the next time: an old checkpoint too many is no reason to end a run.
    with contextlib.suppress(OSError):
        for path in old:
            leftovers.append(_set_aside(path, "old"))
            deleted.append(path)
    for path in leftovers:
        shutil.rmtree(path, ignore_errors=True)
    return deleted


def _is_good(path: Path) -> bool:
    try:
        open_checkpoint(path)
    except CheckpointError:
        return False
    return True


def _set_aside(path: Path, why: str) -> Path:
    """Renamed before it is deleted: a crash half-way through leaves a leftover, never a published half."""
    aside = path.with_name(f".{why}-{path.name}")
    shutil.rmtree(aside, ignore_errors=True)
    path.rename(aside)
    return aside
