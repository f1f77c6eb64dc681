"""Logical peers of a swarm in one process: the real model, optimizer, data order, codec and outer step, and no network.

Time is counted in steps. All peers end a round after H of them; the record comes `delay` steps later, while they train
on, as it does when the exchange runs beside the next round.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from shoal.codec import Codec
from shoal.data.order import Order
from shoal.data.sources import open_sources
from shoal.data.windows import Windows
from shoal.parallel.build import build
from shoal.parallel.place import Place
from shoal.spec.run import Run
from shoal.swarm.outer.exact import F32
from shoal.swarm.outer.outer import Outer
from shoal.swarm.outer.peer_side import Local
from shoal.swarm.outer.rule import Rule
from shoal.swarm.trainer.weights import Weights
from shoal.train.evaluate import Evaluator
from shoal.train.optim import Optimizers
from shoal.train.schedule import lr_ratio

ROOT = Path(__file__).resolve().parents[2]
TEXTS = [ROOT / "examples/text/moby-dick.txt", ROOT / "examples/text/state-of-the-union.jsonl"]
ALONE = Place(0, 1, torch.device("cpu"))
Attack = Callable[[F32, Codec, np.random.Generator], bytes]


@dataclass(frozen=True)
class Size:
    """What is trained, and how much."""

    dim: int = 128
    layers: int = 2
    heads: int = 4
    ffn_dim: int = 256
    seq_len: int = 64
    peers: int = 8
    batch: int = 2  # windows of a peer's step; a step of the whole has `peers` times as many
    steps: int = 320
    lr: float = 3e-3
    seed: int = 1851
    held_out: int | None = 128  # windows; None: all there are
    optimizer: Literal["adamw", "muon"] = "adamw"


@dataclass(frozen=True)
class Way:
    """How the peers keep together."""

    name: str
    rule: Rule
    every: int = 8  # H
    delay: int = 2
    attack: Attack | None = None
    hostile: int = 0


@dataclass
class Outcome:
    loss: float  # on text that was held out
    bytes_per_step: float  # that each peer sends
    curve: list[float] = field(default_factory=list)
    out: dict[str, int] = field(default_factory=dict)  # peer → rounds in which it was left out


def prepare(workspace: Path) -> None:
    """The shipped text as bytes, a twentieth of it held out."""
    texts = [str(path) for path in TEXTS]
    words = ["data", "prepare", *texts, "--separator", "\n\n\n", "--tokenizer", "byte", "--eval-fraction", "0.05"]
    command = [sys.executable, "-m", "shoal", *words, "--out", str(workspace / "data")]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


class Sea:
    """What all runs of one size have in common: the data, and what they are measured on."""

    def __init__(self, workspace: Path, size: Size) -> None:
        self.size = size
        self.run = Run.model_validate(
            {
                "name": "sea",
                "seed": size.seed,
                "model": {
                    "dim": size.dim,
                    "layers": size.layers,
                    "heads": size.heads,
                    "kv_heads": size.heads,
                    "ffn_dim": size.ffn_dim,
                    "vocab_size": 257,
                },
                "data": {
                    "train": str(workspace / "data/train"),
                    "eval": str(workspace / "data/eval"),
                    "seq_len": size.seq_len,
                    "mask_documents": False,
                },
                "train": {
                    "steps": size.steps,
                    "batch": size.batch * size.peers,
                    "precision": "fp32",
                    "optimizer": {"name": size.optimizer, "lr": size.lr, "muon_lr": 0.02},
                    "schedule": {"name": "cosine", "warmup_steps": max(1, size.steps // 20)},
                },
                "eval": {"windows": size.held_out},
                "mesh": {"micro_batch": 16, "recompute": "none"},
                "resources": {"device": "cpu", "threads": 1},
            }
        )
        data = self.run.data
        self.windows = Windows(open_sources(data.train, data, workspace), data.seq_len, data.mask_documents)
        self.held_out = Windows(open_sources(data.eval, data, workspace), data.seq_len, data.mask_documents)
        self.order = Order(self.windows.sizes, [1.0] * len(self.windows.sizes), self.run.seed)

    def loss(self, learner: Learner) -> float:
        return Evaluator(self.run, ALONE, learner.model, self.held_out, lambda *_, **__: None)(0)


class Learner:
    """A model and its optimizer: a peer's own, or that of every-step data parallelism."""

    def __init__(self, sea: Sea) -> None:
        self._sea, self.run = sea, sea.run
        self.model = build(sea.run, ALONE)
        self.optimizers = Optimizers(sea.run.train.optimizer, self.model.named_parameters())
        self.weights = Weights(self.model)

    def step(self, t: int, first: int, count: int) -> float:
        """One optimizer step on the windows at these places of the order; the loss before it."""
        batch = self._sea.windows.batch(*self._sea.order.at(first, count))
        targets = batch.target_count
        loss = float(self.model.backward([batch])) / targets
        _, factor = self.model.norm(1 / targets, self.run.train.clip)
        self.optimizers.step(lr_ratio(self.run.train.schedule, t, self.run.train.steps), factor)
        return loss


def every_step(sea: Sea) -> Outcome:
    """Data parallelism: all gradients are averaged at each step. A ring of bf16, as the others' traffic is measured."""
    learner, size = Learner(sea), sea.size
    batch = size.batch * size.peers
    curve = [learner.step(t, t * batch, batch) for t in range(size.steps)]
    per_step = 2 * (size.peers - 1) / size.peers * 2 * learner.weights.count
    return Outcome(sea.loss(learner), per_step, curve)


class Peer:
    def __init__(self, sea: Sea, outer: Outer, number: int) -> None:
        self.name, self.number, self.learner = f"peer{number}", number, Learner(sea)
        self.local = Local(outer)


def swarm(sea: Sea, way: Way) -> Outcome:
    """Rounds of `way.every` steps. All have the same outer state, which is computed once here."""
    size, random = sea.size, np.random.default_rng(sea.size.seed)
    outer = Outer(Learner(sea).weights.read(), way.rule)
    peers = [Peer(sea, outer, i) for i in range(size.peers)]
    waiting: list[tuple[int, dict[str, Any], dict[str, bytes]]] = []
    curve, sent, out = [], 0, dict[str, int]()
    batch = size.batch * size.peers
    for t in range(size.steps + 1):
        while waiting and (waiting[0][0] <= t or t == size.steps):
            _, record, parts = waiting.pop(0)
            applied = outer.apply(record, parts)
            for name in (v.peer for v in applied.verdicts if v.out):
                out[name] = out.get(name, 0) + 1
            for peer in peers:
                peer.learner.weights.add(peer.local.follow(applied))
        if t == size.steps:
            break
        losses = [p.learner.step(t, t * batch + p.number * size.batch, size.batch) for p in peers]
        curve.append(float(np.mean(losses[way.hostile :])))
        if (t + 1) % way.every == 0 or t + 1 == size.steps:
            round = t // way.every
            parts = {p.name: p.local.part(round, p.learner.weights.read()) for p in peers}
            for peer in peers[: way.hostile]:
                parts[peer.name] = _attacked(way, outer, round, parts[peer.name], random)
            sent += sum(map(len, parts.values())) // len(parts)
            waiting.append((t + 1 + way.delay, _record(round, parts), parts))
    learner = peers[-1].learner
    learner.weights.write(outer.theta)
    return Outcome(sea.loss(learner), (size.peers - 1) * sent / size.steps, curve, out)


def _attacked(way: Way, outer: Outer, round: int, part: bytes, random: np.random.Generator) -> bytes:
    where = way.rule.fragment(round, outer.count)
    values = np.zeros(where.stop - where.start, np.float32)
    outer.codec.add(part, values, 1.0)
    assert way.attack is not None
    return way.attack(values, outer.codec, random)


def _record(round: int, parts: dict[str, bytes]) -> dict[str, Any]:
    took = [
        {"peer": n, "blob": hashlib.sha256(p).hexdigest(), "tokens": 1, "targets": 1, "score": None}
        for n, p in parts.items()
    ]
    return {"kind": "round", "round": round, "took": took}
