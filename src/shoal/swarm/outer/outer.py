"""The weights that all peers of a swarm have alike, and the rule by which a round's parts change them.

A pure function of the history: the same records and parts give the same bits on every machine. Everything is done
number by number, in float32, in the order that the record names (sums: `shoal.swarm.outer.exact`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from shoal.codec import Codec, codec
from shoal.errors import needs_extra
from shoal.swarm.outer.exact import F32
from shoal.swarm.outer.robust import Payload, Reading, Verdict, judge
from shoal.swarm.outer.rule import Rule

THREADS_PAY_BYTES = 16 << 20
BLOCK = 1 << 18  # numbers that are worked on at a time: what is in between stays in the cache


@dataclass(frozen=True)
class Applied:
    """What a record has done."""

    round: int
    where: slice  # of theta
    moved: F32  # theta there, less what it was
    verdicts: list[Verdict]


class Outer:
    """Theta and its momentum. One thread's."""

    def __init__(self, theta: F32, rule: Rule, round: int = -1, momentum: F32 | None = None) -> None:
        """`round` is that of the last record which is in it."""
        self.theta, self.rule, self.round = theta, rule, round
        self.momentum = np.zeros_like(theta) if momentum is None and rule.momentum else momentum
        self.codec: Codec = codec(rule.codec, chunk=rule.chunk, keep=rule.keep)
        self._scratch = np.empty(0, np.float32)

    @property
    def count(self) -> int:
        return len(self.theta)

    def copy(self) -> Outer:
        momentum = None if self.momentum is None else self.momentum.copy()
        return Outer(self.theta.copy(), self.rule, self.round, momentum)

    def become(self, other: Outer) -> None:
        """Takes the state of another, whose arrays it has from now on."""
        self.theta, self.momentum, self.round = other.theta, other.momentum, other.round

    def apply(self, record: Mapping[str, Any], parts: Mapping[str, Payload]) -> Applied:
        """Takes a record's parts, in its order. Records without parts change nothing but the round."""
        number, took = int(record["round"]), record.get("took") or []
        where = self.rule.fragment(number, self.count) if took else slice(0, 0)
        mean, verdicts = self._mean(took, parts, where.stop - where.start)
        self._step(mean, where)
        self.round = number
        return Applied(number, where, mean, verdicts)

    def _mean(self, took: Any, parts: Mapping[str, Payload], count: int) -> tuple[F32, list[Verdict]]:
        if len(self._scratch) < count and self.codec.name != "topk":
            self._scratch = np.empty(count, np.float32)
        reading = Reading(self.codec, count, self._scratch)
        verdicts = judge(took, parts, reading, count, self.rule.robust)
        mean = np.zeros(count, np.float32)
        for verdict in verdicts:
            if not verdict.out:
                reading.add(parts[verdict.peer], mean, verdict)
        return mean, verdicts

    def _step(self, mean: F32, where: slice) -> None:
        """SGD with Nesterov's momentum; `mean` becomes what theta has moved by."""
        lr, mu = np.float32(self.rule.lr), np.float32(self.rule.momentum)
        theta = self.theta[where]
        momentum = None if self.momentum is None else self.momentum[where]
        for i in range(0, len(mean), BLOCK):
            g, t = mean[i : i + BLOCK], theta[i : i + BLOCK]
            if momentum is not None:
                m = momentum[i : i + BLOCK]
                m *= mu
                m += g
                g += mu * m
            g *= -lr
            new = t + g
            np.subtract(new, t, out=g)
            t[:] = new

    def digest(self) -> str:
        """Of theta and its momentum; hexadecimal. Nobody can make other weights with the same digest."""
        try:
            from blake3 import blake3
        except ImportError:
            raise needs_extra("blake3", "swarm", "training in a swarm") from None
        h = blake3(max_threads=blake3.AUTO if self.theta.nbytes >= THREADS_PAY_BYTES else 1)
        for name, values in (("theta", self.theta), ("momentum", self.momentum)):
            if values is not None:
                h.update(f"{name} {len(values)}\n".encode())
                h.update(values.view(np.uint8).data)
        return str(h.hexdigest())
