"""A real training loop to save from: Shoal's own decoder, sharding and AdamW on random tokens, a step at a time."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from shoal.data.windows import Batch
from shoal.parallel.build import build
from shoal.parallel.place import Place, join
from shoal.spec.run import Run
from shoal.train.optim import Optimizers


@dataclass(frozen=True)
class Size:
    """What is trained; a state of 12 bytes a parameter: float32 weights and AdamW's two moments."""

    model: dict[str, Any]
    windows: int  # of each process in a step
    seq_len: int


SIZES = {
    "small": Size({"dim": 384, "layers": 6, "heads": 6, "kv_heads": 2, "ffn_dim": 1024, "vocab_size": 8192}, 1, 64),
    "medium": Size({"dim": 640, "layers": 8, "heads": 10, "kv_heads": 5, "ffn_dim": 1728, "vocab_size": 8192}, 1, 96),
    "large": Size({"dim": 1024, "layers": 8, "heads": 16, "kv_heads": 8, "ffn_dim": 2816, "vocab_size": 8192}, 1, 96),
    # The shape of Llama 3.2 1B: 1.24 billion parameters, 14.8 GB of state.
    "1b": Size(
        {
            "dim": 2048,
            "layers": 16,
            "heads": 32,
            "kv_heads": 8,
            "ffn_dim": 8192,
            "vocab_size": 128_256,
            "tie_embeddings": True,
            "rope_theta": 500_000.0,
        },
        windows=8,
        seq_len=2048,
    ),
}


class Trainer:
    """One process of a data-parallel (FSDP2) run. `step` is what Shoal's loop does, without journal and feed."""

    def __init__(self, size: Size, device: str) -> None:
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        run = Run.model_validate(
            {
                "name": "bench",
                "model": size.model,
                "data": {"train": "none", "seq_len": size.seq_len},
                "train": {
                    "steps": 1_000_000,
                    "batch": size.windows * world,
                    "precision": "bf16" if device == "cuda" else "fp32",
                },
                "mesh": {
                    "pp": 1,
                    "dp_replicate": 1,
                    "dp_shard": world,
                    "cp": 1,
                    "tp": 1,
                    "ep": 1,
                    "micro_batch": size.windows,
                    "recompute": "none",
                },
                "resources": {"device": device},
            }
        )
        if world == 1:  # Shoal needs no group for one process; its rivals do
            backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
            dist.init_process_group(backend, init_method=os.environ["SHOAL_RENDEZVOUS"], rank=0, world_size=1)
        self.place: Place = join(run)
        self.model = build(run, self.place)
        self.optimizers = Optimizers(run.train.optimizer, self.model.named_parameters())
        self._batches = [_random_batch(size, rank * 1000 + i) for i in range(8)]
        self._step = 0

    def state(self) -> dict[str, torch.Tensor]:
        """What everybody saves: the same names, the same bytes."""
        return {**{f"model.{n}": t for n, t in self.model.saved().items()}, **self.optimizers.tensors()}

    def step(self, before_update: Callable[[], None], flag: bool = False) -> bool:
        """One step; whether `flag` was true on every process when it began."""
        batch = self._batches[self._step % len(self._batches)]
        targets, flags = self.place.sum(batch.target_count, float(flag))
        loss = self.model.total(self.model.backward([batch])) / targets
        norm, factor = self.model.norm(1 / targets, 1.0)
        assert torch.isfinite(loss + norm), "the benchmark's training diverged"  # the host waits here, as in the loop
        before_update()
        self.optimizers.step(1e-3, factor)
        self._step += 1
        return flags == self.place.world

    def settle(self) -> None:
        """Everything that was asked of the device is done."""
        if self.place.device.type == "cuda":
            torch.cuda.synchronize()


def _random_batch(size: Size, seed: int) -> Batch:
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, size.model["vocab_size"], (size.windows, size.seq_len + 1))
    positions = np.broadcast_to(np.arange(size.seq_len), (size.windows, size.seq_len))
    return Batch(ids[:, :-1].copy(), ids[:, 1:].copy(), positions.copy(), np.zeros(positions.shape, np.int32))
