"""What the processes of one peer do together: the first one decides and calls, the others follow.

Every method that begins with `self._call` is a collective. On the first process it tells the others what comes; on the
others `follow` does the same until told to leave. A peer of one process has nobody to tell.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from shoal.checkpoint import ledger, peers
from shoal.checkpoint.publish import prune
from shoal.checkpoint.saving import save
from shoal.checkpoint.store import Folder
from shoal.data.order import I64
from shoal.data.windows import Batch, Windows
from shoal.fleet.inner import Inner
from shoal.fleet.outer.exact import F32
from shoal.fleet.outer.local import Move
from shoal.parallel.place import Place
from shoal.spec.run import Run
from shoal.track.rundir import RunDir
from shoal.train.amount import Amount, amount
from shoal.train.balance import balance, forget
from shoal.train.evaluate import Evaluator
from shoal.train.seed import seed_step
from shoal.train.swarm_samples import Range, positions
from shoal.train.swarm_scoring import Pool
from shoal.train.swarm_weights import Weights
from shoal.train.worker import Parts


@dataclass(frozen=True)
class Step:
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
        self._ahead = _Ahead(parts, int(run.mesh.micro_batch))
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
        self._ahead.close()

    def step(self, ranges: Sequence[Sequence[int]], then: Sequence[Sequence[int]], ratio: float) -> Step:
        """One optimizer step on the windows at these positions. `then`: those of the next step, most likely."""
        self._call("step", ranges, then, ratio)
        batches = self._ahead.get(ranges)
        self._ahead.prepare(then)
        seed_step(self._run.seed, int(ranges[0][0]), self._place.at["dp"])
        # Of a dense model the sum is not needed before the gradient; a router weighs its tokens by it.
        shape = self._model.shape
        summing = self._place.begin_sum_of_batch(*amount(shape, batches))
        known = None if shape.experts is None else Amount(*summing.wait())
        total = self._model.total(self._model.backward(batches, token_weight=known.token_weight if known else 1.0))
        targets, tokens, *_ = known or summing.wait()
        loss = float(total) / max(1.0, targets)
        grad_norm, factor = self._model.norm(1 / max(1.0, targets), self._run.train.clip)
        step = Step(loss, int(targets), int(tokens), float(grad_norm), 0.0)
        if not step.taken or not targets:
            self._parts.optimizers.forget()
            forget(self._model)
            return step
        lr = self._parts.optimizers.step(ratio, factor)
        self._model.spread()
        self.steps += 1
        balance(self._model, self.steps, lambda *_, **__: None)
        return Step(loss, int(targets), int(tokens), float(grad_norm), lr)

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
        term = peers.from_rank_0(ledger.claim([store], step) if first else 0)
        holders = {name: [0] for name in tensors}
        saved = save(store, step, tensors, self._parts.state.extra(step), term, holders)
        if first:
            keep = self._run.checkpoint
            prune(store, keep.keep, keep.keep_every, keep.keep_best, term)
        return {"bytes": saved.bytes, "path": str(saved.name), "stall_s": round(saved.seconds, 6), "persist_s": 0.0}


class _Ahead:
    """Batches, made in a thread before they are asked for."""

    def __init__(self, parts: Parts, micro_batch: int) -> None:
        self._parts, self._micro_batch = parts, micro_batch
        self._thread = ThreadPoolExecutor(1, "shoal-swarm-feed")
        self._next: tuple[list[Range], Future[list[Batch]]] | None = None

    def prepare(self, ranges: Sequence[Sequence[int]]) -> None:
        wanted = _ranges(ranges)
        self._next = (wanted, self._thread.submit(self._make, wanted)) if wanted else None

    def get(self, ranges: Sequence[Sequence[int]]) -> list[Batch]:
        wanted = _ranges(ranges)
        made, self._next = self._next, None
        return made[1].result() if made is not None and made[0] == wanted else self._make(wanted)

    def _make(self, ranges: list[Range]) -> list[Batch]:
        picked = self._parts.order.pick(positions(ranges))
        return _batches(self._parts.place, self._parts.windows, *picked, self._micro_batch)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)


def _batches(place: Place, windows: Windows, sources: I64, ids: I64, micro_batch: int) -> list[Batch]:
    """This process's share of some windows."""
    share = len(ids) // place.sizes.dp
    assert share * place.sizes.dp == len(ids), "a step's windows are not shared equally"
    mine = slice(place.at["dp"] * share, (place.at["dp"] + 1) * share)
    sources, ids, size = sources[mine], ids[mine], min(micro_batch, share)
    return [windows.batch(sources[i : i + size], ids[i : i + size]) for i in range(0, share, size)]


def _ranges(said: Sequence[Sequence[int]]) -> list[Range]:
    return [(int(a), int(b)) for a, b in said]


def _mine(vector: F32 | None) -> F32:
    return np.empty(0, np.float32) if vector is None else vector
