"""The index of a data set: its shards, their sizes and checksums. The format is in docs/reference/shards.md.

`index.json` is written last and by rename, so a folder that has one is complete, and one that has none is no data set.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import xxhash

from shoal import values
from shoal.errors import DataError, SetupError, ShoalError
from shoal.plain_file import read_plain

T = TypeVar("T")
FORMAT = "shoal-tokens"
VERSION = 1
INDEX_FILE = "index.json"
MOST_INDEX_BYTES = 1 << 28  # some hundred thousand shards
ITEM_BYTES = {"uint16": 2, "uint32": 4}
DOC_END_BYTES = 8
SUM_BYTES = 8
# .tokens and .mask are also checksummed in pieces of this size, so that a part read from a store can be trusted.
# 256 KiB: a request of that size costs little more than one of a few KiB, and holds the windows of any usual length.
PIECE_BYTES = 1 << 18
# An index may come from a stranger: no way out of the folder, nor out of the cache, where names are checksums.
_SAFE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
MOST_IDS = 1 << 32
MOST_BYTES = 1 << 60  # of a shard
MOST_SHARDS = 1_000_000


@dataclass(frozen=True)
class ShardFile:
    """One file of a shard: all that is needed to fetch it and to know that it is right."""

    name: str
    size_bytes: int
    xxh3: str


@dataclass(frozen=True)
class ShardInfo:
    """One shard, as the index states it."""

    name: str
    tokens: int
    documents: int
    tokens_xxh3: str
    docs_xxh3: str
    mask_xxh3: str | None
    sums_xxh3: str
    tokens_bytes: int

    @property
    def token_dtype(self) -> str:
        return f"<u{self.tokens_bytes // self.tokens}"

    @property
    def tokens_file(self) -> ShardFile:
        return ShardFile(f"{self.name}.tokens", self.tokens_bytes, self.tokens_xxh3)

    @property
    def docs_file(self) -> ShardFile:
        return ShardFile(f"{self.name}.docs", self.documents * DOC_END_BYTES, self.docs_xxh3)

    @property
    def mask_file(self) -> ShardFile | None:
        return None if self.mask_xxh3 is None else ShardFile(f"{self.name}.mask", self.tokens, self.mask_xxh3)

    @property
    def sums_file(self) -> ShardFile:
        pieces = pieces_of(self.tokens_bytes) + (0 if self.mask_xxh3 is None else pieces_of(self.tokens))
        return ShardFile(f"{self.name}.sums", pieces * SUM_BYTES, self.sums_xxh3)

    @property
    def files(self) -> list[ShardFile]:
        every = (self.tokens_file, self.docs_file, self.mask_file, self.sums_file)
        return [f for f in every if f is not None]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> ShardInfo:
        """`BadValue` where it cannot be. In few steps: an index may have a hundred thousand of them."""
        try:
            name, tokens, documents, size = value["name"], value["tokens"], value["documents"], value["tokens_bytes"]
            tokens_sum, docs, mask, pieces = (
                value["tokens_xxh3"], value["docs_xxh3"], value["mask_xxh3"], value["sums_xxh3"],
            )  # fmt: skip
            digits = f"{tokens_sum}{docs}{pieces}" if mask is None else f"{tokens_sum}{docs}{pieces}{mask}"
            sized = len(tokens_sum) == len(docs) == len(pieces) == 32 and (mask is None or len(mask) == 32)
        except KeyError as e:
            raise values.BadValue("it is missing", str(e.args[0])) from None
        except TypeError:
            raise values.BadValue("no shard") from None
        if type(name) is not str or not _SAFE_NAME.fullmatch(name):
            raise values.BadValue(f"{str(name)[:40]!r} is no name for a shard")
        if not sized or digits.strip("0123456789abcdef"):
            raise values.BadValue("a checksum that has not 32 hexadecimal digits", name)
        if not (type(tokens) is type(documents) is type(size) is int and 0 < documents <= tokens < size <= MOST_BYTES):
            for number in (tokens, documents, size):
                values.whole(number, MOST_BYTES, 1)
        found = cls.__new__(cls)
        found.__dict__.update(  # as the `__init__` of a frozen class does, in a quarter of its time
            name=name, tokens=tokens, documents=documents, tokens_xxh3=tokens_sum, docs_xxh3=docs, mask_xxh3=mask,
            sums_xxh3=pieces, tokens_bytes=size,
        )  # fmt: skip
        return found


@dataclass(frozen=True)
class Index:
    """A data set, as its index.json states it."""

    dtype: str
    vocab_size: int
    eos_id: int
    tokenizer: str
    tokens: int
    documents: int
    has_mask: bool
    fingerprint: str
    shards: tuple[ShardInfo, ...]
    source: dict[str, Any] = field(default_factory=dict)
    start_id: int | None = None
    """Every document begins with it (`shoal.data.starts`); None: made before there was one."""

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for shard in self.shards for file in shard.files)

    @property
    def sums(self) -> str:
        """A checksum over those of the pieces, with which all reading is compared. A run remembers it beside the
        fingerprint, so that no index with the old fingerprint and other `.sums` passes for the same data."""
        return xxhash.xxh3_128_hexdigest("\n".join(shard.sums_xxh3 for shard in self.shards).encode())

    def to_json(self) -> dict[str, Any]:
        return {"format": FORMAT, "version": VERSION, **asdict(self)}


def pieces_of(size_bytes: int) -> int:
    return -(-size_bytes // PIECE_BYTES)


def dtype_for(vocab_size: int) -> str:
    """The smallest type of the format that holds every id."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


def fingerprint_of(shards: Sequence[ShardInfo], vocab_size: int, dtype: str) -> str:
    """Names the content: equal tokens, boundaries and masks in equal order give an equal one, in any folder."""
    h = xxhash.xxh3_128(f"{FORMAT} {VERSION} {dtype} {vocab_size}\n".encode())
    for s in shards:
        h.update(f"{s.tokens} {s.documents} {s.tokens_xxh3} {s.docs_xxh3} {s.mask_xxh3 or '-'}\n".encode())
    return h.hexdigest()


def write_index(
    folder: str | os.PathLike[str],
    shards: Sequence[ShardInfo],
    *,
    vocab_size: int,
    eos_id: int,
    tokenizer: str,
    start_id: int | None = None,
    dtype: str | None = None,
    source: Mapping[str, Any] | None = None,
) -> Index:
    """Publish the data set: after this the folder can be opened. Empty shards are left out."""
    kept = tuple(s for s in shards if s.tokens)
    if not kept:
        raise DataError(
            f"no document was written to {folder}, so there is nothing to train on; look at the inputs and options."
        )
    masked = {s.mask_xxh3 is not None for s in kept}
    if len(masked) > 1:
        raise DataError(
            f"some shards in {folder} have a loss mask and some have none; prepare them all with the same options."
        )
    dtype = dtype or dtype_for(vocab_size)
    index = Index(
        dtype=dtype,
        vocab_size=vocab_size,
        eos_id=eos_id,
        start_id=start_id,
        tokenizer=tokenizer,
        tokens=sum(s.tokens for s in kept),
        documents=sum(s.documents for s in kept),
        has_mask=masked.pop(),
        fingerprint=fingerprint_of(kept, vocab_size, dtype),
        shards=kept,
        source=dict(source or {}),
    )
    parse_index(json.dumps(index.to_json()), str(folder))  # never publish what open() would refuse
    path = Path(folder) / INDEX_FILE
    temporary = path.with_name(f".{INDEX_FILE}.tmp")
    with open(temporary, "w", encoding="utf-8") as f:
        json.dump(index.to_json(), f, indent=1)
        f.flush()
        os.fsync(f.fileno())
    os.replace(temporary, path)
    fsync_folder(path.parent)
    return index


def parse_index(text: str | bytes, where: str) -> Index:
    """`where` names the data set in error messages."""
    try:
        value = values.read_large(text.encode() if isinstance(text, str) else text, 24 * MOST_SHARDS)
    except values.BadValue as e:
        raise DataError(f"{where}/{INDEX_FILE} is not valid JSON ({e}); prepare the data set again.") from None
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        raise DataError(f'{where}/{INDEX_FILE} is not the index of a Shoal data set (no "format": "{FORMAT}").')
    if (version := value.get("version")) != VERSION or type(version) is not int:
        raise SetupError(
            f"{where} has version {values.shown(version)} of the shard format and this Shoal reads version {VERSION}; "
            "upgrade Shoal or prepare the data set again."
        )
    try:
        index = _index_from(value)
    except values.BadValue as e:
        raise DataError(f"{where}/{INDEX_FILE} cannot be used ({e}); prepare the data set again.") from None
    wrong = _inconsistency(index)
    if wrong:
        raise DataError(f"{where}/{INDEX_FILE} contradicts itself: {wrong}; prepare the data set again.")
    return index


def _index_from(value: dict[str, Any]) -> Index:
    def told(name: str, read: Callable[[Any], T]) -> T:
        return values.field(value, name, read)

    with values.inside("shards"):
        shards = tuple(map(ShardInfo.from_json, told("shards", lambda said: values.items(said, MOST_SHARDS))))
    vocab_size = told("vocab_size", lambda said: values.whole(said, MOST_IDS, 1))
    return Index(
        dtype=told("dtype", lambda said: values.one_of(said, ITEM_BYTES)),
        vocab_size=vocab_size,
        eos_id=told("eos_id", values.whole),
        tokenizer=told("tokenizer", _tokenizer),
        tokens=told("tokens", values.whole),
        documents=told("documents", values.whole),
        has_mask=told("has_mask", values.flag),
        fingerprint=told("fingerprint", values.short),
        shards=shards,
        source=told("source", _source),
        start_id=values.field(value, "start_id", values.maybe(values.whole), None),
    )


def _source(said: object) -> dict[str, Any]:
    """Where it came from, for people: what is shown has its type, other fields may be anything."""
    source = values.looked_at(said)
    for name, read in (("named", values.each(values.short)), ("skipped", values.by_name(_skipped))):
        if name in source:
            values.field(source, name, read)
    return source


def _skipped(said: object) -> int:
    values.field(said, "first", values.short)
    return values.field(said, "count", values.whole)


def _tokenizer(said: object) -> str:
    """`byte`, or a file of the same folder."""
    if not _SAFE_NAME.fullmatch(values.short(said)):
        raise values.BadValue(f"{str(said)[:40]!r} is no file of the data set's own folder")
    return values.short(said)


def index_in(folder: Path) -> Index | None:
    """Of the data set in a folder, if it is sound; None where there is no such."""
    try:
        return parse_index(read_plain(folder / INDEX_FILE, MOST_INDEX_BYTES), str(folder))
    except (OSError, ShoalError):
        return None


def fingerprint_in(folder: Path) -> str | None:
    index = index_in(folder)
    return None if index is None else index.fingerprint


def _inconsistency(index: Index) -> str | None:
    shards = index.shards
    if not 0 <= index.eos_id < index.vocab_size:
        return f"the end-of-document id {index.eos_id} is outside the vocabulary of {index.vocab_size}"
    if index.start_id is not None and not 0 <= index.start_id < index.vocab_size:
        return f"the start-of-document id {index.start_id} is outside the vocabulary of {index.vocab_size}"
    if dtype_for(index.vocab_size) == "uint32" and index.dtype == "uint16":
        return f"a vocabulary of {index.vocab_size} does not fit uint16"
    if (index.tokens, index.documents) != (sum(s.tokens for s in shards), sum(s.documents for s in shards)):
        return "its totals differ from the sums over its shards"
    if len({s.name for s in shards}) != len(shards):
        return "two shards have the same name"
    for s in shards:
        if s.tokens_bytes != s.tokens * ITEM_BYTES[index.dtype] or s.documents > s.tokens:
            return f"the sizes of {s.name} do not fit together"
        if (s.mask_xxh3 is not None) != index.has_mask:
            return f"{s.name} and has_mask disagree"
    if index.fingerprint != fingerprint_of(shards, index.vocab_size, index.dtype):
        return "its fingerprint is not that of its shards"
    return None


def fsync_folder(folder: Path) -> None:
    """A rename survives a power cut only once the folder itself is on disk."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
