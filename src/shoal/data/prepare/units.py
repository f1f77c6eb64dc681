"""What is to be read, cut into units of work by the input alone: the result is the same for any number of workers.

A unit is some pieces in order; a piece is a whole file, or a range of a file that can be cut: bytes of plain text and
JSONL (cut after a separator), row groups of Parquet, rows or shards of a Hugging Face dataset.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from shoal.data.prepare.bad_input import Problems
from shoal.data.prepare.inputs import Input
from shoal.data.prepare.readers_bytes import BLOCK_BYTES, CUT_SEARCH_BYTES, MAX_DOCUMENT_BYTES, document_cut
from shoal.plain_file import open_plain

# Large enough that a shard is worth a file, small enough that a kill costs seconds; 64 units keep many cores busy.
MIN_UNIT_BYTES = 4 << 20
MAX_UNIT_BYTES = 256 << 20
UNITS = 64
TABLES = ("parquet", "hf-disk", "hf-stream")  # kinds whose readers are not ours, and stay out of this process
LIMITS = ("max_document_mb", "buffer_mb", "max_growth")  # of Reading: what is refused, and not what is made of the rest


@dataclass(frozen=True)
class Reading:
    """What a document is: the options that readers need."""

    text_field: str = "text"
    prompt_field: str | None = None
    separator: str | None = None
    """Between the documents of a plain text file; None: one document a file."""
    split: str = "train"
    config: str | None = None
    revision: str | None = None
    max_document_mb: int = 16
    """A longer record is refused: it has to fit into memory many times over (shoal.data.prepare.memory_limit)."""
    buffer_mb: int = 128
    """The largest window of a zstandard file, or page of a Parquet file, that is taken."""
    max_growth: int = 200
    """A packed file that holds more than so many times its size is refused
    (shoal.data.prepare.readers_bytes.Growth)."""

    @property
    def fields(self) -> list[str]:
        """Of a row, those that are read."""
        return [f for f in (self.text_field, self.prompt_field) if f is not None]

    @property
    def document_bytes(self) -> int:
        return self.max_document_mb << 20

    @property
    def buffer_bytes(self) -> int:
        return self.buffer_mb << 20


@dataclass(frozen=True)
class Piece:
    input: Input
    start: int
    stop: int
    size_bytes: int
    """Its share of the work, for progress and for cutting units."""

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Piece:
        return cls(**{**value, "input": Input(**value["input"])})


@dataclass(frozen=True)
class Unit:
    number: int
    pieces: tuple[Piece, ...]

    @property
    def size_bytes(self) -> int:
        return sum(p.size_bytes for p in self.pieces)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Unit:
        return cls(value["number"], tuple(Piece.from_json(p) for p in value["pieces"]))


def plan_units(inputs: Sequence[Input], reading: Reading, problems: Problems) -> list[Unit]:
    total = sum(i.size_bytes for i in inputs)
    unit_bytes = min(max(total // UNITS, MIN_UNIT_BYTES), MAX_UNIT_BYTES)
    tables = [one for one in inputs if one.kind in TABLES]
    looked = iter(_look(tables, reading, unit_bytes, problems))
    units: list[Unit] = []
    gathered: list[Piece] = []
    size = 0
    for one in inputs:
        cuts = next(looked) if one.kind in TABLES else _cuts(one, reading, unit_bytes, problems)
        for piece in (Piece(one, *cut) for cut in cuts):
            gathered.append(piece)
            size += piece.size_bytes
            if size >= unit_bytes:
                units.append(Unit(len(units), tuple(gathered)))
                gathered, size = [], 0
    if gathered:
        units.append(Unit(len(units), tuple(gathered)))
    return units


def _look(
    tables: Sequence[Input], reading: Reading, unit_bytes: int, problems: Problems
) -> list[list[tuple[int, int, int]]]:
    if not tables:
        return []
    from shoal.data.prepare.table_look import look_at_tables

    return look_at_tables(tables, reading, unit_bytes, problems)


def _cuts(one: Input, reading: Reading, unit_bytes: int, problems: Problems) -> Iterator[tuple[int, int, int]]:
    """(start, stop, size) of the pieces of a file of text or JSONL."""
    if one.size_bytes == 0:
        problems.found("empty file", lambda: one.path, "is empty", "remove it")
        return
    cuts = [0, one.size_bytes]
    if not one.packing:
        if one.kind == "jsonl":
            cuts = _cuts_after(one.path, one.size_bytes, b"\n", unit_bytes)
        elif reading.separator is not None:
            cuts = _cuts_after(one.path, one.size_bytes, reading.separator.encode(), unit_bytes)
        else:
            cuts = _document_cuts(one.path, one.size_bytes)
    for lo, hi in pairwise(cuts):
        yield lo, hi, hi - lo


def _cuts_after(path: str, size: int, separator: bytes, step: int) -> list[int]:
    """Offsets after a separator, at least `step` apart. What lies between two of them can be split by itself."""
    cuts = [0]
    with open(open_plain(path), "rb") as f:
        while cuts[-1] + 2 * step <= size:
            at = _find(f.fileno(), separator, cuts[-1] + step)
            if at is None or at + len(separator) >= size:
                break
            cuts.append(at + len(separator))
    return [*cuts, size]


def _find(fd: int, separator: bytes, at: int) -> int | None:
    while block := os.pread(fd, BLOCK_BYTES, at):
        found = block.find(separator)
        if found >= 0:
            return at + found
        if len(block) < len(separator):
            return None
        at += len(block) - len(separator) + 1
    return None


def _document_cuts(path: str, size: int) -> list[int]:
    """The same cuts that a reader of the stream makes, found without reading all of it."""
    cuts = [0]
    with open(open_plain(path), "rb") as f:
        while size - cuts[-1] > MAX_DOCUMENT_BYTES:
            end = cuts[-1] + MAX_DOCUMENT_BYTES
            tail = os.pread(f.fileno(), CUT_SEARCH_BYTES, end - CUT_SEARCH_BYTES)
            cuts.append(end - len(tail) + document_cut(tail))
    return [*cuts, size]
