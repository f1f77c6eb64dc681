"""Which checkpoints a person means: RUN, RUN@STEP, a folder of one or of many, or the address of a bucket.

A run keeps them in tiers: in the memory of its machines while it runs, on its disk, and where it is told to
(`checkpoint.remote`) in a bucket. No torch here.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shoal.checkpoint.find import Found, Listed, check_headers, newest_readable, open_checkpoint, published
from shoal.checkpoint.manifest import Corrupt, decode
from shoal.checkpoint.memory.generations import Here
from shoal.checkpoint.memory.ram import memory_folder
from shoal.checkpoint.memory.tier import Memory
from shoal.checkpoint.names import MANIFEST, Name
from shoal.checkpoint.store import Folder, Store, store_of
from shoal.errors import CheckpointError, ShoalError, UsageError
from shoal.journal.rundir import RunDir, find_run

_STEP = re.compile(r"(.+)@(\d+)")
MEMORY, DISK, REMOTE = "memory", "disk", "remote"


@dataclass(frozen=True)
class Tier:
    name: str
    store: Store


@dataclass(frozen=True)
class Place:
    label: str  # for people
    tiers: tuple[Tier, ...]  # the preferred one first
    run_dir: RunDir | None = None
    step: int | None = None  # no other than of this step,
    term: int | None = None  # and of this term
    alone: Found | None = None  # a folder with a name of its own, copied out of where it was saved
    notes: tuple[str, ...] = ()

    def tier_of(self, store: Store) -> str:
        return next(tier.name for tier in self.tiers if tier.store is store)

    def listed(self) -> list[Listed]:
        """What was published there, good or bad, newest first."""
        everything = published([tier.store for tier in self.tiers])
        return [one for one in everything if self.wants(one.name)]

    def wants(self, name: Name) -> bool:
        return self.step in (None, name.step) and self.term in (None, name.term)

    def at(self, step: int | None, term: int | None = None) -> Place:
        """Narrowed to a step, and to a term of it."""
        place = self if step is None else replace(self, step=step)
        return place if term is None else replace(place, term=term)

    def without(self, *names: str) -> Place:
        """As if these tiers were not there."""
        return replace(self, tiers=tuple(tier for tier in self.tiers if tier.name not in names))

    def take(self, read: Callable[[Found], Any], passed_over: Callable[[str], None]) -> tuple[Found, Any]:
        """The newest that `read` can take in; with a step, the one of that step and no other."""
        if self.alone is not None:
            return self.alone, read(self.alone)
        if self.step is None:
            return newest_readable([tier.store for tier in self.tiers], read, passed_over)
        reasons = []
        for one in self.exactly():
            try:
                found = open_checkpoint(one.store, one.name)
                return found, read(found)
            except Corrupt as e:
                reasons.append(str(e))
        raise CheckpointError(f"the checkpoint of step {self.step} of {self.label} cannot be used: {reasons[0]}.")

    def exactly(self) -> list[Listed]:
        """Those of the one step that was asked for: of the run's history, or of the term that was named."""
        there = [one for one in self.listed() if one.there and (one.on_history or self.term is not None)]
        if not there:
            known = sorted({one.name.step for one in replace(self, step=None, term=None).listed() if one.there})
            has = ", ".join(map(str, known)) if known else "none"
            raise UsageError(f"{self.label} has no checkpoint of {self._asked()}; it has {has}.")
        newest = max(one.name for one in there)
        return [one for one in there if one.name == newest]

    def _asked(self) -> str:
        return f"step {self.step}" + (f", term {self.term}" if self.term is not None else "")


def place_of(text: str, workspace: Path) -> Place:
    """`UsageError` or `CheckpointError` where there is nothing like that."""
    if (match := _STEP.fullmatch(text)) and not os.path.exists(text):
        return place_of(match[1], workspace).at(int(match[2]))
    if "://" in text:
        root, _, last = text.rstrip("/").rpartition("/")
        if (name := Name.of(last)) is not None:
            return Place(text, (Tier(REMOTE, store_of(root)),), None, name.step, name.term)
        return Place(text, (Tier(REMOTE, store_of(text)),))
    path = Path(text).resolve()
    if RunDir.of(text, workspace).exists() or not path.is_dir():
        return _of_run(find_run(text, workspace))
    return _of_run(RunDir(path)) if RunDir(path).exists() else _of_folder(path, text)


def holds_checkpoints(text: str) -> bool:
    """Whether a path is that of a checkpoint, of a folder of some or of a run that has some, and not of a Hugging Face
    model; of an address nobody asks before it is opened."""
    match = _STEP.fullmatch(text)
    folder = Path(match[1] if match and not os.path.exists(text) else text)
    names = _names(folder)
    found = MANIFEST in names or any(map(Name.of, names + _names(folder / "checkpoints")))
    return "://" in text or (found and "config.json" not in names)


def _of_folder(path: Path, label: str) -> Place:
    if (path / MANIFEST).is_file():
        if (name := Name.of(path.name)) is not None:
            return Place(label, (Tier(DISK, Folder(path.parent)),), None, name.step, name.term)
        return _alone(path, label)
    if not any(map(Name.of, _names(path))) and any(map(Name.of, _names(path / "checkpoints"))):
        path = path / "checkpoints"  # of a run whose journal is elsewhere
    return Place(label, (Tier(DISK, Folder(path)),))


def _alone(path: Path, label: str) -> Place:
    store = Folder(path.parent)
    try:
        manifest = decode(store.read(f"{path.name}/{MANIFEST}"))
        found = Found(store, Name(manifest.step, manifest.term), manifest, folder=path.name)
        check_headers(found)
    except CheckpointError as e:
        raise type(e)(f"{label} cannot be used: {e}.") from e
    return Place(label, (Tier(DISK, store),), None, manifest.step, manifest.term, alone=found)


def _of_run(run_dir: RunDir) -> Place:
    from shoal.checkpoint.foreign.shapes import fields_of_weights
    from shoal.spec import load

    notes: tuple[str, ...] = ()
    local, remote = True, None
    try:
        spec = load(run_dir.spec_file, (), fields_of_weights).run
        local, remote = spec.checkpoint.local, spec.remote_checkpoints
    except ShoalError as e:
        notes = (f"whether it has checkpoints elsewhere is not known, as its run file cannot be read ({e})",)
    tiers = [Tier(DISK, Folder(run_dir.checkpoints))] if local else []
    if remote:
        tiers.append(Tier(REMOTE, store_of(remote)))
    nodes = sorted(memory_folder(run_dir.path, 0).parent.glob("node-*"))
    if nodes:  # what this machine holds; other nodes would have to be asked
        durable = [tier.store for tier in tiers]
        tiers.insert(0, Tier(MEMORY, Memory(nodes[0], [Here(node) for node in nodes[1:]], durable)))
    return Place(f"run '{run_dir.name}'", tuple(tiers), run_dir, notes=notes)


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except (OSError, ValueError):
        return []
