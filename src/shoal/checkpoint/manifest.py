"""What a checkpoint says about itself: `manifest.json`, and the checks that need nothing but it.

The format is docs/reference/checkpoint.md. In short: every tensor has a dtype, a shape and a grid of ranks over which
it is cut; every file has a checksum a block. Which slice lies where is derived (`shoal.checkpoint.rows`), so that the
manifest grows with the tensors and with the bytes, and not with tensors times ranks. No torch here, no pickle.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from shoal import values
from shoal.checkpoint.blocks import File
from shoal.checkpoint.extra import extra_of
from shoal.checkpoint.faulty import Corrupt
from shoal.checkpoint.fields import MOST_RANKS, file_fields, file_from, layout_fields, layout_from
from shoal.checkpoint.names import RANK_FILE, rank_file
from shoal.checkpoint.rows import Derived, Entry, Layout, Listed, Rows
from shoal.checkpoint.seals import opened, seal, sealed
from shoal.checkpoint.version_1 import tables_of
from shoal.errors import CheckpointError

__all__ = ["Corrupt", "Entry", "File", "Manifest", "check", "decode", "encode", "merge", "seal", "sealed"]

FORMAT, VERSION = "shoal-checkpoint", 2


@dataclass(frozen=True)
class Manifest:
    step: int
    term: int  # which start of the workers wrote it
    world: int  # ranks that wrote it; any other number may read it
    saved_at: float  # Unix time
    extra: dict[str, Any]
    files: dict[str, File]
    layout: Layout
    listed: Listed | None = None  # of version 1: where the slices are, which is derived since
    data: bytes = field(default=b"", repr=False, compare=False)  # what it was read from

    @property
    def tensors(self) -> Mapping[str, Entry]:
        return self.layout.tensors

    @cached_property
    def rows(self) -> Rows:
        return self.listed if self.listed is not None else Derived(self.layout, self.files)


def encode(manifest: Manifest) -> bytes:
    """JSON, a line a tensor; its last member is the checksum of all bytes before the last comma."""
    if manifest.listed is not None:
        return manifest.data
    about = {key: getattr(manifest, key) for key in ("step", "term", "world", "saved_at", "extra")}
    layout = layout_fields(manifest.layout)
    files = {name: file_fields(file) for name, file in manifest.files.items()}
    members = [f'{{"format":"{FORMAT}"', f'"version":{VERSION}']
    members += [f"{_json(key)}:{_json(value)}" for key, value in about.items()]
    members += [f"{_json(key)}:{_json(layout[key])}" for key in ("piece_bytes", "block_bytes")]
    members += [
        f'"files":{_lines(files)}',
        f'"grids":{_json(layout["grids"])}',
        f'"tensors":{_lines(layout["tensors"])}',
    ]
    head = ",\n".join(members).encode()
    return head + seal(head)


def decode(data: bytes, checked: bool = False) -> Manifest:
    """The manifest, or `Corrupt` with the reason. `checked`: by another rank, which has sent it."""
    if not sealed(data):
        raise Corrupt("its manifest.json is damaged (its checksum does not match)")
    try:
        fields = opened(data)
        values.field(fields, "format", lambda said: values.one_of(said, (FORMAT,)))
        version = values.field(fields, "version", lambda said: values.whole(said, 1 << 30, 1))
        if version > VERSION:
            raise CheckpointError(f"it is of format version {version}, from a newer Shoal: upgrade Shoal to read it")
        world = values.field(fields, "world", lambda said: values.whole(said, MOST_RANKS, 1))
        if version == 1:
            files, layout, listed = tables_of(fields)
        else:
            if world != len(values.fields_of(fields["files"])):
                raise values.BadValue(f"a world of {world} ranks and {len(fields['files'])} files")
            layout, listed = layout_from(fields, world), None
            files = {name: file_from(file, layout.block_bytes) for name, file in fields["files"].items()}
        manifest = Manifest(
            step=values.field(fields, "step", values.whole),
            term=values.field(fields, "term", values.whole),
            world=world,
            saved_at=values.field(fields, "saved_at", lambda said: values.real(said, values.LAST_YEAR, 0)),
            extra=values.field(fields, "extra", extra_of),
            files=files,
            layout=layout,
            listed=listed,
            data=data,
        )
    except values.BadValue as e:
        raise Corrupt(f"its manifest.json cannot be understood ({e})") from e
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as e:
        raise Corrupt("its manifest.json cannot be understood (something in it has another form)") from e
    if not checked:
        check(manifest)
    return manifest


def check(manifest: Manifest) -> None:
    """The tensors are covered exactly once, and each file has just the bytes of what is to lie in it."""
    if foreign := [name for name in manifest.files if not RANK_FILE.fullmatch(name)]:
        raise Corrupt(f"its manifest.json names a file '{values.shown(foreign[0])}' that is not one of a checkpoint")
    if manifest.listed is not None:
        return  # of version 1: checked row by row as it was read
    if (bad := manifest.layout.uncovered()) is not None:
        raise Corrupt(f"the slices of tensor '{values.shown(bad)}' do not cover it exactly once")
    if missing := sorted({rank_file(rank) for rank in range(manifest.world)} ^ manifest.files.keys()):
        raise Corrupt(
            f"its manifest.json is of {manifest.world} ranks, and that does not fit its list with {missing[0]}"
        )
    needed = manifest.layout.sizes()
    for rank in range(manifest.world):
        file, size = manifest.files[rank_file(rank)], needed.get(rank, 0)
        if file.header_bytes + size != file.bytes:
            raise Corrupt(
                f"{rank_file(rank)} has {file.bytes} bytes in manifest.json, and its header and tensors "
                f"{file.header_bytes + size}"
            )
        if file.starts != range(file.header_bytes, file.bytes, manifest.layout.block_bytes):
            raise Corrupt(f"the checksums of {rank_file(rank)} are of other blocks than manifest.json says")


def merge(layouts: Iterable[tuple[int, Layout]]) -> Layout:
    """What each rank said of the tensors that it has, put together: (rank, layout).

    Ranks that hold the same tensors say the same, and what is the same is looked at once. A tensor that a rank is to
    write and does not know, or that two would write, is found here and not on the day of the resume.
    """
    said: dict[int, tuple[Layout, set[int]]] = {}
    for rank, layout in layouts:
        said.setdefault(id(layout), (layout, set()))[1].add(rank)
    merged: dict[str, Entry] = {}
    sayers: dict[str, list[int]] = {}
    sizes = {(layout.piece_bytes, layout.block_bytes) for layout, _ in said.values()}
    if len(sizes) > 1:
        raise CheckpointError("the ranks do not agree on how many bytes a piece and a block have.")
    for key, (layout, _) in said.items():
        for name, entry in layout.tensors.items():
            so_far = merged.setdefault(name, entry)
            if (so_far.dtype, so_far.shape) != (entry.dtype, entry.shape):
                raise CheckpointError(f"the ranks do not agree on the dtype and shape of tensor '{name}'.")
            if entry.grid is not None:
                sayers.setdefault(name, []).append(key)
                if so_far.grid is None:
                    merged[name] = entry
                elif (so_far.grid, so_far.boxes) != (entry.grid, entry.boxes):
                    raise CheckpointError(f"the ranks do not agree on who writes tensor '{name}'.")
    known: dict[tuple[int, tuple[int, ...]], bool] = {}
    for name, entry in merged.items():
        if entry.grid is None:
            continue
        group = (id(entry.grid), tuple(sayers[name]))
        if group not in known:
            known[group] = set(entry.grid.ranks) <= set().union(*(said[key][1] for key in sayers[name]))
        if not known[group]:
            raise Corrupt(f"the slices of tensor '{name}' do not cover it exactly once")
    piece_bytes, block_bytes = sizes.pop()
    return Layout(dict(sorted(merged.items())), piece_bytes, block_bytes)


def _lines(table: dict[str, Any]) -> str:
    return "{\n" + ",\n".join(f"{_json(name)}:{_json(value)}" for name, value in table.items()) + "\n}"


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)
