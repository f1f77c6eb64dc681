"""Windows as the model sees them, read through the feed of the trainer: for `shoal data look`. No torch here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shoal.data.feed import Feed
from shoal.data.info import sets_in
from shoal.data.order import Order
from shoal.data.shards import TokenShards
from shoal.data.skips import Skips
from shoal.data.sources import open_sources
from shoal.data.tokenizer import Tokenizer, tokenizer_of
from shoal.data.windows import NO_TARGET, PADDING, Batch, Windows
from shoal.errors import UsageError
from shoal.spec.run import Data, Run

STARTS = "starts its document"


@dataclass(frozen=True)
class Token:
    """One token of a window, and what becomes of it."""

    place: int | None
    """Where it is read; None: the last target of a window, which is read in the next one or nowhere."""
    document: int | None
    """Of the window, from 0; None: padding, or not known there."""
    position: int | None
    id: int
    text: str
    learnt: bool
    """Whether it is the target of the place before it."""
    why_not: str

    @property
    def starts(self) -> bool:
        """Whether it is a document's start token."""
        return self.why_not == STARTS


@dataclass(frozen=True)
class Seen:
    """One row of a micro-batch."""

    source: str
    window: int
    windows: int
    end_id: int
    start_id: int | None
    """None: data of before documents had a start token."""
    tokens: list[Token]

    @property
    def inputs(self) -> list[Token]:
        return [t for t in self.tokens if t.place is not None]

    def as_json(self) -> dict[str, Any]:
        """Arrays by place, as the model gets them; `targets` has null where nothing is learnt."""
        read = self.inputs
        after = self.tokens[1:] if len(self.tokens) > len(read) else [*self.tokens[1:], None]
        return {
            "source": self.source,
            "window": self.window,
            "of": self.windows,
            "end_id": self.end_id,
            "start_id": self.start_id,
            "tokens": [t.id for t in read],
            "texts": [t.text for t in read],
            "targets": [t.id if t is not None and t.learnt else None for t in after],
            "positions": [t.position for t in read],
            "documents": [t.document for t in read],
            "learnt": [t.learnt for t in read],
            "why_not": [t.why_not or None for t in read],
        }


@dataclass(frozen=True)
class Asked:
    """Which windows of a run: those of one micro-batch of one data-parallel rank."""

    step: int = 0
    rank: int = 0
    ranks: int | None = None
    """None: as many as the run's mesh says, or one where that is left open."""
    micro_batch: int = 0
    window: int = 0
    """The first that is shown."""
    count: int = 1


@dataclass(frozen=True)
class View:
    """What was looked at, in words and as JSON, and the windows themselves."""

    words: str
    fields: dict[str, Any]
    seen: list[Seen]


def look_at_run(run: Run, workspace: Path, asked: Asked) -> View:
    """What the trainer of this run is fed in a step, made by the same feed."""
    if run.own.data is not None:
        raise UsageError(
            f"own.data {run.own.data} is read by those who train alone; in Python, `shoal.windows(shoal.load(FILE))` "
            "gives its windows."
        )
    sources = open_sources(run.data.train, run.data, workspace)
    windows = Windows.of(sources, run.data)
    order = Order(windows.sizes, [s.weight for s in run.data.train], run.seed)
    ranks = asked.ranks or _ranks(run)
    if not 0 <= asked.rank < ranks:
        raise UsageError(f"there is no rank {asked.rank} of {ranks}: data-parallel ranks count from 0.")
    if asked.step < 0:
        raise UsageError(f"there is no step {asked.step}: steps count from 0.")
    batch = Skips([b, b] for b in run.data.skip).batch_of(asked.step)
    rows = None if run.mesh.micro_batch == "auto" else int(run.mesh.micro_batch)
    with Feed(windows, order, run.train.batch, asked.rank, ranks, rows) as feed:
        made = feed.assemble(batch)
        which = feed.samples(batch)
    if not 0 <= asked.micro_batch < len(made):
        raise UsageError(
            f"there is no micro-batch {asked.micro_batch}: rank {asked.rank} of {ranks} has {len(made)} of at most "
            f"{feed.micro_batch} windows in a step, counted from 0."
        )
    one, first = made[asked.micro_batch], asked.micro_batch * feed.micro_batch
    picked = _picked(asked, len(one.tokens), "windows in this micro-batch")
    seen = [_seen(one, row, windows, int(which[0][first + row]), int(which[1][first + row])) for row in picked]
    words = (
        f"step {asked.step} (batch {batch} of the order), data-parallel rank {asked.rank} of {ranks}, "
        f"micro-batch {asked.micro_batch} of {len(made)}"
    )
    fields = {"step": asked.step, "batch": batch, "rank": asked.rank, "ranks": ranks, "micro_batch": asked.micro_batch}
    return View(words, {**fields, "micro_batches": len(made)}, seen)


def look_at_data(where: str, data: Data, asked: Asked) -> View:
    """The windows of one data set, in the order in which they lie in it."""
    path = sets_in(where)[0]
    source = TokenShards.open(path)
    windows = Windows.of([source], data)
    picked = _picked(asked, windows.sizes[0], f"windows of {data.seq_len} tokens in {path}")
    batch = windows.batch(np.zeros(len(picked), np.int64), picked)
    seen = [_seen(batch, row, windows, 0, window) for row, window in enumerate(picked)]
    return View(f"as they lie in {path}; a run reads them in the order of its seed", {}, seen)


def _ranks(run: Run) -> int:
    """Data-parallel ranks, as far as the run file states them."""
    stated = (run.mesh.dp_replicate, run.mesh.dp_shard)
    return int(np.prod([n for n in stated if isinstance(n, int) and n > 0]))


def _picked(asked: Asked, there: int, of_what: str) -> list[int]:
    if not 0 <= asked.window < there:
        raise UsageError(f"there is no window {asked.window}: there are {there:,} {of_what}, counted from 0.")
    return list(range(asked.window, min(asked.window + asked.count, there)))


def _seen(batch: Batch, row: int, windows: Windows, k: int, window: int) -> Seen:
    source = windows.sources[k]
    tokens = tokens_of(batch, row, tokenizer_of(source), source.start_id)
    return Seen(source.where, window, windows.sizes[k], source.eos_id, source.start_id, tokens)


def tokens_of(batch: Batch, row: int, tokenizer: Tokenizer, start_id: int | None) -> list[Token]:
    """From the arrays that the model gets, and nothing else."""
    ids, targets = batch.tokens[row].tolist(), batch.targets[row].tolist()
    documents, positions = batch.documents[row].tolist(), batch.positions[row].tolist()
    made = []
    for i, token in enumerate(ids):
        learnt = i > 0 and targets[i - 1] != NO_TARGET
        why_not = "" if learnt else _why_not(i, documents, positions, token == start_id)
        document = None if documents[i] == PADDING else documents[i]
        made.append(Token(i, document, positions[i], token, tokenizer.spelled(token), learnt, why_not))
    if (last := targets[-1]) != NO_TARGET:
        made.append(Token(None, None, None, last, tokenizer.spelled(last), True, ""))
    return made


def _why_not(i: int, documents: Sequence[int], positions: Sequence[int], mark: bool) -> str:
    """`mark`: it is the start token, which may also be the one that ends a document."""
    if documents[i] == PADDING:
        return "padding"
    if mark and positions[i] == 0 and (i > 0 or positions[1:2] != [0]):
        return STARTS
    if i == 0:
        return "begins the window"
    return "begins its document" if positions[i] == 0 else "masked"
