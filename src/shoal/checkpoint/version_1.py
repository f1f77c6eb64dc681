"""Manifests of version 1 of the format, as Shoal wrote them until 2026: every slice of every tensor was listed, with a
checksum of its own. They are read, and never written."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

from shoal.checkpoint.blocks import DIGEST_BYTES, File
from shoal.checkpoint.faulty import Corrupt
from shoal.checkpoint.grids import Dims, tiles
from shoal.checkpoint.rows import ITEM_BYTES, Entry, Layout, Listed, Slice
from shoal.values import MOST_ITEMS, below, each, fields_of, items, short, shown, whole

MOST_DIMS = 64


def tables_of(fields: dict[str, Any]) -> tuple[dict[str, File], Layout, Listed]:
    """The files, whose blocks are the slices in them; the tensors; and the slices. `Corrupt` where they do not fit."""
    known = fields_of(fields["files"])
    sizes = {name: (whole(file["bytes"]), whole(file["header_bytes"])) for name, file in known.items()}
    tensors: dict[str, Entry] = {}
    slices: dict[str, tuple[Slice, ...]] = {}
    stretches: dict[str, list[tuple[int, int, str]]] = defaultdict(list)
    for name, about in fields_of(fields["tensors"]).items():
        entry = Entry(short(about["dtype"]), _dims(about["shape"]))
        if entry.dtype not in ITEM_BYTES:
            raise Corrupt(f"tensor '{shown(name)}' has the unknown dtype {shown(entry.dtype)}")
        rows = []
        for row in items(about["slices"], MOST_ITEMS):
            offset, shape = _dims(row["offset"]), _dims(row["shape"])
            s = Slice(below(row["file"]), short(row["key"]), offset, shape, whole(row["at"]))
            count = math.prod(s.shape) * entry.item_bytes
            size, header_bytes = sizes.get(s.file, (0, 0))
            if s.at < header_bytes or s.at + count > size:
                raise Corrupt(f"a slice of tensor '{shown(name)}' lies outside of its file {shown(s.file)}")
            rows.append(s)
            stretches[s.file].append((s.at, count, short(row["xxh3_128"])))
        if not tiles(entry.shape, [(s.offset, s.shape) for s in rows]):
            raise Corrupt(f"the slices of tensor '{shown(name)}' do not cover it exactly once")
        tensors[name], slices[name] = entry, tuple(rows)
    files = {name: _file(name, about, sorted(stretches[name], key=lambda s: s[0])) for name, about in known.items()}
    return files, Layout(tensors), Listed(tensors, slices)


def _file(name: str, fields: dict[str, Any], stretches: list[tuple[int, int, str]]) -> File:
    header_bytes = end = whole(fields["header_bytes"])
    for at, count, _ in stretches:
        if at != end:
            raise Corrupt(f"the slices in {shown(name)} do not follow each other")
        end += count
    if end != fields["bytes"]:
        raise Corrupt(f"the slices in {shown(name)} do not fill it")
    digests = b"".join(bytes.fromhex(digest) for _, _, digest in stretches)
    if len(digests) != DIGEST_BYTES * len(stretches):
        raise Corrupt(f"a checksum of {shown(name)} has another length than xxh3-128 has")
    return File(end, header_bytes, short(fields["header_xxh3_128"]), [at for at, _, _ in stretches], digests)


def _dims(said: object) -> Dims:
    return tuple(each(whole, MOST_DIMS)(said))
