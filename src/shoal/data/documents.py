"""How long the documents of prepared data are, for the planner: some windows of local shards, else the index's mean.

Padding counts as no document: a token of it sees little, and is little of a window.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from shoal.data.packs import by_best_fit, stretches
from shoal.data.shards import LocalFolder, TokenShards
from shoal.data.sources import open_sources
from shoal.errors import ShoalError
from shoal.plan.documents import I64, Documents, mixed, of_mean, of_windows, one_document
from shoal.spec.run import Packing, Run
from shoal.spec.shape import Shape

LOOKED_AT = 64  # windows of a source, spread evenly over it


def documents_of(run: Run, shape: Shape, workspace: Path) -> Documents:
    """Of a run's training data; of data that cannot be opened (it is not prepared yet) the cautious assumption."""
    if not _apart(run):
        return one_document(shape, run.data.seq_len)
    try:
        return measured(run, shape, open_sources(run.data.train, run.data, workspace, look=False))
    except ShoalError:
        return one_document(shape, run.data.seq_len)


def measured(run: Run, shape: Shape, sources: Sequence[TokenShards]) -> Documents:
    if not _apart(run):
        return one_document(shape, run.data.seq_len)
    weights = [source.weight for source in run.data.train]
    packing, seq = run.data.packing, run.data.seq_len
    return mixed([(w, _of_source(shape, s, seq, packing)) for w, s in zip(weights, sources, strict=False)])


def _apart(run: Run) -> bool:
    """Whether documents that can be looked at are kept apart; `own.data` is known to those who train alone."""
    return run.data.mask_documents and run.own.data is None


def _of_source(shape: Shape, source: TokenShards, seq: int, packing: Packing) -> Documents:
    windows = (source.tokens - 1) // seq
    packed = by_best_fit(packing, source)
    if windows < 1 and not packed:
        return one_document(shape, seq)
    if not isinstance(source.folder, LocalFolder):  # a plan downloads nothing
        return of_mean(shape, source.tokens / source.documents, seq)
    if packed:  # of the first block: the others are packed alike
        lengths = stretches(source, seq, LOOKED_AT)
        return of_windows(shape, lengths, f"{len(lengths)} windows of the data")
    picked = np.unique(np.linspace(0, windows - 1, min(LOOKED_AT, windows)).astype(np.int64))
    lengths = [_lengths(source, int(window) * seq, seq) for window in picked]
    return of_windows(shape, lengths, f"{len(picked)} windows of the data")


def _lengths(source: TokenShards, start: int, seq: int) -> I64:
    """Of the stretches of one document in the window that begins there."""
    stop, cuts = start + seq, [np.array([start, start + seq])]
    i = int(np.searchsorted(source.starts, start, side="right")) - 1
    while i < len(source.index.shards) and source.starts[i] < stop:
        ends, at = source.shard(i).ends, int(source.starts[i])
        inside = ends[np.searchsorted(ends, start - at, "right") : np.searchsorted(ends, stop - at, "left")]
        cuts.append(inside + at)
        i += 1
    return np.diff(np.unique(np.concatenate(cuts)))
