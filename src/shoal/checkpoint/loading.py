"""Loads a checkpoint into tensors of any layout: each rank reads the blocks that its own part needs, and no others.

Rank 0 reads the manifest and sends it; each rank derives its own rows from it. Every block is compared with its
checksum before a byte of it is used. The ranks agree at the end: damage that one meets fails all of them alike, so that
all can fall back to the same older checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from shoal.checkpoint.boxes import narrowed, read_blocks
from shoal.checkpoint.extra import stage_of
from shoal.checkpoint.find import (
    Found,
    Roots,
    Skipped,
    check_headers,
    none_is_good,
    quarantine,
    scan,
    stores_of,
)
from shoal.checkpoint.grids import Dims, intersect
from shoal.checkpoint.layout import TORCH_DTYPES, bytes_of, dtype_of, held_boxes, local_of, view_of
from shoal.checkpoint.manifest import Corrupt, Manifest, decode
from shoal.checkpoint.memory.tier import Memory
from shoal.checkpoint.names import MANIFEST, Name
from shoal.checkpoint.rows import Slice
from shoal.checkpoint.store import Store
from shoal.errors import CheckpointError, ShoalError, TransientError
from shoal.parallel import agree
from shoal.values import shown

# The first word of what travels between ranks: which error all of them raise. A rank that has lost the network must not
# make the others believe that the checkpoint is bad, nor that a retry is useless.
_DAMAGED, _TRANSIENT, _OTHER = "damaged", "transient", "other"


READ_BYTES = 16 << 20  # at once, of slices that lie side by side; one that is larger is read at once all the same


@dataclass(frozen=True)
class _Want:
    """The part of a slice that a local tensor wants."""

    tensor: str
    slice: Slice
    bytes: int  # of the slice
    from_slice: Dims  # where the wanted box begins in the slice
    to_local: Dims  # where it goes in the local tensor
    shape: Dims


@dataclass
class _Read:
    """Blocks that are read at once, and who wants something of them."""

    file: str
    begin: int
    end: int
    wants: list[_Want]


def load(found: Found, tensors: Mapping[str, torch.Tensor], prefix: str = "", part: bool = False) -> dict[str, Any]:
    """Fills `tensors` in place and returns the checkpoint's `extra`. Collective.

    Each rank fills what it has. Together they must have exactly the names of the checkpoint (those that begin with
    `prefix`; with `part` some of them), with the same shapes and dtypes; else `CheckpointError`. A damaged slice is
    `Corrupt`, and what was filled until then is not to be used.
    """
    if not part:
        refuse_stage(found)
    names = sorted(name for name in found.manifest.tensors if name.startswith(prefix))
    taken = agree.anybody([name in tensors for name in names])
    unwanted = [name for name, somebody in zip(names, taken, strict=True) if not somebody]
    words = None
    try:
        _check_names(found, tensors, [] if part else unwanted, prefix)
        _fill(found, tensors)
    except Exception as e:  # whatever it is, the others must not wait for this rank
        words = _words(e)
    if failed := agree.first_error(words):
        rank, text = failed
        kind, _, text = text.partition(" ")
        if kind == _DAMAGED:
            raise Corrupt(f"checkpoint {found.where} is damaged: {text}")
        failure = TransientError if kind == _TRANSIENT else CheckpointError
        raise failure(f"checkpoint {found.where} cannot be loaded (rank {rank}): {text}")
    return found.extra


def restore(
    roots: Roots,
    tensors: Mapping[str, torch.Tensor] | Callable[[Found], Mapping[str, torch.Tensor]],
    prefix: str = "",
    before: Name | None = None,
) -> Found | None:
    """Loads the newest checkpoint (of those before `before`) that is good to the last byte, of one store or of several.
    Collective. `tensors` may be made for the one that is about to be loaded.

    None when nothing was ever published (nothing was filled then); `CheckpointError` when there is no good one. On rank
    0, `skipped` of what is returned says which newer ones were bad, for the journal; those are quarantined.
    """
    skipped: list[Skipped] = []
    while (found := _newest_of_rank_0(roots, skipped, before)) is not None:
        try:
            load(found, tensors(found) if callable(tensors) else tensors, prefix)
        except Corrupt as e:
            skipped.append(Skipped(found.store, found.name, str(e)))
            continue
        if agree.here()[0] == 0:
            for bad in skipped:
                if not bad.known:
                    quarantine(bad)
        return replace(found, skipped=tuple(skipped))
    return None


def read_full(found: Found, prefix: str = "model.") -> dict[str, torch.Tensor]:
    """The whole tensors whose names begin with `prefix`, named without it, on the CPU of this process."""
    refuse_stage(found)
    chosen = {name: entry for name, entry in found.manifest.tensors.items() if name.startswith(prefix)}
    tensors = {name: torch.empty(entry.shape, dtype=TORCH_DTYPES[entry.dtype]) for name, entry in chosen.items()}
    try:
        _fill(found, tensors)
    except Corrupt as e:
        raise Corrupt(f"checkpoint {found.where} is damaged: {e}") from e
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}


def refuse_stage(found: Found) -> None:
    """What one stage of a cut model has saved is no model by itself."""
    if "stage" in found.extra:
        number, of = stage_of(found.extra["stage"])
        raise CheckpointError(
            f"{found.where} holds stage {number} of {of} of a model cut over peers: make one run of all {of} by "
            "`shoal checkpoint join FOLDER … DIR`."
        )


def _newest_of_rank_0(roots: Roots, skipped: list[Skipped], before: Name | None) -> Found | None:
    """What rank 0 finds is what all load: two nodes may see a shared folder at different moments."""
    rank, world = agree.here()
    stores = stores_of(roots)

    def by_rank_0(store: Store) -> bool:
        """Whose headers rank 0 looks at; those of other stores each rank at its share of the files."""
        return world == 1 or isinstance(store, Memory)

    while True:
        found: Found | None = None
        words: str | None = None
        if rank == 0:
            try:
                found, bad = scan(
                    stores, before=before, tried={(s.store.where, s.name) for s in skipped}, headers=by_rank_0
                )
                skipped += bad
                if found is None and skipped:
                    words = f"{_OTHER} {none_is_good(stores, skipped)}"
            except Exception as e:
                words = _words(e)
        _all_well(agree.first_error(words))
        step = agree.from_rank_0(-1 if found is None else found.step)
        if step < 0:
            return None
        name = Name(step, agree.from_rank_0(0 if found is None else found.name.term))
        store = stores[agree.from_rank_0(0 if found is None else stores.index(found.store))]
        sent = agree.bytes_from_rank_0(b"" if found is None else found.manifest.data)
        spread = agree.text_from_rank_0(store.tell(name) if rank == 0 and isinstance(store, Memory) else "")
        if rank > 0:
            try:
                if isinstance(store, Memory):
                    store.hear(name, spread)
                    found = Found(store, name, decode(sent, checked=True))
                else:
                    found = sent_by_rank_0(store, name, sent)
            except TransientError as e:
                words = _words(e)
            except Exception as e:
                why = "do all nodes share this folder?"
                words = f"{_OTHER} rank {rank} cannot open {store.where}/{name}, which rank 0 can ({e}): {why}"
        if found is not None and words is None and not by_rank_0(store):
            try:
                check_headers(found, sorted(found.manifest.files)[rank::world])
            except Exception as e:  # whatever it is, the others must not wait for this rank
                words = _words(e)
        failed = agree.first_error(words)
        if failed is not None and failed[1].startswith(f"{_DAMAGED} "):
            skipped.append(Skipped(store, name, failed[1].removeprefix(f"{_DAMAGED} ")))
            continue
        if failed is None or not isinstance(store, Memory):
            _all_well(failed)
            return found
        # Memory is what may be gone the next moment, or out of one node's reach. The next tier is not.
        skipped.append(Skipped(store, name, f"it is not in the reach of rank {failed[0]}"))


def sent_by_rank_0(store: Store, name: Name, sent: bytes, folder: str = "") -> Found:
    """What rank 0 has opened, on another rank: by the manifest that it sent. Not its headers: a thousand ranks need not
    look at a thousand. Only whether this node sees the same folder: what is missing here is no damage."""
    if store.size(f"{folder or name}/{MANIFEST}") != len(sent):
        raise CheckpointError("its manifest.json is another one here")
    return Found(store, name, decode(sent, checked=True), folder=folder)


def _words(e: Exception) -> str:
    kind = _DAMAGED if isinstance(e, Corrupt) else _TRANSIENT if isinstance(e, TransientError) else _OTHER
    return f"{kind} {e}" if isinstance(e, ShoalError) else f"{kind} {type(e).__name__}: {e}"


def _all_well(failed: tuple[int, str] | None) -> None:
    if failed is not None:
        kind, _, text = failed[1].partition(" ")
        raise TransientError(text) if kind == _TRANSIENT else CheckpointError(text)


def _check_names(found: Found, tensors: Mapping[str, torch.Tensor], unwanted: list[str], prefix: str) -> None:
    """`unwanted` is what the checkpoint holds and no rank has."""
    entries = {name: entry for name, entry in found.manifest.tensors.items() if name.startswith(prefix)}
    if missing := sorted(set(tensors) - set(entries)):
        raise CheckpointError(f"it has no tensor {_some(missing)}: it was saved by another model or optimizer.")
    if unwanted:
        raise CheckpointError(f"it holds {_some(unwanted)}, which this model and optimizer do not have.")
    for name, tensor in tensors.items():
        entry = entries[name]
        if tuple(tensor.shape) != entry.shape:
            raise CheckpointError(f"'{name}' has shape {list(entry.shape)} in it and {list(tensor.shape)} here.")
        if dtype_of(name, tensor) != entry.dtype:
            raise CheckpointError(f"'{name}' is {entry.dtype} in it and {dtype_of(name, tensor)} here.")


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(f"'{shown(name)}'" for name in names[:3]) + more


def _fill(found: Found, tensors: Mapping[str, torch.Tensor]) -> None:
    locals_ = {name: local_of(tensor) for name, tensor in tensors.items()}
    gpu = next((local.device for local in locals_.values() if local.is_cuda), None)

    def take(read: _Read) -> None:
        # Pinned memory is used again for the next blocks, and a GPU fetches from it without another copy.
        data = torch.empty(read.end - read.begin, dtype=torch.uint8, pin_memory=gpu is not None)
        read_blocks(found, read.file, read.begin, read.end, bytes_of(data))
        for want in read.wants:
            local, at = locals_[want.tensor], want.slice.at - read.begin
            held = data[at : at + want.bytes].view(local.dtype).view(want.slice.shape)
            view_of(local, want.to_local, want.shape).copy_(view_of(held, want.from_slice, want.shape))

    on_it = partial(torch.cuda.set_device, gpu) if gpu is not None else None  # a thread begins on the first GPU
    with ThreadPoolExecutor(found.store.readers, "shoal-load", initializer=on_it) as pool:
        for done in [pool.submit(take, read) for read in _reads(found.manifest, _wanted(found.manifest, tensors))]:
            done.result()


def _wanted(manifest: Manifest, tensors: Mapping[str, torch.Tensor]) -> list[_Want]:
    """What this rank needs of which slices, in the order of the files."""
    wanted = []
    for name, tensor in tensors.items():
        item_bytes = manifest.tensors[name].item_bytes
        for box in held_boxes(name, tensor):
            for s in manifest.rows.slices_in(name, box.offset, box.shape):
                shared = intersect(box.offset, box.shape, s.offset, s.shape)
                assert shared is not None
                offset, shape = shared
                rows = narrowed(s, item_bytes, offset, shape)
                to_local = tuple(o - b + i for o, b, i in zip(offset, box.offset, box.start, strict=True))
                from_slice = tuple(o - b for o, b in zip(offset, rows.offset, strict=True))
                wanted.append(_Want(name, rows, math.prod(rows.shape) * item_bytes, from_slice, to_local, shape))
    return sorted(wanted, key=lambda want: (want.slice.file, want.slice.at))


def _reads(manifest: Manifest, wanted: list[_Want]) -> list[_Read]:
    """The blocks to read: those of neighbours at once, and each only once where that is not too much at a time."""
    reads: list[_Read] = []
    for want in wanted:
        file = want.slice.file
        begin, end = manifest.files[file].around(want.slice.at, want.slice.at + want.bytes)
        last = reads[-1] if reads else None
        joined = last is not None and last.file == file and begin <= last.end
        if last is not None and joined and max(end, last.end) - last.begin <= max(READ_BYTES, last.end - last.begin):
            last.end = max(end, last.end)
            last.wants.append(want)
        else:
            reads.append(_Read(file, begin, end, [want]))
    return reads
