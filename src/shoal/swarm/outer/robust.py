"""Which parts of a round count, and how much: broken and hostile peers must do no harm.

Four checks, each decided alike on all peers, since all of it is computed from the parts and the record:
- a part that does not decode, or holds what is not finite, is left out;
- no value of a part is larger than twice the largest of the median part, no part is longer than twice the median one,
  and nobody's word on its targets counts for more than four times the median;
- a part must point where most others point: its cosine with the median one of the others is compared with what is
  usual in this round. Comparing pairs, and not with the mean, leaves nothing to gain for those who send the same;
- a part that was seen to make the loss worse (a score in the record) is left out.
Directions are compared on a sample of the weights that follows from the parts, so that no sender can know it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shoal.codec import BadPayload, Codec
from shoal.codec.frame import header
from shoal.codec.topk import TopK
from shoal.swarm.outer.exact import F32, I64, dot, largest, median, norm

CLIP = 2.0  # times the median norm, or the median part's largest value
MOST_TOKENS = 4.0  # times the median
ENOUGH_TO_CLIP, ENOUGH_TO_COMPARE = 3, 4  # parts: with fewer nobody can say who is the odd one
ASKEW = 0.3  # of the usual cosine
USUAL = 0.01  # below, the parts have nothing in common that could be compared
WORSE = 0.01  # of the loss: more than chance
SAMPLE, BLOCK = 1 << 19, 1 << 12  # weights on which directions are compared, in blocks
NEIGHBOURS = 16  # with which each part is compared where there are more

Payload = bytes | memoryview


@dataclass(frozen=True)
class Verdict:
    """What becomes of a part."""

    peer: str
    weight: float  # by which its values count in the mean; 0: left out
    limit: float | None  # largest value that is believed; None: all of them
    why: str | None = None  # it is left out, or clipped
    cosine: float | None = None

    @property
    def out(self) -> bool:
        return self.weight == 0.0


class Reading:
    """The parts of a round, decoded one after the other."""

    def __init__(self, codec: Codec, count: int, scratch: F32) -> None:
        self._codec, self._count, self._scratch = codec, count, scratch

    def values(self, payload: Payload) -> tuple[I64 | None, F32]:
        """(where, what); where is None for all of the fragment. Valid until the next call."""
        if isinstance(self._codec, TopK):
            if (found := header(payload).count) != self._count:
                raise BadPayload(f"the payload is of {found:,} parameters, and the fragment has {self._count:,}.")
            return self._codec.entries(payload)
        dense = self._scratch[: self._count]
        dense[:] = 0
        self._codec.add(payload, dense, 1.0)
        return None, dense

    def add(self, payload: Payload, into: F32, verdict: Verdict) -> None:
        if verdict.limit is None:
            self._codec.add(payload, into, verdict.weight)
            return
        where, what = self.values(payload)
        what = np.clip(what, -verdict.limit, verdict.limit)
        what *= np.float32(verdict.weight)
        if where is None:
            into += what
        else:
            into[where] += what  # no place is named twice in one part


@dataclass
class _Part:
    peer: str
    tokens: float
    payload: Payload
    norm: float = 0.0
    largest: float = 0.0
    row: F32 | None = None
    limit: float | None = None
    cosine: float | None = None
    why: str | None = None
    out: bool = False


def learned(said: Mapping[str, Any]) -> int:
    """What a part weighs by: the targets that it was taught."""
    return int(said["targets"])


def judge(
    took: Sequence[Mapping[str, Any]], parts: Mapping[str, Payload], reading: Reading, count: int, robust: bool
) -> list[Verdict]:
    """In the order of `took`. Weights of those that count add up to one, before clipping."""
    read = [_Part(str(t["peer"]), float(max(0, learned(t))), parts[str(t["peer"])]) for t in took]
    blocks = _sample(took, count)
    for part in read:
        _look(part, reading, count, blocks, robust)
    if robust:
        _by_score(read, took)
        _clip(read, reading)
        _compare(read)
    return _weigh(read, robust)


def _look(part: _Part, reading: Reading, count: int, blocks: I64, robust: bool) -> None:
    try:
        where, what = reading.values(part.payload)
    except BadPayload as e:
        part.out, part.why = True, f"it does not decode: {e}"
        return
    part.largest = largest(what)
    if not math.isfinite(part.largest):
        part.out, part.why = True, "it holds what is not finite"
    elif robust:
        part.norm = norm(what)
        part.row = _row(where, what, count, blocks)


def _by_score(read: list[_Part], took: Sequence[Mapping[str, Any]]) -> None:
    """Those that do harm while others do not. Where most seem to, it is the step that is too long or the end that is
    near, and nobody is to blame: with all of them left out the training would stand still."""
    scores = [None if said.get("score") is None else float(said["score"]) for said in took]
    known = [score if math.isfinite(score) else math.inf for score in scores if score is not None]
    usual = max(0.0, median(known)) if len(known) >= ENOUGH_TO_CLIP else 0.0
    worse = [score is not None and not score <= usual + WORSE for score in scores]
    if 2 * sum(worse) >= len(read):
        return
    for part, score, out in zip(read, scores, worse, strict=True):
        if out and not part.out:
            part.out, part.why = True, f"it makes the loss worse by {score:.3g}"


def _clip(read: list[_Part], reading: Reading) -> None:
    left = [part for part in read if not part.out]
    if len(left) < ENOUGH_TO_CLIP:
        return
    limit = CLIP * median([part.largest for part in left])
    for part in left:
        if part.largest > limit:
            _, what = reading.values(part.payload)
            part.norm, part.limit = norm(np.clip(what, -limit, limit)), limit
            part.why = f"its largest value is {part.largest / limit * CLIP:.3g} times that of the median part"
            if part.row is not None:
                np.clip(part.row, -limit, limit, out=part.row)


def _compare(read: list[_Part]) -> None:
    left = [part for part in read if not part.out]
    if len(left) < ENOUGH_TO_COMPARE:
        return
    rows = [part.row for part in left]
    norms = [norm(row) for row in rows if row is not None]
    cosines = np.full((len(left), len(left)), np.nan)
    for i, a in enumerate(rows):
        for j in range(i + 1, len(left)):
            b = rows[j]
            near = min(j - i, len(left) - j + i) <= NEIGHBOURS // 2 or len(left) <= NEIGHBOURS
            if near and a is not None and b is not None:
                both = norms[i] * norms[j]
                cosines[i, j] = cosines[j, i] = dot(a, b) / both if both else 0.0
    for i, part in enumerate(left):
        part.cosine = median([float(c) for c in cosines[i] if not math.isnan(c)])
    usual = median([part.cosine for part in left if part.cosine is not None])
    askew = [part for part in left if part.cosine is not None and part.cosine < ASKEW * usual]
    if usual < USUAL or 2 * len(askew) >= len(left):
        return
    for part in askew:
        part.out, part.why = True, f"its cosine with the others is {part.cosine:.3f}, and {usual:.3f} is usual"


def _weigh(read: list[_Part], robust: bool) -> list[Verdict]:
    left = [part for part in read if not part.out]
    tokens = {part.peer: part.tokens for part in left}
    longest = math.inf
    if robust and len(left) >= ENOUGH_TO_CLIP:
        most = MOST_TOKENS * median(list(tokens.values()))
        tokens = {peer: min(n, most) for peer, n in tokens.items()}
        longest = CLIP * median([part.norm for part in left])
    total = math.fsum(tokens.values())
    verdicts = []
    for part in read:
        weight = 0.0 if part.out else tokens[part.peer] / total if total else 1 / len(left)
        why = part.why
        if not part.out and part.norm > longest:
            weight *= longest / part.norm
            why = f"it is {part.norm / longest * CLIP:.3g} times as long as the median part"
        verdicts.append(Verdict(part.peer, weight, part.limit, why, part.cosine))
    return verdicts


def _sample(took: Sequence[Mapping[str, Any]], count: int) -> I64:
    """Numbers of blocks, sorted: all of them, or those that a hash of the parts' hashes names."""
    blocks = -(-count // BLOCK)
    wanted = SAMPLE // BLOCK
    if blocks <= wanted:
        return np.arange(blocks, dtype=np.int64)
    seed = hashlib.sha256("".join(str(t.get("blob", "")) for t in took).encode()).digest()
    chosen: set[int] = set()
    for i in range(8 * wanted):
        if len(chosen) == wanted:
            break
        chosen.add(int.from_bytes(hashlib.sha256(seed + i.to_bytes(4, "big")).digest()[:8], "big") % blocks)
    return np.array(sorted(chosen), np.int64)


def _row(where: I64 | None, what: F32, count: int, blocks: I64) -> F32:
    """The sampled values, side by side."""
    seat = np.full(-(-count // BLOCK), -1, np.int64)
    seat[blocks] = np.arange(len(blocks))
    row = np.zeros(len(blocks) * BLOCK, np.float32)
    if where is None:
        for k, block in enumerate(blocks):
            some = what[block * BLOCK : (block + 1) * BLOCK]
            row[k * BLOCK : k * BLOCK + len(some)] = some
        return row
    at = seat[where // BLOCK]
    chosen = at >= 0
    row[at[chosen] * BLOCK + where[chosen] % BLOCK] = what[chosen]
    return row
