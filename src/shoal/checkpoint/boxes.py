"""Any box of a tensor of a checkpoint, read from the blocks that hold it; each is compared with its checksum."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from xxhash import xxh3_128_hexdigest

from shoal.checkpoint.find import Found, mismatch, reading
from shoal.checkpoint.grids import Dims, intersect
from shoal.checkpoint.layout import TORCH_DTYPES, bytes_of, view_of
from shoal.checkpoint.manifest import Corrupt
from shoal.checkpoint.rows import Slice


def read_blocks(found: Found, file: str, begin: int, end: int, into: memoryview) -> None:
    """Some whole blocks of a file, side by side; `Corrupt` where one is not as it was written."""
    with reading(file, found.where):
        found.store.read_into(found.path(file), begin, into)
    for at, count, written in found.manifest.files[file].blocks(begin, end):
        if xxh3_128_hexdigest(into[at - begin : at - begin + count]) != written:
            raise Corrupt(mismatch(found.manifest, file, at, count))


def narrowed(s: Slice, item_bytes: int, offset: Dims, shape: Dims) -> Slice:
    """The rows of a slice that hold a box of it, which still lie side by side: a slice as well."""
    dim = next((d for d, n in enumerate(s.shape) if n > 1), None)
    if dim is None:
        return s
    row_bytes = math.prod(s.shape[dim + 1 :]) * item_bytes
    inside = offset[dim] - s.offset[dim]
    return replace(
        s,
        offset=(*s.offset[:dim], offset[dim], *s.offset[dim + 1 :]),
        shape=(*s.shape[:dim], shape[dim], *s.shape[dim + 1 :]),
        at=s.at + inside * row_bytes,
    )


def read_slice(found: Found, name: str, s: Slice) -> torch.Tensor:
    """One slice as it was written, on the CPU; `Corrupt` where it is not."""
    entry = found.manifest.tensors[name]
    size = math.prod(s.shape) * entry.item_bytes
    begin, end = found.manifest.files[s.file].around(s.at, s.at + size)
    data = torch.empty(end - begin, dtype=torch.uint8)
    try:
        read_blocks(found, s.file, begin, end, bytes_of(data))
    except Corrupt as e:
        raise Corrupt(f"checkpoint {found.where} is damaged: {e}") from e
    return data[s.at - begin : s.at - begin + size].view(TORCH_DTYPES[entry.dtype]).view(s.shape)


def read_box(found: Found, name: str, offset: Dims, shape: Dims) -> torch.Tensor:
    """The box of a tensor that begins at `offset`. Memory: the box, and one slice at a time."""
    entry = found.manifest.tensors[name]
    box = torch.empty(shape, dtype=TORCH_DTYPES[entry.dtype])
    for s in found.manifest.rows.slices_in(name, offset, shape):
        shared = intersect(offset, shape, s.offset, s.shape)
        assert shared is not None
        at, size = shared
        rows = narrowed(s, entry.item_bytes, at, size)
        into = view_of(box, tuple(a - o for a, o in zip(at, offset, strict=True)), size)
        part = tuple(a - o for a, o in zip(at, rows.offset, strict=True))
        into.copy_(view_of(read_slice(found, name, rows), part, size))
    return box
