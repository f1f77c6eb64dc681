"""What one rank wrote of a checkpoint: the table of its file, beside that file until all parts are put together."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Literal

from shoal.checkpoint import faults
from shoal.checkpoint.files import Item, digests_of, header_of, write
from shoal.checkpoint.manifest import Corrupt, Dims, Entry, File, Slice, entry_of, seal, sealed
from shoal.checkpoint.names import MANIFEST, Name, failed_file, part_file, rank_file
from shoal.checkpoint.store import Store, has
from shoal.errors import ShoalError

ReadBack = Literal["full", "headers"]


@dataclass(frozen=True)
class Piece:
    """A slice that this rank writes: which box of which tensor."""

    tensor: str
    offset: Dims
    shape: Dims


@dataclass(frozen=True)
class Contents:
    """All that a rank writes, in the order of its file. The same for every save of a run on one mesh."""

    entries: Mapping[str, Entry]  # of every tensor that the rank has; without slices
    pieces: tuple[Piece, ...]

    def items(self) -> list[Item]:
        return [self._item(piece) for piece in self.pieces]

    def header(self, name: Name) -> bytes:
        return header_of(name, self.items())

    def _item(self, piece: Piece) -> Item:
        entry = self.entries[piece.tensor]
        # A whole tensor has its name; a slice has its place behind it, so that the file alone says what it holds.
        whole = piece.shape == entry.shape
        key = piece.tensor if whole else f"{piece.tensor}@{','.join(map(str, piece.offset))}"
        return Item(key, entry.dtype, piece.shape, math.prod(piece.shape) * entry.item_bytes)


@dataclass(frozen=True)
class Part:
    rank: int
    world: int
    file: File
    tensors: Mapping[str, Entry]


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
    faults.reach("write")
    file, digests = write(store, f"{folder}/{rank_file(rank)}", header, slices)
    faults.reach("written")
    return _tell(store, folder, part_of(rank, world, contents, digests, file), read_back)


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
    faults.reach("write")
    store.write(f"{folder}/{rank_file(rank)}", chunks)
    faults.reach("written")
    return _tell(store, folder, part(), read_back)


def _tell(store: Store, folder: str, part: Part, read_back: ReadBack) -> Part:
    """Reads back what was written, as far as asked for, and only then says that it is there. Each rank does that for
    its own file; rank 0 need not read what a thousand others wrote."""
    if read_back == "full":
        path = f"{folder}/{rank_file(part.rank)}"
        slices = sorted(
            (s.at, math.prod(s.shape) * entry.item_bytes, tensor, s.xxh3_128)
            for tensor, entry in part.tensors.items()
            for s in entry.slices
        )
        digests = digests_of(store, path, [(at, count) for at, count, _, _ in slices])
        for (_, _, tensor, written), digest in zip(slices, digests, strict=True):
            if digest != written:
                raise Corrupt(f"what was read back of '{tensor}' is not what was written to {store.where}/{path}")
    faults.reach("read-back")
    store.put(f"{folder}/{part_file(part.rank)}", encode_part(part))
    faults.reach("part")
    return part


def tell_rank_0(store: Store, name: Name, rank: int, words: str) -> None:
    """That there will be no part of this rank, so that it need not wait. On a full disk this fails too; then the
    trainers pass it on."""
    with contextlib.suppress(OSError, ShoalError):
        store.put(f"{store.staging(str(name))}/{failed_file(rank)}", words.encode())


def part_of(rank: int, world: int, contents: Contents, digests: Sequence[str], file: File) -> Part:
    """What a file that was written, or that lies in memory, is of the whole."""
    return Part(rank, world, file, _tables(contents, rank_file(rank), file.header_bytes, digests))


def encode_part(part: Part) -> bytes:
    head = json.dumps(asdict(part), separators=(",", ":")).encode().removesuffix(b"}")
    return head + seal(head)


def encode_contents(contents: Contents) -> str:
    """For the process that writes: the entries have no slices yet."""
    return json.dumps(asdict(contents), separators=(",", ":"))


def decode_contents(text: str) -> Contents:
    fields = json.loads(text)
    entries = {name: entry_of(entry) for name, entry in fields["entries"].items()}
    pieces = [Piece(p["tensor"], tuple(p["offset"]), tuple(p["shape"])) for p in fields["pieces"]]
    return Contents(entries, tuple(pieces))


def decode_part(data: bytes) -> Part:
    if not sealed(data):
        raise Corrupt("what a rank said of its file is damaged (its checksum does not match)")
    try:
        fields = json.loads(data)
        tensors = {name: entry_of(entry) for name, entry in fields["tensors"].items()}
        return Part(fields["rank"], fields["world"], File(**fields["file"]), tensors)
    except (KeyError, TypeError, ValueError, AttributeError) as e:
        raise Corrupt(f"the part of a rank cannot be understood ({type(e).__name__}: {e})") from e


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


def _tables(contents: Contents, file: str, data_at: int, digests: Sequence[str]) -> dict[str, Entry]:
    slices: dict[str, list[Slice]] = {name: [] for name in contents.entries}
    at = data_at
    for piece, item, digest in zip(contents.pieces, contents.items(), digests, strict=True):
        slices[piece.tensor].append(Slice(file, item.key, piece.offset, piece.shape, at, digest))
        at += item.bytes
    return {name: replace(entry, slices=tuple(slices[name])) for name, entry in contents.entries.items()}
