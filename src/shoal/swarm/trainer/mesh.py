"""What the processes of one peer do together: the first one decides and calls, the others follow.

Every method that begins with `self._call` is a collective. On the first process it tells the others what comes; on the
others `follow` does the same until told to leave. A peer of one process has nobody to tell.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from shoal.checkpoint import ledger
from shoal.checkpoint.publish import prune
from shoal.checkpoint.saving import save
from shoal.checkpoint.store import Folder
from shoal.data.ahead import Ahead
from shoal.data.order import I64
from shoal.data.windows import AnyWindows, Batch
from shoal.journal.rundir import RunDir
from shoal.parallel import agree
from shoal.parallel.inner import Inner
from shoal.parallel.place import Place
from shoal.spec.run import Run
from shoal.swarm.outer.exact import F32
from shoal.swarm.outer.peer_side import Move
from shoal.swarm.trainer.samples import Range, positions
from shoal.swarm.trainer.scoring import Pool
from shoal.swarm.trainer.weights import Weights
from shoal.train.amount import Amount, amount
from shoal.train.balance import balance, forget
from shoal.train.clock import Clock
from shoal.train.evaluate import Evaluator
from shoal.train.hooks import Moment
from shoal.train.numerics import NotFinite
from shoal.train.parts import Parts
from shoal.train.step import Step


@dataclass(frozen=True)
class InnerStep:
    """What an inner step was."""

    loss: float  # not finite: the step was not taken
    targets: int
    tokens: int
    grad_norm: float
    lr: float

    @property
    def taken(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


class Mesh:
    def __init__(self, run: Run, run_dir: RunDir, parts: Parts, evaluator: Evaluator | None) -> None:
        self._run, self._run_dir, self._parts, self._evaluator = run, run_dir, parts, evaluator
        self._place, self._model = parts.place, parts.model
        self._inner = Inner(parts.place.rank, parts.place.world)
        self._step = Step(run, parts.model, parts.optimizers)
        self._feed: Ahead[tuple[Range, ...], list[Batch]] = Ahead(self._make, "shoal-swarm-feed")
        trained, held_out = run.steps * run.train.batch, None if evaluator is None else evaluator.windows
        self.pool = Pool.of(parts.windows, parts.order, trained, held_out)  # on which parts are tried
        self.weights = Weights(parts.model)
        self.steps = 0  # inner steps, of this process's life

    @property
    def readers(self) -> int:
        """A step's windows are shared equally by so many."""
        return self._place.sizes.dp

    def follow(self) -> None:
        """What every process but the first does, until it is told to leave."""
        while True:
            name, args = self._inner.share(None)
            if name == "leave":
                return
            getattr(self, name)(*args)

    def _call(self, name: str, *args: Any) -> None:
        if self._place.world > 1 and self._place.rank == 0:
            self._inner.share([name, args])

    def idle(self) -> None:
        """Nothing to do, said now and then, so that nobody who waits believes that the first one is gone."""
        self._call("idle")

    def leave(self) -> None:
        self._call("leave")
        self._feed.close()

    def step(self, ranges: Sequence[Sequence[int]], then: Sequence[Sequence[int]], ratio: float) -> InnerStep:
        """One optimizer step on the windows at these positions. `then`: those of the next step, most likely."""
        self._call("step", ranges, then, ratio)
        wanted, shape, clock = _ranges(ranges), self._model.shape, Clock()
        at = Moment(self.steps, wanted[0][0] // self._run.train.batch)
        batches = self._step.samples(at, self._feed.get(wanted))
        self._feed.want([coming] if (coming := _ranges(then)) else [])
        # Of a dense model the sum is not needed before the gradient; a router weighs its tokens by it.
        summing = self._place.begin_sum_of_batch(*amount(self._model, batches))
        known = None if shape.experts is None else Amount(*summing.wait())
        weight, draw = known.token_weight if known else 1.0, (wanted[0][0], self._place.at["dp"])
        total = self._step.gradient(at, draw, batches, clock, weight)
        targets, tokens, *_ = known or summing.wait()
        if not targets:
            self._parts.optimizers.forget()
            forget(self._model)
            return InnerStep(0.0, 0, int(tokens), 0.0, 0.0)
        try:
            loss, norm, lr = self._step.update(at, total, targets, ratio, clock)
        except NotFinite as wrong:
            return InnerStep(wrong.loss, int(targets), int(tokens), wrong.norm, 0.0)
        self.steps += 1
        balance(self._model, self.steps, lambda *_, **__: None)
        return InnerStep(loss, int(targets), int(tokens), norm, lr)

    def _make(self, ranges: tuple[Range, ...]) -> list[Batch]:
        picked = self._parts.order.pick(positions(ranges))
        return _batches(self._place, self._parts.windows, *picked, int(self._run.mesh.micro_batch))

    def loss(self, numbers: Sequence[int]) -> float:
        """The mean loss on windows of the pool, without a step."""
        self._call("loss", numbers)
        batches = _batches(self._place, self.pool.windows, *self.pool.pick(numbers), int(self._run.mesh.micro_batch))
        total = self._model.total(self._model.loss(batches))
        (targets,) = self._place.sum_of_batch(sum(b.target_count for b in batches))
        return float(total) / max(1.0, targets)

    def evaluate(self, step: int) -> float | None:
        """On held-out data, where there is some."""
        self._call("evaluate", step)
        return None if self._evaluator is None else self._evaluator(step)

    def fresh(self, seed: int) -> None:
        """The weights of a new run, and optimizers that know nothing."""
        self._call("fresh", seed)
        for decoder in self._model.decoders:
            decoder.init_weights(seed)
        self._parts.load_weights()
        self._model.spread()
        self._forget()

    def calm(self) -> None:
        """Optimizers as at the beginning."""
        self._call("calm")
        self._forget()

    def _forget(self) -> None:
        for tensor in self._parts.optimizers.tensors().values():
            tensor.zero_()
        self._parts.optimizers.set_step(0)

    def read(self) -> F32:
        self._call("read")
        return self.weights.read()

    def write(self, vector: F32 | None = None) -> None:
        self._call("write")
        self.weights.write(_mine(vector))

    def add(self, moves: Iterable[Move] = ()) -> None:
        self._call("add")
        self.weights.add(moves)

    def checkpoint(self, step: int, theta: F32 | None = None) -> dict[str, Any]:
        """Theta as a checkpoint of the run, which `shoal sample` and `shoal export` read; fields for its record."""
        self._call("checkpoint", step)
        tensors: dict[str, torch.Tensor] = {}
        if theta is not None:
            at = 0
            for name, p in self._model.named_parameters():
                tensors[f"model.{name}"] = torch.from_numpy(theta[at : at + p.numel()]).view(p.shape)
                at += p.numel()
            tensors |= {f"model.{n}": t for n, t in self._model.saved().items() if f"model.{n}" not in tensors}
        store, first = Folder(self._run_dir.checkpoints), self._place.rank == 0
        term = agree.from_rank_0(ledger.claim([store], step) if first else 0)
        holders = {name: [0] for name in tensors}
        saved = save(store, step, tensors, self._parts.state.extra(step), term, holders)
        if first:
            keep = self._run.checkpoint
            prune(store, keep.keep, keep.keep_every, keep.keep_best, term)
        return {"bytes": saved.bytes, "path": str(saved.name), "stall_s": round(saved.seconds, 6), "persist_s": 0.0}


def _batches(place: Place, windows: AnyWindows, sources: I64, ids: I64, micro_batch: int) -> list[Batch]:
    """This process's share of some windows."""
    share = len(ids) // place.sizes.dp
    assert share * place.sizes.dp == len(ids), "a step's windows are not shared equally"
    mine = slice(place.at["dp"] * share, (place.at["dp"] + 1) * share)
    return windows.micro_batches(sources[mine], ids[mine], micro_batch)


def _ranges(said: Sequence[Sequence[int]]) -> tuple[Range, ...]:
    return tuple((int(a), int(b)) for a, b in said)


def _mine(vector: F32 | None) -> F32:
    return np.empty(0, np.float32) if vector is None else vector
