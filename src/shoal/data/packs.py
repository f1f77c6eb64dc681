"""Which pieces of which documents stand in a window, where documents are packed by best fit.

A window of length L holds L + 1 tokens, as everywhere: the first L are read, the last L are targets. A document of up
to L + 1 tokens is one piece, and is never cut. A longer one is windowed: pieces of L + 1 tokens, each of which shares a
token with the next, and its tail is packed like a document. Packs follow from the lengths of documents alone, block by
block; an order shuffles them as it shuffles windows, so any step is reached as directly.
Memory: 12 bytes for each piece and 8 for each window, in each process that reads; and some MB while a block is packed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from shoal.data.best_fit import best_fit
from shoal.data.order import I64
from shoal.data.shards import TokenShards
from shoal.errors import DataError
from shoal.readable import percent

if TYPE_CHECKING:
    from shoal.spec.run import Packing

# Documents that are packed together. A part of the promise that a run reads tomorrow what it would have read today, as
# are the values of `best_fit`: another number makes other windows. More of them fill windows by some hundredths of a
# percent better; fewer lie nearer together, which matters on an object store.
BLOCK = 65_536
# 12 bytes for each of them in each process: beyond that, text is better chopped.
MOST_DOCUMENTS = 1 << 28


def by_best_fit(packing: Packing, source: TokenShards) -> bool:
    """`pairs`: prompts and answers are, which have a mask; text is not."""
    return packing == "best-fit" or (packing == "pairs" and source.has_mask)


@dataclass(frozen=True)
class Pieces:
    """Some pieces, window after window: [pieces] each."""

    row: I64
    """Which of the asked windows."""
    start: I64
    """The first token, in the stream of the data set."""
    length: I64
    at: I64
    """Its place in the window."""


class Packs:
    """The windows of one data set, by best fit."""

    def __init__(self, source: TokenShards, seq_len: int) -> None:
        self.source, self.seq_len = source, seq_len
        if source.documents > MOST_DOCUMENTS:
            raise DataError(
                f"{source.where} has {source.documents:,} documents, and best-fit packing keeps a list of at most "
                f"{MOST_DOCUMENTS:,} in memory; set data.packing to chop."
            )

    @property
    def count(self) -> int:
        return len(self._table[2]) - 1

    @cached_property
    def _table(self) -> tuple[I64, np.ndarray[tuple[int], np.dtype[np.uint32]], I64]:
        """Starts and lengths of all pieces, window after window, and where each window begins among them."""
        starts, lengths, begins = [], [], [np.zeros(1, np.int64)]
        pieces = 0
        for block_starts, block_lengths, cuts in self.blocks():
            starts.append(block_starts)
            lengths.append(block_lengths.astype(np.uint32))
            begins.append(cuts[1:] + pieces)
            pieces += len(block_starts)
        return np.concatenate(starts), np.concatenate(lengths), np.concatenate(begins)

    def blocks(self) -> Iterator[tuple[I64, I64, I64]]:
        """Starts, lengths and window borders of each block, packed."""
        for ends, begin in _blocks(self.source):
            yield pack(ends, begin, self.seq_len)

    def pieces(self, windows: I64) -> Pieces:
        """Of these windows, in this order."""
        starts, lengths, begins = self._table
        first, count = begins[windows], begins[windows + 1] - begins[windows]
        row = np.arange(len(windows)).repeat(count)
        total = np.cumsum(count)
        number = np.arange(total[-1]) + (first - total + count).repeat(count)
        length = lengths[number].astype(np.int64)
        at = np.cumsum(length) - length
        return Pieces(row, starts[number], length, at - at[total - count].repeat(count))


def pack(ends: I64, begin: int, seq_len: int) -> tuple[I64, I64, I64]:
    """Documents that end there, the first of them beginning at `begin`: starts and lengths of pieces, window after
    window, and where each window begins among them. Pieces of a window stand as they do in the data set."""
    begins = np.concatenate([np.array([begin], np.int64), ends[:-1]])
    sizes = ends - begins
    whole = whole_windows(sizes, seq_len)
    total = np.cumsum(whole + 1)
    nth = np.arange(total[-1]) - (total - whole - 1).repeat(whole + 1)  # which piece of its document
    starts = begins.repeat(whole + 1) + nth * seq_len
    lengths = np.minimum(sizes.repeat(whole + 1) - nth * seq_len, seq_len + 1)
    bins = best_fit(lengths, seq_len + 1)
    order = np.argsort(bins, kind="stable")
    cuts = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.bincount(bins))])
    return starts[order], lengths[order], cuts


def whole_windows(sizes: I64, seq_len: int) -> I64:
    """How many windows a document fills by itself, before its last piece: 0 for one that fits a window."""
    return np.maximum(0, -(-(sizes - seq_len - 1) // seq_len))


def _blocks(source: TokenShards) -> Iterator[tuple[I64, int]]:
    """The ends of BLOCK documents at a time, in the stream, and where the first of them begins."""
    shards = source.index.shards
    source.folder.want(lambda: [(shard, 0, 0) for shard in shards])  # borders alone, many requests at a time
    waiting: list[I64] = []
    begin = 0
    for i in range(len(shards)):
        waiting.append(source.shard(i).ends + int(source.starts[i]))
        if sum(map(len, waiting)) < BLOCK and i < len(shards) - 1:
            continue
        together = np.concatenate(waiting)
        full = len(together) if i == len(shards) - 1 else len(together) // BLOCK * BLOCK
        for lo in range(0, full, BLOCK):
            ends = together[lo : min(lo + BLOCK, full)]
            yield ends, begin
            begin = int(ends[-1])
        waiting = [together[full:]]


Shares = dict[str, dict[str, float]]


def shares(source: TokenShards, seq_len: int) -> Shares:
    """Of both ways to make windows: how many, the share of padding in them, and of documents that are cut."""
    windows = padding = longer = cut = 0
    whole = (source.tokens - 1) // seq_len
    last = whole * seq_len if whole else -1  # the last token that chopped windows hold
    for ends, begin in _blocks(source):
        _, lengths, cuts = pack(ends, begin, seq_len)
        begins = np.concatenate([np.array([begin], np.int64), ends[:-1]])
        windows += len(cuts) - 1
        padding += int(np.maximum(0, seq_len - np.add.reduceat(lengths, cuts[:-1])).sum())
        longer += int(np.count_nonzero(whole_windows(ends - begins, seq_len)))
        # The last token of a window is the first of the next: a document may begin and end with one.
        chopped = (ends - 1 > begins // seq_len * seq_len + seq_len) | (ends - 1 > last)
        cut += int(np.count_nonzero(chopped))
    documents = source.documents
    return {
        "best-fit": {
            "windows": windows,
            "padding": padding / (windows * seq_len),
            "cut": longer,
            "cut_share": longer / documents,
        },
        "chop": {"windows": whole, "padding": 0.0, "cut": cut, "cut_share": cut / documents},
    }


def shares_in_words(found: Shares) -> str:
    def one(way: str) -> str:
        w = found[way]
        cut = f"{w['cut']:,} ({percent(w['cut_share'])})"
        return f"{way}: windows {w['windows']:,}, padding {percent(w['padding'])}, documents cut {cut}"

    return "; ".join(map(one, found))


def stretches(source: TokenShards, seq_len: int, most: int) -> list[I64]:
    """How long the documents in some windows of the first block are, as attention meets them."""
    _, lengths, cuts = next(Packs(source, seq_len).blocks())
    picked = np.unique(np.linspace(0, len(cuts) - 2, min(most, len(cuts) - 1)).astype(np.int64))
    found = [lengths[cuts[i] : cuts[i + 1]].copy() for i in picked.tolist()]
    for one in found:
        one[-1] -= max(0, int(one.sum()) - seq_len)  # a full window's last token is a target and not read
    return [one[one > 0] for one in found]
