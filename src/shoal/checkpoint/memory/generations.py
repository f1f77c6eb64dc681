"""What a node's folder in RAM holds: of each checkpoint the files of some ranks, and what each is of the whole.

A rank's file counts once its part lies beside it. Rank 0's `extra` is sealed with a checksum as parts are: on a disk
that of the manifest does it, and here there is no manifest. A checkpoint in memory is a *generation*; few are kept.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal import values
from shoal.checkpoint.extra import extra_of
from shoal.checkpoint.manifest import Corrupt, seal, sealed
from shoal.checkpoint.memory.ram import Hold, hold, memory_folder, sweep, unused
from shoal.checkpoint.names import RANK_FILE, Name, part_file, rank_file
from shoal.checkpoint.seals import opened
from shoal.checkpoint.store import Folder
from shoal.plain_file import read_plain

COPIES, EXTRA = "copies", "extra.json"
MOST_PART_BYTES = 1 << 30  # of what is read whole
ENOUGH = 2  # generations: while one is being replaced on some nodes, the one before is whole on all


@dataclass(frozen=True)
class Generation:
    ranks: Mapping[int, int]  # rank → bytes of its file
    extra: bool


class Here:
    """The generations in this machine's memory: those of a node's folder, and what the run left here under the numbers
    of other nodes (that of a persister which is not done yet, say)."""

    where = "this node's memory"

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def kept(self) -> dict[Name, Generation]:
        return kept_in(*reversed(self._homes()))

    def part(self, name: Name, rank: int) -> bytes:
        return read_plain(self.path(name, part_file(rank)), MOST_PART_BYTES)

    def extra(self, name: Name) -> bytes:
        return read_plain(self.path(name, EXTRA), MOST_PART_BYTES)

    def read_into(self, name: Name, rank: int, at: int, into: memoryview) -> None:
        path = self.path(name, rank_file(rank))
        Folder(path.parent).read_into(path.name, at, into)

    def path(self, name: Name, file: str) -> Path:
        """Where a file of a generation is, or would be."""
        places = [home / str(name) / file for home in self._homes()]
        return next((place for place in places if place.exists()), places[0])

    def _homes(self) -> list[Path]:
        others = sorted(other for other in self._folder.parent.glob("node-*") if other != self._folder)
        return [home for folder in (self._folder, *others) for home in (folder, folder / COPIES)]


def kept_in(*homes: Path) -> dict[Name, Generation]:
    """What is complete in some folders of generations; of two equals, the later folder's."""
    found: dict[Name, Generation] = {}
    for home in homes:
        for entry in Folder(home).list():
            if name := Name.of(entry):
                ranks, extra = _ranks_in(home / entry)
                before = found.get(name, Generation({}, False))
                found[name] = Generation({**before.ranks, **ranks}, before.extra or extra)
    return {name: one for name, one in found.items() if one.ranks}


def _ranks_in(folder: Path) -> tuple[dict[int, int], bool]:
    """(rank → bytes of its file, whether there is an `extra`)"""
    there, ranks = set(Folder(folder).list()), {}
    for file in there:
        if RANK_FILE.fullmatch(file):
            rank = int(file.removeprefix("rank-").removesuffix(".safetensors"))
            with contextlib.suppress(FileNotFoundError):  # it is being replaced
                if part_file(rank) in there:
                    ranks[rank] = (folder / file).stat().st_size
    return ranks, EXTRA in there


def open_folder(run: str | os.PathLike[str], node: int) -> Hold:
    """For the first process that a start of the run has on a node, before it restores: the folder is ready for use.

    What the run left there stays, and what it left under the number of another node becomes a copy: nodes are
    numbered anew when one is lost. What other runs left behind goes.
    """
    held = hold(memory_folder(run, node))
    sweep(held.folder)
    for leftover in held.folder.glob(".slot-*"):
        leftover.unlink(missing_ok=True)
    for other in held.folder.parent.glob("node-*"):
        if other != held.folder:
            _adopt(other, held.folder)
    return held


def remember(folder: Path, name: Name, rank: int, part: bytes, extra: bytes | None) -> None:
    """A rank's file in the folder counts from now on. `part` is `encode_part`'s, `extra` is JSON, of rank 0 alone."""
    home = folder / str(name)
    if extra is not None:
        put(home / EXTRA, seal_extra(extra))
    put(home / part_file(rank), part)
    retire(folder, name.term)


def settle(folder: Path, restored: Name | None) -> None:
    """After a restore, before there is anything new: the generation that all ranks have read stays, the rest goes."""
    for base in (folder, folder / COPIES):
        for entry in Folder(base).list():
            if (name := Name.of(entry)) and name != restored:
                shutil.rmtree(base / entry, ignore_errors=True)


def retire(folder: Path, term: int, enough: int = ENOUGH) -> None:
    """What earlier starts of the run left goes when this one has left enough of its own."""
    if sum(name.term == term for name in kept_in(folder, folder / COPIES)) < enough:
        return
    for base in (folder, folder / COPIES):
        for entry in Folder(base).list():
            if (name := Name.of(entry)) and name.term < term:
                shutil.rmtree(base / entry, ignore_errors=True)


def drop_copies(folder: Path, rank: int, keep: int = ENOUGH, spare: Path | None = None) -> None:
    """Of a rank's copies the newest stay. A later start may have gone on from an earlier step: its are the newer.

    `spare` is where a file goes that can be used again, if none is there yet.
    """
    copies = kept_in(folder / COPIES)
    newest = sorted((name for name, one in copies.items() if rank in one.ranks), key=lambda n: (n.term, n.step))
    for name in newest[:-keep]:
        home = folder / COPIES / str(name)
        (home / part_file(rank)).unlink(missing_ok=True)
        if spare is not None and not spare.exists():
            (home / rank_file(rank)).rename(spare)
        (home / rank_file(rank)).unlink(missing_ok=True)
        if set(Folder(home).list()) <= {EXTRA}:
            shutil.rmtree(home, ignore_errors=True)


def seal_extra(extra: bytes) -> bytes:
    head = b'{"extra":' + extra
    return head + seal(head)


def read_extra(data: bytes) -> dict[str, Any]:
    """`extra`, from what was sealed."""
    if not sealed(data):
        raise Corrupt(f"{EXTRA} is damaged (its checksum does not match)")
    try:
        return values.field(opened(data), "extra", extra_of)
    except values.BadValue as e:
        raise Corrupt(f"{EXTRA} cannot be understood ({e})") from e


def put(path: Path, data: bytes) -> None:
    """Whole or not at all, in a folder that must be there: one that was forgotten shall not come back."""
    hidden = path.with_name(f".{path.name}.{os.getpid()}")
    hidden.write_bytes(data)
    hidden.rename(path)


def room_bytes(folder: Path) -> int:
    """What may still be put there: it counts as memory of the machine, and of the container if that has a limit."""
    about = os.statvfs(folder)
    limits = [about.f_bavail * about.f_frsize]
    with contextlib.suppress(OSError, KeyError, ValueError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        sizes = {key: int(rest.split()[0]) << 10 for key, _, rest in (line.partition(":") for line in lines)}
        limits.append(sizes["MemAvailable"] - sizes["MemTotal"] // 20)  # the last 5% are not ours to take
    with contextlib.suppress(OSError, KeyError, ValueError):
        group = Path("/sys/fs/cgroup")
        most, now = int((group / "memory.max").read_text()), int((group / "memory.current").read_text())
        cached = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())["inactive_file"]
        limits.append(most - now + int(cached) - most // 20)
    return max(0, min(limits))


def _adopt(other: Path, mine: Path) -> None:
    """Unless somebody uses it. The part is moved last: what is cut off half-way was never there."""
    with contextlib.suppress(FileNotFoundError), unused(other) as nobody:
        if not nobody:
            return
        for base in (other / COPIES, other):
            for name, generation in kept_in(base).items():
                home = mine / COPIES / str(name)
                home.mkdir(parents=True, exist_ok=True)
                files = [f(rank) for rank in generation.ranks for f in (rank_file, part_file)]
                for file in ([EXTRA] if generation.extra else []) + files:
                    (base / str(name) / file).rename(home / file)
        shutil.rmtree(other, ignore_errors=True)
