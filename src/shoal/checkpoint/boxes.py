"""Any box of a tensor of a checkpoint, read from the slices that hold it; each is compared with its checksum."""

from __future__ import annotations

import torch
from xxhash import xxh3_128_hexdigest

from shoal.checkpoint.find import Found, mismatch, reading
from shoal.checkpoint.layout import TORCH_DTYPES, bytes_of, view_of
from shoal.checkpoint.manifest import Corrupt, Dims, Slice, intersect


def read_slice(found: Found, name: str, s: Slice) -> torch.Tensor:
    """One slice as it was written, on the CPU; `Corrupt` where it is not."""
    data = torch.empty(s.shape, dtype=TORCH_DTYPES[found.manifest.tensors[name].dtype])
    into = bytes_of(data)
    with reading(s.file, found.where):
        found.store.read_into(found.path(s.file), s.at, into)
    if xxh3_128_hexdigest(into) != s.xxh3_128:
        raise Corrupt(f"checkpoint {found.where} is damaged: {mismatch(s.file, name)}")
    return data


def read_box(found: Found, name: str, offset: Dims, shape: Dims) -> torch.Tensor:
    """The box of a tensor that begins at `offset`. Memory: the box, and one slice at a time."""
    entry = found.manifest.tensors[name]
    box = torch.empty(shape, dtype=TORCH_DTYPES[entry.dtype])
    for s in entry.slices:
        if (shared := intersect(offset, shape, s.offset, s.shape)) is None:
            continue
        if s.offset == offset and s.shape == shape:
            return read_slice(found, name, s)
        at, size = shared
        into = view_of(box, tuple(a - o for a, o in zip(at, offset, strict=True)), size)
        into.copy_(view_of(read_slice(found, name, s), tuple(a - o for a, o in zip(at, s.offset, strict=True)), size))
    return box
