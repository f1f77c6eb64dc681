"""Nodes played on one machine: a folder of memory and a keeper each, and what their ranks leave there."""

from __future__ import annotations

import array
import contextlib
import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shoal.checkpoint.grids import Cut, Grid
from shoal.checkpoint.layout import bytes_of, local_of, view_of
from shoal.checkpoint.memory import keeper
from shoal.checkpoint.memory.generations import remember
from shoal.checkpoint.memory.neighbour import Peer, replicate
from shoal.checkpoint.names import Name, rank_file
from shoal.checkpoint.part import Contents, Part, encode_part, write_part
from shoal.checkpoint.rows import Entry, Layout
from shoal.checkpoint.saving import contents_of
from shoal.checkpoint.store import Folder

TOKEN = bytes(range(32))
ROWS, COLUMNS = 4, 300  # of the matrix that each rank holds


@dataclass(frozen=True)
class Left:
    """What a rank has left in memory."""

    name: Name
    path: Path
    part: Part
    extra: bytes | None

    def send(self, address: str, token: bytes = TOKEN) -> None:
        part, data = self.part, memoryview(self.path.read_bytes())
        replicate(address, token, self.name, part.rank, part.world, data, encode_part(part), self.extra)


def leave(folder: Path, name: Name, rank: int, world: int, value: float | None = None) -> Left:
    """A rank's rows of one matrix, all of them `value` (the step unless told)."""
    grid = Grid((Cut(0, world),), tuple(range(world)))
    contents = Contents(Layout({"model.w": Entry("F32", (world * ROWS, COLUMNS), grid)}), rank)
    rows = array.array("f", [name.step if value is None else value]) * (ROWS * COLUMNS)
    return _leave(folder, name, rank, world, contents, [memoryview(rows).cast("B")], {"step": name.step})


def leave_state(folder: Path, name: Name, rank: int, world: int, tensors: Mapping[str, torch.Tensor]) -> Left:
    """What a save would write of this rank's state. Collective, as the layout is."""
    contents = contents_of(tensors, None, piece_bytes=100, block_bytes=64)
    slices = [bytes_of(view_of(local_of(tensors[p.tensor]), p.start, p.shape).contiguous()) for p in contents.pieces]
    return _leave(folder, name, rank, world, contents, slices, {"step": name.step})


def _leave(
    folder: Path,
    name: Name,
    rank: int,
    world: int,
    contents: Contents,
    slices: list[memoryview],
    about: dict[str, Any],
) -> Left:
    store = Folder(folder)
    part = write_part(store, name, rank, world, contents, slices)
    path = folder / str(name) / rank_file(rank)
    path.parent.mkdir(exist_ok=True)
    (folder / store.staging(str(name)) / rank_file(rank)).rename(path)
    extra = json.dumps(about).encode() if rank == 0 else None
    remember(folder, name, rank, encode_part(part), extra)
    return Left(name, path, part, extra)


@dataclass
class Node:
    folder: Path
    keeper: keeper.Started

    @property
    def address(self) -> str:
        return self.keeper.address

    def peer(self) -> Peer:
        return Peer(self.address, TOKEN)

    def lose(self) -> None:
        """kill -9, and what was in its memory is gone."""
        self.keeper.process.kill()
        self.keeper.process.wait()
        shutil.rmtree(self.folder)


@contextmanager
def nodes(*folders: Path, linger_s: float = 600.0) -> Iterator[list[Node]]:
    """A keeper for each folder; none is left afterwards."""
    started: list[Node] = []
    try:
        started.extend(Node(folder, keeper.start(folder, TOKEN, linger_s=linger_s)) for folder in folders)
        yield started
    finally:
        for node in started:
            with contextlib.suppress(ProcessLookupError):
                node.keeper.stop()
