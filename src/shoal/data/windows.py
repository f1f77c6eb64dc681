"""Windows: fixed-length pieces of a data set's stream, assembled into batches with document masks and positions.

Window w of length L has the tokens [w·L, w·L + L] of its source: the first L are inputs, the last L are targets.
Documents are packed end to end; one longer than a window goes on in the next, a window may hold many.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from shoal.data.shards import TokenShards
from shoal.errors import DataError

I64: TypeAlias = npt.NDArray[np.int64]
NO_TARGET = -100  # what torch's cross_entropy ignores


@dataclass(frozen=True)
class Batch:
    """Windows ready for the model. Every array is [batch, seq]."""

    tokens: I64
    targets: I64
    """The next token, or NO_TARGET where it is no target: past the end of a document, or masked in the data."""
    positions: I64
    """Place in its document as far as the window shows it; place in the window when documents are not masked."""
    documents: npt.NDArray[np.int32]
    """Counts the documents of the window from 0; all 0 when documents are not masked."""

    @property
    def target_count(self) -> int:
        return int(np.count_nonzero(self.targets != NO_TARGET))


class Windows:
    """The windows of some open data sets, read by (source, window)."""

    def __init__(self, sources: Sequence[TokenShards], seq_len: int, mask_documents: bool) -> None:
        self.sources = tuple(sources)
        self.seq_len = seq_len
        self.mask_documents = mask_documents
        for source in self.sources:
            if source.tokens < seq_len + 1:
                raise DataError(
                    f"{source.where} has {source.tokens:,} tokens and one window needs {seq_len + 1:,} "
                    f"(data.seq_len {seq_len:,} and the token after it); add text or lower data.seq_len."
                )
        self.sizes = tuple((source.tokens - 1) // seq_len for source in self.sources)

    def batch(self, sources: npt.ArrayLike, windows: npt.ArrayLike) -> Batch:
        """The given windows, one a row, in the given order."""
        source, window = np.asarray(sources, np.int64), np.asarray(windows, np.int64)
        rows, length = len(window), self.seq_len
        tokens = np.empty((rows, length), np.int64)
        targets = np.empty((rows, length), np.int64)
        borders: list[I64] = []  # flat places of the inputs that end a document
        for k in range(len(self.sources)) if len(self.sources) > 1 else (0,):
            mine = np.flatnonzero(source == k)
            if mine.size:
                borders += _fill(self.sources[k], mine, window[mine] * length, tokens, targets)
        ends = np.concatenate(borders) if borders else np.empty(0, np.int64)
        targets.reshape(-1)[ends] = NO_TARGET  # the next document is no continuation of this one
        positions, documents = self._layout(rows, ends)
        return Batch(tokens, targets, positions, documents)

    def _layout(self, rows: int, ends: I64) -> tuple[I64, npt.NDArray[np.int32]]:
        length = self.seq_len
        places = np.arange(length)
        begins = ends[ends % length != length - 1] + 1 if self.mask_documents else ends[:0]
        if not begins.size:  # every window is one document, as far as the model can tell
            return np.tile(places, (rows, 1)), np.zeros((rows, length), np.int32)
        documents = np.zeros((rows, length), np.int32)
        documents.reshape(-1)[begins] = 1
        np.cumsum(documents, axis=1, out=documents)
        begin = np.zeros((rows, length), np.int64)
        begin.reshape(-1)[begins] = begins % length
        np.maximum.accumulate(begin, axis=1, out=begin)
        return np.subtract(places, begin, out=begin), documents


def _fill(source: TokenShards, rows: I64, starts: I64, tokens: I64, targets: I64) -> list[I64]:
    """Copy the windows that begin at `starts` into `rows`; the flat places of the inputs that end a document come back.

    Goes shard by shard, so that a batch asks for each shard once, and looks up all borders of a shard at once: Python's
    work is per shard plus one copy a window.
    """
    length = tokens.shape[1]
    source.want(starts, length + 1)
    shard_of = np.searchsorted(source.starts, starts, side="right") - 1
    crossing = starts + length >= source.starts[shard_of + 1]
    borders = [
        _fill_crossing(source, int(r), int(s), tokens, targets)
        for r, s in zip(rows[crossing], starts[crossing], strict=True)
    ]
    for i in np.unique(shard_of[~crossing]):
        inside = (shard_of == i) & ~crossing
        shard = source.shard(int(i))
        row, start = rows[inside], starts[inside] - source.starts[i]
        for r, s in zip(row.tolist(), start.tolist(), strict=True):
            tokens[r] = shard.tokens[s : s + length]
            targets[r] = shard.tokens[s + 1 : s + length + 1]
            if shard.mask is not None:
                targets[r, shard.mask[s + 1 : s + length + 1] == 0] = NO_TARGET
        first = np.searchsorted(shard.ends, start, side="right")
        count = np.searchsorted(shard.ends, start + length, side="right") - first
        # All [first, first + count) ranges laid end to end: document numbers of the borders in these windows.
        number = np.arange(count.sum()) + np.repeat(first - (np.cumsum(count) - count), count)
        borders.append(shard.ends[number] - 1 + np.repeat(row * length - start, count))
    return borders


def _fill_crossing(source: TokenShards, row: int, start: int, tokens: I64, targets: I64) -> I64:
    """A window that lies in more than one shard."""
    length = tokens.shape[1]
    ids, ends, mask = source.read(start, start + length + 1)
    tokens[row] = ids[:-1]
    targets[row] = ids[1:]
    if mask is not None:
        targets[row, mask[1:] == 0] = NO_TARGET
    return ends[ends <= length] - 1 + row * length
