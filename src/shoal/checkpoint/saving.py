"""Saves the state of all ranks as one checkpoint, or as none.

Each rank writes the slices that are its own, into a hidden folder that all ranks see (a shared file system, or one
machine); rank 0 puts the manifest beside them and renames the folder. Nobody gathers tensors. Synchronous: when it
returns, the checkpoint is on disk.
"""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from shoal.checkpoint import files, peers
from shoal.checkpoint.find import damage, folder_of, open_checkpoint
from shoal.checkpoint.layout import (
    Held,
    Holders,
    bytes_of,
    dtype_of,
    held_boxes,
    local_of,
    mine_to_write,
    pieces,
    view_of,
)
from shoal.checkpoint.manifest import MANIFEST, Corrupt, Entry, File, Manifest, Slice, check, encode, entry_of, merge
from shoal.checkpoint.publish import begin, publish, temporary_folder
from shoal.errors import TransientError

PIECE_BYTES = 64 << 20
Tensors = Mapping[str, torch.Tensor]


class SaveError(TransientError):
    """This checkpoint could not be written. The older ones are untouched and training may go on."""


@dataclass(frozen=True)
class Saved:
    path: Path
    step: int
    bytes: int  # of the tensors' files, over all ranks
    seconds: float
    kept: bool = False  # a good checkpoint of this step was there already


def save(
    root: Path,
    step: int,
    tensors: Tensors,
    extra: dict[str, Any],
    attempt: int = 0,
    holders: Holders | None = None,
    piece_bytes: int = PIECE_BYTES,
) -> Saved:
    """Collective. `tensors` are plain ones, equal wherever they are, or DTensors; `extra` is JSON (rank 0's counts).

    Ranks may have different tensors, as the stages of a pipeline do. `holders[name]` lists the ranks that have a whole
    copy of a plain tensor (without it: every rank), of which one writes. For a tensor of any kind, a rank that is not
    listed writes nothing of it: what it has is a copy of what another stage owns (tied embeddings).

    When any rank fails, all raise the same `SaveError`, and nothing of this checkpoint remains. A good checkpoint of
    this step that is already there stays (`kept`): a step is taken once, so it is that state. A bad one is replaced.
    """
    began = time.perf_counter()
    rank, world = peers.here()
    final = folder_of(root, step)
    there_bytes = _good_bytes(final)
    if there_bytes:
        return Saved(final, step, there_bytes, time.perf_counter() - began, kept=True)
    folder = temporary_folder(root, step, attempt)
    written: list[int] = []

    def write_mine() -> None:
        mine = mine_to_write(tensors, holders)
        written.append(_write_mine(folder, rank, {"step": step, "attempt": attempt}, tensors, mine, piece_bytes))

    try:
        _together(step, partial(begin, folder), rank == 0)
        _together(step, write_mine)
        _together(step, partial(_complete, folder, root, step, attempt, world, extra), rank == 0)
    except SaveError:
        if rank == 0:
            shutil.rmtree(folder, ignore_errors=True)  # what cannot be deleted now is deleted by the next `prune`
        raise
    return Saved(final, step, peers.total(written[0]), time.perf_counter() - began)


def _together(step: int, work: Callable[[], object], mine: bool = True) -> None:
    """Does its part of the work, then learns how it went for the others: all go on, or all raise."""
    words, cause = None, None
    try:
        if mine:
            work()
    except Exception as e:  # whatever it is, the others must not wait for this rank
        words, cause = _words(e), e
    if failed := peers.first_error(words):
        raise SaveError(
            f"the checkpoint of step {step} was not saved: rank {failed[0]}: {failed[1].rstrip('.')}. "
            "Older checkpoints are untouched."
        ) from cause


def _words(e: Exception) -> str:
    if isinstance(e, OSError):
        return f"{e.strerror or e} ({e.filename})" if e.filename else f"{e.strerror or e}"
    return str(e) if isinstance(e, Corrupt) else f"{type(e).__name__}: {e}"


def _good_bytes(final: Path) -> int:
    """The size of the checkpoint of this step that is already there, 0 when there is none or a bad one. Collective.

    It is read in full, by all ranks together: it may be there exactly because a damaged byte made a run fall back to an
    older checkpoint and come here again.
    """
    rank, world = peers.here()
    if not peers.from_rank_0(int(final.exists())):
        return 0
    size, bad = 0, 0
    try:
        found = open_checkpoint(final)
        size = found.bytes
        bad = len(damage(found, list(found.manifest.files)[rank::world]))
    except Exception:  # one that cannot be opened is bad, whatever the reason: it will be replaced
        bad = 1
    return 0 if peers.total(bad) else size


def _write_mine(
    folder: Path, rank: int, identity: dict[str, int], tensors: Tensors, mine: list[str], piece_bytes: int
) -> int:
    """This rank's file of slices, and beside it what rank 0 needs for the manifest. Returns the file's size."""
    name = f"rank-{rank:05d}.safetensors"
    entries = {n: Entry(dtype_of(n, t), tuple(t.shape), ()) for n, t in tensors.items()}
    held = [
        (n, piece)
        for n in sorted(mine, key=lambda n: (-entries[n].item_bytes, n))  # widest first: all aligned
        for box in held_boxes(n, tensors[n])
        for piece in pieces(box, entries[n].item_bytes, piece_bytes)
    ]
    items = [_item(n, entries[n], tensors[n], piece) for n, piece in held]
    # The step and attempt make the header of each save unlike any other: a file of another checkpoint is noticed by it.
    file, placed = files.write(folder / name, {"format": "pt", **{k: str(v) for k, v in identity.items()}}, items)
    slices: dict[str, list[Slice]] = {n: [] for n in tensors}
    for (n, piece), item, (at, digest) in zip(held, items, placed, strict=True):
        slices[n].append(Slice(name, item.key, piece.offset, piece.shape, at, digest))
    table = {n: asdict(Entry(e.dtype, e.shape, tuple(slices[n]))) for n, e in entries.items()}
    files.write_small(folder / f"rank-{rank:05d}.json", json.dumps({"file": asdict(file), "tensors": table}).encode())
    return file.bytes


def _item(name: str, entry: Entry, tensor: torch.Tensor, piece: Held) -> files.Item:
    # A whole tensor has its name; a slice has its place behind it, so that the file alone says what it holds.
    key = name if piece.shape == entry.shape else f"{name}@{','.join(map(str, piece.offset))}"
    size_bytes = math.prod(piece.shape) * entry.item_bytes
    return files.Item(key, entry.dtype, piece.shape, size_bytes, partial(_bytes, tensor, piece))


def _bytes(tensor: torch.Tensor, piece: Held) -> memoryview:
    return bytes_of(view_of(local_of(tensor), piece.start, piece.shape).contiguous().cpu())


def _complete(folder: Path, root: Path, step: int, attempt: int, world: int, extra: dict[str, Any]) -> None:
    """Rank 0: the parts of all ranks become the manifest, and the folder becomes the checkpoint."""
    parts = [json.loads((folder / f"rank-{rank:05d}.json").read_bytes()) for rank in range(world)]
    manifest = Manifest(
        step=step,
        attempt=attempt,
        world=world,
        saved_at=round(time.time(), 3),
        extra=extra,
        files={f"rank-{rank:05d}.safetensors": File(**part["file"]) for rank, part in enumerate(parts)},
        tensors=merge({n: entry_of(e) for n, e in part["tensors"].items()} for part in parts),
    )
    check(manifest)  # a tensor that nobody wrote, or two did, is found here and not on the day of the resume
    files.write_small(folder / MANIFEST, encode(manifest))
    open_checkpoint(folder)  # and so is a file that another node wrote elsewhere, or not in full
    for rank in range(world):
        (folder / f"rank-{rank:05d}.json").unlink()
    publish(folder, root, step)
