"""Who must attend to whom when a sequence lies on a ring of processes: the plan of its work.

The sequence is cut into 2 x size chunks, and process i holds chunks i and 2 x size - 1 - i: one from the head, one from
the tail. Under causality a late chunk has more to look at than an early one, and these pairs add up to the same for
everybody. (Stripes, arXiv:2311.09431, are as even, but leave no pair plain, nor any without a share of a document.)

A pair of a query chunk and a key chunk is skipped (later keys, no document in common, beyond the window), plain (all
keys seen), causal (the same chunk), or masked. This is decided from the first and last document of each chunk, so it
never looks at single tokens, and with documents in any order it is cautious rather than wrong.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from shoal.errors import SpecError
from shoal.parallel.partial import HIDDEN

SKIP, FULL, CAUSAL, MASKED = range(4)


class Piece(NamedTuple):
    """One call of a kernel: local queries [q, q_end) with keys [k, k_end) of the block that arrives at `step`."""

    step: int
    kind: int
    q: int
    q_end: int
    k: int
    k_end: int
    q_at: int  # position in the whole sequence of the first query, and of the first key
    k_at: int
    window: int  # 0: none

    @property
    def pairs(self) -> int:
        """(query, key) pairs that a kernel computes for it; one that skips what is hidden does no more than this."""
        queries, keys = self.q_end - self.q, self.k_end - self.k
        return queries * (queries + 1) // 2 if self.kind == CAUSAL else queries * keys


NOTHING = Piece(0, SKIP, 0, 0, 0, 0, 0, 0, 0)


class Plan(NamedTuple):
    """What takes a mask's place. Tensors, so that it passes through compiled blocks without being compiled in."""

    pieces: Tensor  # int64 on the CPU, a row for each Piece; as many as there are pairs of chunks
    documents: Tensor | None  # [batch, whole sequence] on the device


def by_step(pieces: Tensor, size: int) -> list[list[Piece]]:
    """What is to be done at each of the steps of a ring; at some, perhaps nothing."""
    steps: list[list[Piece]] = [[] for _ in range(size)]
    for row in pieces.tolist():
        piece = Piece(*row)
        if piece.kind != SKIP:
            steps[piece.step].append(piece)
    return steps


def chunks(size: int, index: int) -> tuple[int, int]:
    """The chunks, of 2 x size, that a process of a ring holds."""
    return index, 2 * size - 1 - index


def plan(
    documents: Tensor | None, seq: int, window: int | None, device: torch.device, *, size: int, index: int
) -> Plan:
    """The work of process `index` of `size`, which holds `seq` tokens of each row; `documents` are of whole rows.

    Documents on a GPU cost a copy of 4 x size numbers a row to the host, once a call (a forward pass, not a block):
    it waits for the GPU to be done with earlier work, under a millisecond of idling against the chunks it lets skip.
    """
    if seq % 2:
        raise SpecError(f"a ring cuts its {seq * size} tokens into {2 * size} chunks, which do not come out even.")
    chunk = seq // 2
    spans = None
    if documents is not None:
        if documents.shape[1] != seq * size:
            raise ValueError(f"documents have {documents.shape[1]} tokens a row where the sequence has {seq * size}")
        first, last = documents.unflatten(1, (2 * size, chunk)).aminmax(dim=-1)
        spans = torch.stack((first, last), dim=-1).tolist()  # [batch][chunk] -> (first, last) document
    pieces = []
    for step in range(size):
        queries, keys = chunks(size, index), chunks(size, (index - step) % size)
        kinds = [[_kind(a, b, chunk, window, spans) for b in keys] for a in queries]
        for kind, a, a_end, b, b_end in _joined(kinds):
            spot = (a * chunk, a_end * chunk, b * chunk, b_end * chunk, queries[a] * chunk, keys[b] * chunk)
            pieces.append(Piece(step, kind, *spot, window or 0))
    pieces += [NOTHING] * (4 * size - len(pieces))  # a tensor of another shape would have compiled blocks compiled anew
    return Plan(torch.tensor(pieces), None if documents is None else documents.to(device))


def bias(piece: Piece, documents: Tensor | None, like: Tensor) -> Tensor | None:
    """What is added to the scores of a masked piece, [batch or 1, 1, queries, keys]; None for the others.

    Made anew in each block: a whole plan's would be [seq, whole sequence] numbers that live from forward to backward.
    """
    if piece.kind != MASKED:
        return None
    q_end, k_end = piece.q_at + piece.q_end - piece.q, piece.k_at + piece.k_end - piece.k
    queries = torch.arange(piece.q_at, q_end, device=like.device)[:, None]
    keys = torch.arange(piece.k_at, k_end, device=like.device)[None, :]
    hidden = (keys > queries)[None, None]
    if piece.window:
        hidden = hidden | (keys <= queries - piece.window)
    if documents is not None:
        hidden = hidden | (documents[:, None, piece.q_at : q_end, None] != documents[:, None, None, piece.k_at : k_end])
    return like.new_zeros(hidden.shape).masked_fill_(hidden, HIDDEN)


def _kind(a: int, b: int, chunk: int, window: int | None, spans: list[list[list[int]]] | None) -> int:
    nearest, farthest = (a - b - 1) * chunk + 1, (a - b + 1) * chunk - 1  # how far keys of b lie behind queries of a
    if b > a or (window is not None and nearest >= window):
        return SKIP
    plain = window is None or farthest < window
    if spans is not None:
        if all(row[a][0] > row[b][1] or row[b][0] > row[a][1] for row in spans):
            return SKIP
        plain = plain and all(row[a][0] == row[a][1] == row[b][0] == row[b][1] for row in spans)
    if not plain:
        return MASKED
    return CAUSAL if a == b else FULL


def _joined(kinds: list[list[int]]) -> list[tuple[int, int, int, int, int]]:
    """The 2 x 2 pairs of a step as few pieces (kind, q, q_end, k, k_end), in chunks: kernels like them large."""
    if kinds == [[CAUSAL, SKIP], [FULL, CAUSAL]]:  # the own block: its two chunks are in order, so causal as a whole
        return [(CAUSAL, 0, 2, 0, 2)]
    if kinds == [[SKIP, SKIP], [FULL, FULL]]:
        return [(FULL, 1, 2, 0, 2)]
    if kinds == [[FULL, SKIP], [FULL, SKIP]]:
        return [(FULL, 0, 2, 0, 1)]
    return [(kind, a, a + 1, b, b + 1) for a, row in enumerate(kinds) for b, kind in enumerate(row) if kind != SKIP]
