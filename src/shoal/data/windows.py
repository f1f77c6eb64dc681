"""Windows: fixed-length pieces of a data set's stream, assembled into batches with document masks and positions.

Window w of length L has the tokens [w·L, w·L + L] of its source: the first L are inputs, the last L are targets.
Documents are packed end to end; one longer than a window goes on in the next, a window may hold many. That is to chop.
Prompts and answers are packed by best fit instead (`shoal.data.packs`): no pair that fits a window is cut, and what is
left of a window is padding.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from shoal.data.folder import Shard
from shoal.data.packs import Packs, Pieces, by_best_fit
from shoal.data.shards import TokenShards
from shoal.errors import DataError

if TYPE_CHECKING:
    from shoal.spec.run import Data, Packing

I64: TypeAlias = npt.NDArray[np.int64]
NO_TARGET = -100  # what torch's cross_entropy ignores
PADDING = (1 << 31) - 1  # the document number of padding: numbers rise along a row, and this one comes last


@dataclass(frozen=True)
class Batch:
    """Windows ready for the model. Every array is [batch, seq]."""

    tokens: I64
    targets: I64
    """The next token, or NO_TARGET where it is no target: past the end of a document, or masked in the data."""
    positions: I64
    """Place in its document as far as the window shows it; place in the window when documents are not masked."""
    documents: npt.NDArray[np.int32]
    """Counts the documents of the window from 0; all 0 when documents are not masked. PADDING: no document's."""

    @property
    def target_count(self) -> int:
        return int(np.count_nonzero(self.targets != NO_TARGET))

    @cached_property
    def token_count(self) -> int:
        """Without padding."""
        return int(np.count_nonzero(self.documents != PADDING))

    @property
    def padding(self) -> npt.NDArray[np.bool_] | None:
        """Which tokens only fill a row; None: none of them."""
        return self.documents == PADDING if self.token_count < self.tokens.size else None

    @cached_property
    def lengths(self) -> I64:
        """Of the stretches of one document, row after row: what attention computes depends on them. Padding is none."""
        new = np.ones(self.documents.shape, np.bool_)  # every row begins one
        np.not_equal(self.documents[:, 1:], self.documents[:, :-1], out=new[:, 1:])
        begins = np.flatnonzero(new)
        return np.diff(begins, append=self.documents.size)[self.documents.reshape(-1)[begins] != PADDING]


class AnyWindows(ABC):
    """The windows of a run's data, read by (source, window), whoever has them."""

    several: bool
    """Rows may hold several documents that are kept apart, or one and padding."""

    @property
    @abstractmethod
    def sizes(self) -> tuple[int, ...]:
        """How many windows each source has."""

    @abstractmethod
    def batch(self, sources: npt.ArrayLike, windows: npt.ArrayLike) -> Batch:
        """The given windows, one a row, in the given order."""

    def micro_batches(self, sources: I64, windows: I64, size: int) -> list[Batch]:
        """The given windows, in batches of `size` rows."""
        cuts = range(0, len(windows), size)
        return [self.batch(sources[i : i + size], windows[i : i + size]) for i in cuts]


class Windows(AnyWindows):
    """The windows of some open data sets."""

    def __init__(
        self, sources: Sequence[TokenShards], seq_len: int, mask_documents: bool, packing: Packing = "chop"
    ) -> None:
        self.sources = tuple(sources)
        self.seq_len = seq_len
        self.mask_documents = mask_documents
        self.packs = tuple(Packs(source, seq_len) if by_best_fit(packing, source) else None for source in self.sources)
        for source, packs in zip(self.sources, self.packs, strict=True):
            if packs is None and source.tokens < seq_len + 1:
                raise DataError(
                    f"{source.where} has {source.tokens:,} tokens and one window needs {seq_len + 1:,} "
                    f"(data.seq_len {seq_len:,} and the token after it); add text or lower data.seq_len."
                )
        self._dtype = np.result_type(*(source.dtype for source in self.sources))
        self._masked = any(source.has_mask for source in self.sources)
        self.several = any(self.packs) or (mask_documents and any(source.documents > 1 for source in self.sources))

    @classmethod
    def of(cls, sources: Sequence[TokenShards], data: Data) -> Windows:
        """As a run file has them."""
        return cls(sources, data.seq_len, data.mask_documents, data.packing)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """How many windows each source has. By best fit that takes a look at every document's length: seconds for ten
        millions of them."""
        pairs = zip(self.sources, self.packs, strict=True)
        return tuple((s.tokens - 1) // self.seq_len if packs is None else packs.count for s, packs in pairs)

    def batch(self, sources: npt.ArrayLike, windows: npt.ArrayLike) -> Batch:
        source, window = np.asarray(sources, np.int64), np.asarray(windows, np.int64)
        rows = _Rows(len(window), self.seq_len, self._dtype, self._masked)
        for k in range(len(self.sources)):
            mine = np.flatnonzero(source == k)
            packs = self.packs[k]
            if mine.size and packs is None:
                rows.fill(self.sources[k], mine, window[mine] * self.seq_len)
            elif mine.size and packs is not None:
                rows.fill_packed(self.sources[k], mine, packs.pieces(window[mine]))
        ends = np.concatenate(rows.borders) if rows.borders else np.empty(0, np.int64)
        targets = rows.ids[:, 1:].astype(np.int64)
        targets.reshape(-1)[ends] = NO_TARGET  # the next document is no continuation of this one
        if rows.trained is not None:
            targets[rows.trained == 0] = NO_TARGET
        padding = np.arange(self.seq_len + 1) >= rows.used[:, None] if any(self.packs) else None
        if padding is not None:
            targets[padding[:, 1:]] = NO_TARGET
        positions, documents = self._layout(len(window), ends, rows.used)
        if padding is not None:
            documents[padding[:, :-1]] = PADDING
        batch = Batch(rows.ids[:, :-1].astype(np.int64), targets, positions, documents)
        _ = batch.lengths, batch.token_count  # counted in the thread that assembles, not when the step wants it
        return batch

    def _layout(self, rows: int, ends: I64, used: I64) -> tuple[I64, npt.NDArray[np.int32]]:
        """Positions and document numbers, [rows, seq], from the flat places of the inputs that end a document."""
        length, size = self.seq_len, rows * self.seq_len
        if self.mask_documents:  # padding begins where the last document has ended
            begins = ends[ends % length != length - 1] + 1
        else:
            begins = (used + np.arange(0, size, length))[used < length]
        # Every row is cut into stretches of one document; each stretch is a run of equal values, which repeat() lays.
        row_begins = np.arange(0, size, length)
        cuts = np.concatenate([row_begins, begins])
        cuts.sort()
        lengths = np.diff(cuts, append=size)
        first = cuts.searchsorted(row_begins)  # which stretch a row begins with
        number = np.arange(len(cuts)) - first.repeat(np.diff(first, append=len(cuts)))
        positions = np.arange(size)
        positions -= cuts.repeat(lengths)
        documents = number.astype(np.int32).repeat(lengths)
        return positions.reshape(rows, length), documents.reshape(rows, length)


class _Rows:
    """The rows of a batch while they are read."""

    def __init__(self, rows: int, length: int, dtype: npt.DTypeLike, masked: bool) -> None:
        self.length = length
        self.ids: npt.NDArray[Any] = np.empty((rows, length + 1), dtype)
        self.trained = np.ones((rows, length), np.uint8) if masked else None  # 0: the target is context only
        self.borders: list[I64] = []  # flat places, in [rows, length], of the inputs that end a document
        self.used = np.full(rows, length + 1)  # tokens of each row that are no padding

    def fill(self, source: TokenShards, rows: I64, starts: I64) -> None:
        """Read the windows that begin at `starts` into `rows`.

        Goes shard by shard, so that each is asked for once, and looks up all borders in a shard at once: Python's work
        is a few calls a shard and one copy a window.
        """
        source.want(starts, self.length + 1)
        shard_of = source.starts.searchsorted(starts, side="right") - 1
        local = starts - source.starts[shard_of]
        crossing = starts + self.length >= source.starts[shard_of + 1]
        if crossing.any():
            for row, start in zip(rows[crossing].tolist(), starts[crossing].tolist(), strict=True):
                self._fill_crossing(source, row, start)
            inside = ~crossing
            rows, local, shard_of = rows[inside], local[inside], shard_of[inside]
        by_shard = np.argsort(shard_of, kind="stable")
        rows, local, shard_of = rows[by_shard], local[by_shard], shard_of[by_shard]
        cuts = [0, *(np.flatnonzero(np.diff(shard_of)) + 1).tolist(), len(rows)]
        for lo, hi in itertools.pairwise(cuts):
            if lo < hi:
                self._fill_inside(source.shard(int(shard_of[lo])), rows[lo:hi], local[lo:hi])

    def _fill_inside(self, shard: Shard, rows: I64, starts: I64) -> None:
        length, ids, tokens = self.length, self.ids, shard.tokens
        for row, start in zip(rows.tolist(), starts.tolist(), strict=True):
            ids[row] = tokens[start : start + length + 1]
            if shard.mask is not None and self.trained is not None:
                self.trained[row] = shard.mask[start + 1 : start + length + 1]
        first = shard.ends.searchsorted(starts, side="right")
        count = shard.ends.searchsorted(starts + length, side="right") - first
        # All ranges [first, first + count) laid end to end: the documents that end in these windows.
        total = np.cumsum(count)
        number = np.arange(total[-1]) + (first - total + count).repeat(count)
        self.borders.append(shard.ends[number] + (rows * length - starts - 1).repeat(count))

    def _fill_crossing(self, source: TokenShards, row: int, start: int) -> None:
        """A window that lies in more than one shard."""
        ids, ends, mask = source.read(start, start + self.length + 1)
        self.ids[row] = ids
        if mask is not None and self.trained is not None:
            self.trained[row] = mask[1:]
        self.borders.append(ends[ends <= self.length] - 1 + row * self.length)

    def fill_packed(self, source: TokenShards, rows: I64, pieces: Pieces) -> None:
        """Read these pieces into `rows`, and fill up what is left of each. No piece lies in more than one shard."""
        source.want(pieces.start, pieces.length)
        row, stop = rows[pieces.row], pieces.at + pieces.length
        shard_of = source.starts.searchsorted(pieces.start, side="right") - 1
        local = pieces.start - source.starts[shard_of]
        for i in np.unique(shard_of).tolist():
            shard = source.shard(i)
            some = shard_of == i
            for r, lo, hi, at in zip(*(a[some].tolist() for a in (row, pieces.at, stop, local)), strict=True):
                self.ids[r, lo:hi] = shard.tokens[at : at + hi - lo]
                if shard.mask is not None and self.trained is not None:
                    # trained[j] is of the token at j + 1: of a piece's first token only where it is not the row's.
                    self.trained[r, max(lo - 1, 0) : hi - 1] = shard.mask[at + (lo == 0) : at + hi - lo]
        last = np.append(np.flatnonzero(np.diff(pieces.row)), len(row) - 1)
        self.used[row[last]] = stop[last]
        for r, used in zip(row[last].tolist(), stop[last].tolist(), strict=True):
            self.ids[r, used:] = source.eos_id
        inside = stop <= self.length
        self.borders.append((row * self.length + stop - 1)[inside])
