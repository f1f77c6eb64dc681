"""Peers that learn a vector by heart, each from noisy hints: the least model on which an outer step can be seen."""

from __future__ import annotations

import hashlib
from functools import cache
from typing import Any

import numpy as np

from shoal.swarm.outer.exact import F32
from shoal.swarm.outer.outer import Outer
from shoal.swarm.outer.peer_side import Local, add
from shoal.swarm.outer.rule import Rule

COUNT = 20_000


@cache
def target() -> F32:
    """Not to be written to."""
    return np.random.default_rng(7).normal(size=COUNT).astype(np.float32)


class Peer:
    """Walks from its weights towards the target by steps of its own noise."""

    def __init__(self, name: str, rule: Rule, seed: int) -> None:
        self.name, self.rule = name, rule
        self.weights = np.zeros(COUNT, np.float32)
        self.outer = Outer(np.zeros(COUNT, np.float32), rule)
        self.local = Local(self.outer)
        self._random = np.random.default_rng(seed)

    def train(self, steps: int = 4, lr: float = 0.05) -> None:
        for _ in range(steps):
            noise = self._random.normal(size=COUNT).astype(np.float32)
            self.weights -= np.float32(lr) * (self.weights - target() + 0.5 * noise)

    def part(self, round: int) -> bytes:
        return self.local.part(round, self.weights)

    def apply(self, record: dict[str, Any], parts: dict[str, bytes]) -> None:
        add(self.local.follow(self.outer.apply(record, parts)), self.weights)

    @property
    def loss(self) -> float:
        return float(np.mean((self.outer.theta - target()) ** 2))


def record(round: int, parts: dict[str, bytes], tokens: int = 100, **scores: float) -> dict[str, Any]:
    took: list[dict[str, Any]] = [
        {
            "peer": peer,
            "blob": hashlib.sha256(part).hexdigest(),
            "bytes": len(part),
            "tokens": tokens,
            "targets": tokens,
            "steps": 4,
            "used": [],
            "loss": 1.0,
            "score": scores.get(peer),
        }
        for peer, part in parts.items()
    ]
    return {"kind": "round", "round": round, "took": took}
