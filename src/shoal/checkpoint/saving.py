"""Saves the state of all ranks as one checkpoint, or as none, and returns when it is on disk.

Each rank writes the slices that are its own, into a folder that all ranks see (a shared file system, one machine, or a
bucket); rank 0 puts the manifest beside them and publishes. Nobody gathers tensors. What `shoal.checkpoint.saver` does
in the background is the same, by the same parts.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from shoal.checkpoint.blocks import BLOCK_BYTES
from shoal.checkpoint.error_text import not_saved, words_of
from shoal.checkpoint.find import Root
from shoal.checkpoint.layout import (
    Holders,
    bytes_of,
    dtype_of,
    grids_of,
    held_boxes,
    local_of,
    view_of,
)
from shoal.checkpoint.ledger import Fenced
from shoal.checkpoint.names import MANIFEST, Name
from shoal.checkpoint.part import Contents, ReadBack, write_part
from shoal.checkpoint.publish import complete
from shoal.checkpoint.rows import PIECE_BYTES, Entry, Layout
from shoal.checkpoint.store import Store, store_of
from shoal.errors import CheckpointError, ShoalError, TransientError
from shoal.parallel import agree

_FENCED, _FAILED = "fenced", "failed"  # the first word of what travels between ranks: which error all of them raise
Tensors = Mapping[str, torch.Tensor]


class SaveError(TransientError):
    """This checkpoint could not be written. The older ones are untouched and training may go on."""

    rank, why = 0, ""  # which rank failed, and its words


@dataclass(frozen=True)
class Saved:
    name: Name
    bytes: int  # of the tensors' files, over all ranks
    seconds: float


def save(
    root: Root,
    step: int,
    tensors: Tensors,
    extra: dict[str, Any],
    term: int = 0,
    holders: Holders | None = None,
    piece_bytes: int = PIECE_BYTES,
    read_back: ReadBack = "headers",
    block_bytes: int = BLOCK_BYTES,
) -> Saved:
    """Collective. `tensors` are plain ones, equal wherever they are, or DTensors; `extra` is JSON (rank 0's counts).

    Ranks may have different tensors, as the stages of a pipeline do. `holders[name]` lists the ranks that have a whole
    copy of a plain tensor (without it: every rank), of which one writes. For a tensor of any kind, a rank that is not
    listed writes nothing of it: what it has is a copy of what another stage owns (tied embeddings).

    When any rank fails, all raise the same `SaveError`, and nothing of this checkpoint remains. When a newer term has
    taken over, all raise `Fenced`: this process must end.
    """
    began = time.perf_counter()
    rank, world = agree.here()
    store, name = store_of(root), Name(step, term)
    written: list[int] = []

    def write_mine() -> None:
        contents = contents_of(tensors, holders, piece_bytes, block_bytes)
        slices = _slices(tensors, contents)
        written.append(write_part(store, name, rank, world, contents, slices, read_back).file.bytes)

    try:
        _together(step, partial(_make_room, store, name), rank == 0)
        _together(step, write_mine)
        _together(step, partial(complete, store, name, world, extra), rank == 0)
    except (SaveError, Fenced):
        if rank == 0:
            _give_up(store, name)
        raise
    return Saved(name, agree.total(written[0]), time.perf_counter() - began)


def contents_of(
    tensors: Tensors,
    holders: Holders | None = None,
    piece_bytes: int = PIECE_BYTES,
    block_bytes: int = BLOCK_BYTES,
) -> Contents:
    """What this rank writes, and what it knows of what the others write."""
    grids = grids_of(tensors, holders)
    entries = {n: Entry(dtype_of(n, t), tuple(t.shape), grids[n]) for n, t in sorted(tensors.items())}
    contents = Contents(Layout(entries, piece_bytes, block_bytes), agree.here()[0])
    for name in contents.layout.names_of(contents.rank):
        held_boxes(name, tensors[name])  # refuses what is cut in a way that is not known here
    return contents


def _slices(tensors: Tensors, contents: Contents) -> Iterator[memoryview]:
    """One at a time: a slice is copied from its device when its turn has come."""
    for piece in contents.pieces:
        yield bytes_of(view_of(local_of(tensors[piece.tensor]), piece.start, piece.shape).contiguous().cpu())


def _together(step: int, work: Callable[[], object], mine: bool = True) -> None:
    """Does its part of the work, then learns how it went for the others: all go on, or all raise."""
    words, cause = None, None
    try:
        if mine:
            work()
    except Exception as e:  # whatever it is, the others must not wait for this rank
        words, cause = f"{_FENCED if isinstance(e, Fenced) else _FAILED} {words_of(e)}", e
    if failed := agree.first_error(words):
        kind, _, why = failed[1].partition(" ")
        if kind == _FENCED:
            raise Fenced(why) from cause
        error = SaveError(not_saved(step, failed[0], why))
        error.rank, error.why = failed[0], why
        raise error from cause


def _make_room(store: Store, name: Name) -> None:
    """What an earlier try has left goes; what is published stays."""
    try:
        store.size(f"{name}/{MANIFEST}")
    except FileNotFoundError:
        store.remove(store.staging(str(name)))
        return
    raise CheckpointError(f"{store.where}/{name} is there already, and a name is written once.")


def _give_up(store: Store, name: Name) -> None:
    """What cannot be deleted now is deleted by the next `prune`."""
    with contextlib.suppress(OSError, ShoalError):
        _make_room(store, name)
