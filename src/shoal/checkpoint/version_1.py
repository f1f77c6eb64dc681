"""Manifests of version 1 of the format, as Shoal wrote them until 2026: every slice of every tensor was listed, with a
checksum of its own. They are read, and never written."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

from shoal.checkpoint.blocks import DIGEST_BYTES, File
from shoal.checkpoint.faulty import Corrupt
from shoal.checkpoint.grids import tiles
from shoal.checkpoint.rows import ITEM_BYTES, Entry, Layout, Listed, Slice


def tables_of(fields: dict[str, Any]) -> tuple[dict[str, File], Layout, Listed]:
    """The files, whose blocks are the slices in them; the tensors; and the slices. `Corrupt` where they do not fit."""
    sizes = {name: (int(file["bytes"]), int(file["header_bytes"])) for name, file in fields["files"].items()}
    tensors: dict[str, Entry] = {}
    slices: dict[str, tuple[Slice, ...]] = {}
    stretches: dict[str, list[tuple[int, int, str]]] = defaultdict(list)
    for name, fields_of in fields["tensors"].items():
        entry = Entry(str(fields_of["dtype"]), tuple(fields_of["shape"]))
        if entry.dtype not in ITEM_BYTES:
            raise Corrupt(f"tensor '{name}' has the unknown dtype {entry.dtype}")
        rows = []
        for row in fields_of["slices"]:
            s = Slice(row["file"], row["key"], tuple(row["offset"]), tuple(row["shape"]), int(row["at"]))
            count = math.prod(s.shape) * entry.item_bytes
            size, header_bytes = sizes.get(s.file, (0, 0))
            if s.at < header_bytes or s.at + count > size:
                raise Corrupt(f"a slice of tensor '{name}' lies outside of its file {s.file}")
            rows.append(s)
            stretches[s.file].append((s.at, count, row["xxh3_128"]))
        if not tiles(entry.shape, [(s.offset, s.shape) for s in rows]):
            raise Corrupt(f"the slices of tensor '{name}' do not cover it exactly once")
        tensors[name], slices[name] = entry, tuple(rows)
    files = {
        name: _file(name, fields_of, sorted(stretches[name], key=lambda s: s[0]))
        for name, fields_of in fields["files"].items()
    }
    return files, Layout(tensors), Listed(tensors, slices)


def _file(name: str, fields: dict[str, Any], stretches: list[tuple[int, int, str]]) -> File:
    end = int(fields["header_bytes"])
    for at, count, _ in stretches:
        if at != end:
            raise Corrupt(f"the slices in {name} do not follow each other")
        end += count
    if end != fields["bytes"]:
        raise Corrupt(f"the slices in {name} do not fill it")
    digests = b"".join(bytes.fromhex(digest) for _, _, digest in stretches)
    if len(digests) != DIGEST_BYTES * len(stretches):
        raise Corrupt(f"a checksum of {name} has another length than xxh3-128 has")
    return File(
        end, int(fields["header_bytes"]), str(fields["header_xxh3_128"]), [at for at, _, _ in stretches], digests
    )
