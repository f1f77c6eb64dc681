"""What one rank wrote of a checkpoint: the checksums of its file and the layout that says what lies in it, beside that
file until all parts are put together. Ranks that hold the same tensors say the same layout, word for word."""

from __future__ import annotations

import base64
import contextlib
import json
import math
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Literal

from shoal import values
from shoal.checkpoint import fault_points
from shoal.checkpoint.blocks import File
from shoal.checkpoint.fields import MOST, MOST_RANKS, file_fields, file_from, layout_fields, layout_from
from shoal.checkpoint.files import Item, digests_of, header_of, write
from shoal.checkpoint.grids import Dims
from shoal.checkpoint.manifest import Corrupt, seal, sealed
from shoal.checkpoint.names import MANIFEST, Name, failed_file, part_file, rank_file
from shoal.checkpoint.rows import Layout, key_of
from shoal.checkpoint.seals import opened
from shoal.checkpoint.store import Store, has
from shoal.errors import ShoalError

MOST_LAYOUT_BYTES = 1 << 28  # unpacked: a million tensors
ReadBack = Literal["full", "headers"]


@dataclass(frozen=True)
class Piece:
    """A slice that this rank writes: which box of which tensor."""

    tensor: str
    offset: Dims
    shape: Dims
    start: Dims  # in the rank's own tensor


@dataclass(frozen=True)
class Contents:
    """All that a rank writes, in the order of its file. The same for every save of a run on one mesh."""

    layout: Layout
    rank: int

    @cached_property
    def pieces(self) -> tuple[Piece, ...]:
        return tuple(
            Piece(name, held.offset, held.shape, held.start)
            for name in self.layout.names_of(self.rank)
            for held in self.layout.held(name, self.rank)
        )

    @cached_property
    def items(self) -> tuple[Item, ...]:
        entries = self.layout.tensors
        return tuple(
            Item(
                key_of(p.tensor, entry, p.offset, p.shape), entry.dtype, p.shape, math.prod(p.shape) * entry.item_bytes
            )
            for p in self.pieces
            for entry in (entries[p.tensor],)
        )

    @property
    def data_bytes(self) -> int:
        """Of the tensors, without the header."""
        return sum(item.bytes for item in self.items)

    def header(self, name: Name) -> bytes:
        return header_of(name, self.items)

    @cached_property
    def packed(self) -> str:
        """The layout as it travels. The names are most of it and much alike: a tenth of its JSON."""
        return pack(self.layout)


@dataclass(frozen=True)
class Part:
    rank: int
    world: int
    file: File
    packed: str  # the layout

    @property
    def layout(self) -> Layout:
        """The same object for all parts that say the same."""
        return unpack(self.packed, self.world)


def pack(layout: Layout) -> str:
    text = json.dumps(layout_fields(layout), separators=(",", ":")).encode()
    return base64.b64encode(zlib.compress(text)).decode()


@lru_cache(maxsize=256)
def unpack(packed: str, world: int) -> Layout:
    """`Corrupt` where it cannot be understood."""
    try:
        inflate = zlib.decompressobj()
        text = inflate.decompress(base64.b64decode(packed, validate=True), MOST_LAYOUT_BYTES)
        if not inflate.eof:
            raise values.BadValue("it is cut off, or too long")
        return layout_from(opened(text), world)
    except values.BadValue as e:
        raise Corrupt(f"the layout that a rank says cannot be understood ({e})") from e
    except (zlib.error, LookupError, TypeError, ValueError, AttributeError, OverflowError) as e:
        raise Corrupt("the layout that a rank says cannot be understood (it has another form)") from e


def write_part(
    store: Store,
    name: Name,
    rank: int,
    world: int,
    contents: Contents,
    slices: Iterable[memoryview],
    read_back: ReadBack = "headers",
) -> Part:
    """Writes a rank's file into the staging folder, and then what it wrote; both are durable when this returns."""
    folder, header = store.staging(str(name)), contents.header(name)
    _forget(store, folder, rank)
    fault_points.reach("write")
    file = write(store, f"{folder}/{rank_file(rank)}", header, slices, contents.layout.block_bytes)
    fault_points.reach("written")
    return _tell(store, folder, Part(rank, world, file, contents.packed), read_back)


def write_known(
    store: Store,
    name: Name,
    rank: int,
    chunks: Iterable[memoryview],
    part: Callable[[], Part],
    read_back: ReadBack = "headers",
) -> Part:
    """The same for a file that lies ready in memory, while its checksums are still being taken."""
    folder = store.staging(str(name))
    if _is_there(store, name, rank, part):
        return part()
    _forget(store, folder, rank)
    fault_points.reach("write")
    store.write(f"{folder}/{rank_file(rank)}", chunks)
    fault_points.reach("written")
    return _tell(store, folder, part(), read_back)


def _tell(store: Store, folder: str, part: Part, read_back: ReadBack) -> Part:
    """Reads back what was written, as far as asked for, and only then says that it is there. Each rank does that for
    its own file; rank 0 need not read what a thousand others wrote."""
    if read_back == "full":
        path, file = f"{folder}/{rank_file(part.rank)}", part.file
        blocks = list(file.blocks())
        digests = digests_of(store, path, [(at, count) for at, count, _ in blocks])
        for (at, count, written), digest in zip(blocks, digests, strict=True):
            if digest != written:
                where = f"{store.where}/{path}"
                raise Corrupt(f"what was read back of bytes {at} to {at + count} is not what was written to {where}")
    fault_points.reach("read-back")
    store.put(f"{folder}/{part_file(part.rank)}", encode_part(part))
    fault_points.reach("part")
    return part


def tell_rank_0(store: Store, name: Name, rank: int, words: str) -> None:
    """That there will be no part of this rank, so that it need not wait. On a full disk this fails too; then the
    trainers pass it on."""
    with contextlib.suppress(OSError, ShoalError):
        store.put(f"{store.staging(str(name))}/{failed_file(rank)}", words.encode())


def encode_part(part: Part) -> bytes:
    about = {"rank": part.rank, "world": part.world, "file": file_fields(part.file), "layout": part.packed}
    sizes = {"block_bytes": part.layout.block_bytes}
    head = json.dumps(about | sizes, separators=(",", ":")).encode().removesuffix(b"}")
    return head + seal(head)


def _count(said: object) -> int:
    return values.whole(said, MOST_RANKS)


def decode_part(data: bytes) -> Part:
    if not sealed(data):
        raise Corrupt("what a rank said of its file is damaged (its checksum does not match)")
    try:
        fields = opened(data)
        block_bytes = values.field(fields, "block_bytes", lambda said: values.whole(said, MOST, 1))
        rank, world = (
            values.field(fields, name, lambda said: values.whole(said, MOST_RANKS)) for name in ("rank", "world")
        )
        layout = values.field(fields, "layout", lambda said: values.text(said, MOST_LAYOUT_BYTES))
        return Part(rank, world, file_from(fields["file"], block_bytes), layout)
    except values.BadValue as e:
        raise Corrupt(f"the part of a rank cannot be understood ({e})") from e
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as e:
        raise Corrupt("the part of a rank cannot be understood (it has another form)") from e


def encode_contents(contents: Contents) -> dict[str, object]:
    """For the process that writes."""
    return {"layout": contents.packed, "rank": contents.rank}


def decode_contents(fields: dict[str, Any], world: int) -> Contents:
    return Contents(unpack(fields["layout"], world), int(fields["rank"]))


def _is_there(store: Store, name: Name, rank: int, part: Callable[[], Part]) -> bool:
    """Whether an earlier process has written it all, and died before it could say so: rank 0 may be reading that, or
    have published it, so it is not written again. In the order in which it would disappear."""
    folder = store.staging(str(name))
    try:
        return store.read(f"{folder}/{part_file(rank)}") == encode_part(part())
    except FileNotFoundError:
        return has(store, f"{folder}/{MANIFEST}") or has(store, f"{name}/{MANIFEST}")


def _forget(store: Store, folder: str, rank: int) -> None:
    """What an earlier try said of its file is not true of the next one."""
    for said in {part_file(rank), failed_file(rank)} & set(store.list(folder)):
        store.remove(f"{folder}/{said}")
