"""What a journal tells, without holding it in memory: steps as columns, other records by need.

`told(path)` reads what is new since the last reader, and a few columns of the rest (`shoal.journal.index`). A list of
records gives the same view: `Told.of(records)`.
"""

from __future__ import annotations

import bisect
import math
import os
from collections.abc import Container, Iterable, Iterator
from pathlib import Path

import numpy as np

from shoal.errors import SetupError
from shoal.journal.columns import Array, Block, Builder, missing
from shoal.journal.index import BLOCK_BYTES, blocks_of, index_file
from shoal.journal.journal import MOST_LINE_BYTES, opened
from shoal.journal.record import Odd, Record, parse


class _Every:
    def __contains__(self, kind: object) -> bool:
        return True


EVERY = _Every()  # kind of record
CHUNK = 1 << 17  # rows that are reckoned with at once, by those who need not see all of them


class Told:
    def __init__(self, blocks: list[Block], path: Path | None = None, records: list[Record] | None = None) -> None:
        """`records` are the others in their order, where they are at hand; else they are read from `path`."""
        self._blocks, self._path, self._records = blocks, path, records
        self._starts = [0]
        for block in blocks:
            self._starts.append(self._starts[-1] + block.rows)
        self._whole: dict[int, Record] = {}  # by offset

    @classmethod
    def of(cls, records: Iterable[Record]) -> Told:
        told = list(records)
        builder = Builder(0)
        for i, record in enumerate(told):
            builder.add(record, i, i + 1)
        return cls([builder.block()], records=[r for r in told if r["kind"] != "step"])

    @property
    def rows(self) -> int:
        """How many steps it tells of."""
        return self._starts[-1]

    @property
    def empty(self) -> bool:
        return not any(block.rows or block.others for block in self._blocks)

    @property
    def end(self) -> int:
        """The offset after the last whole line."""
        return self._blocks[-1].end if self._blocks else 0

    @property
    def odd(self) -> Odd:
        found = Odd()
        for block in self._blocks:
            found.first_byte = found.first_byte if found.count else block.odd.first_byte
            found.count += block.odd.count
        return found

    def has(self, name: str) -> bool:
        """Whether any step says it."""
        return any(name in block.columns for block in self._blocks)

    def columns(self, group: str) -> list[str]:
        """The fields of `time` or `device` that steps have, in the order in which they first came."""
        names = dict.fromkeys(name for block in self._blocks for name in block.columns)
        return [name.removeprefix(f"{group}.") for name in names if name.startswith(f"{group}.")]

    def column(self, name: str, begin: int = 0, end: int | None = None) -> Array:
        """A field of the steps from row `begin` to `end`."""
        end = self.rows if end is None else min(end, self.rows)
        out = np.empty(max(0, end - begin), missing(name)[0])
        at, i = begin, max(0, bisect.bisect_right(self._starts, begin) - 1)
        while at < end:
            block, first = self._blocks[i], self._starts[i]
            stop = min(end, first + block.rows)
            if stop > at:
                out[at - begin : stop - begin] = block.column(name)[at - first : stop - first]
                at = stop
            i += 1
        return out

    def islands(self, begin: int = 0) -> Iterator[tuple[list[int], int]]:
        """Sets of islands that took steps together, each with the furthest such step of a block."""
        for block, first in zip(self._blocks, self._starts, strict=False):
            if block.islands and first + block.rows > begin:
                codes, steps = block.column("islands"), block.column("step")
                for code, islands in enumerate(block.islands):
                    if (taken := steps[codes == code]).size:
                        yield islands, int(taken.max())

    def island_counts(self) -> Array:
        """How many islands took each step; 0 where it does not say."""
        out = np.zeros(self.rows, "<i8")
        for block, first in zip(self._blocks, self._starts, strict=False):
            if block.islands:
                counts = np.array([*map(len, block.islands), 0])  # the last is that of -1
                out[first : first + block.rows] = counts[block.column("islands")]
        return out

    def others(self, whole: Container[str] = ()) -> list[tuple[int, Record]]:
        """Every record that is no step, in order, with the number of steps before it. Of those whose kind is `whole`
        all of it; of the rest `kind`, `t`, `begin`, `attempt` and `step`."""
        if self._records is not None:
            places = [place for block in self._blocks for place in block.other("place").tolist()]
            return list(zip(places, self._records, strict=True))
        found: list[tuple[int, Record]] = []
        wanted: list[tuple[int, int, int]] = []
        for block, first in zip(self._blocks, self._starts, strict=False):
            names = ("kind", "place", "t", "begin", "attempt", "step", "offset", "bytes")
            kinds = dict(enumerate(block.kinds))
            for kind, place, t, begin, attempt, step, offset, size in zip(
                *(block.other(name).tolist() for name in names), strict=True
            ):
                record: Record = {"kind": kinds.get(kind, ""), "t": t}
                if record["kind"] in whole:
                    if offset in self._whole:
                        record = self._whole[offset]
                    else:
                        wanted.append((len(found), offset, size))
                else:
                    record |= {} if math.isnan(begin) else {"begin": begin}
                    record |= {} if attempt < 0 else {"attempt": attempt}
                    record |= {} if step < 0 else {"step": step}
                found.append((first + place, record))
        for i, record in self._read(wanted, found):
            found[i] = (found[i][0], record)
        return found

    def newest(self, kind: str) -> Record | None:
        """The one of the highest step; of several, the last."""
        if self._records is not None:
            told = [r for r in self._records if r["kind"] == kind]
            return max(reversed(told), key=lambda r: int(r["step"]), default=None)
        best: tuple[int, int, int] | None = None
        for block in self._blocks:
            if kind not in block.kinds:
                continue
            of_kind = block.other("kind") == block.kinds.index(kind)
            steps, offsets, sizes = (block.other(name)[of_kind] for name in ("step", "offset", "bytes"))
            if steps.size and (best is None or steps.max() >= best[0]):
                last = int(np.flatnonzero(steps == steps.max())[-1])
                best = int(steps[last]), int(offsets[last]), int(sizes[last])
        if best is None:
            return None
        return next(record for _, record in self._read([(0, *best[1:])], [(0, {"kind": kind})]))

    def _read(self, wanted: list[tuple[int, int, int]], of: list[tuple[int, Record]]) -> Iterator[tuple[int, Record]]:
        if not wanted:
            return
        assert self._path is not None  # else the records are at hand
        with opened(self._path) as f:
            for i, offset, size in wanted:
                fits = 0 <= size <= MOST_LINE_BYTES and offset >= 0
                record = parse(os.pread(f.fileno(), size, offset)) if fits else None
                if record is None or record["kind"] != of[i][1]["kind"]:
                    index = index_file(self._path)
                    index.unlink(missing_ok=True)
                    raise SetupError(f"{self._path} was changed after {index.name} was made of it; try once more.")
                self._whole[offset] = record
                yield i, record


def told(path: Path, block_bytes: int = BLOCK_BYTES) -> Told:
    return Told(blocks_of(path, block_bytes), path)


def told_of(records: Told | Iterable[Record]) -> Told:
    return records if isinstance(records, Told) else Told.of(records)
