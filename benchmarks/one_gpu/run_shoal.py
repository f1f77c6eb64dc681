"""Shoal's own step: what its loop does between two records, on random tokens. Arguments: size, precision (`fp8-row`:
fp8 with a scale for each row), way of recomputing, steps."""

from __future__ import annotations

import sys
import time

import numpy as np
import torch
from benchmarks.one_gpu.sizes import SIZES, VOCAB
from benchmarks.one_gpu.timing import batches, measure

from shoal.data.windows import Batch
from shoal.parallel.build import build
from shoal.parallel.place import Place
from shoal.spec.run import Run
from shoal.train.optim import Optimizers


def main(name: str, precision: str, way: str, steps: int) -> None:
    began, size = time.time(), SIZES[name]
    shape = {"layers": size.layers, "dim": size.dim, "heads": size.heads, "kv_heads": size.kv_heads}
    axes = dict.fromkeys(("dp_replicate", "dp_shard", "tp", "pp", "cp", "ep"), 1)
    run = Run.model_validate(
        {
            "name": name,
            "model": {**shape, "ffn_dim": size.ffn_dim, "vocab_size": VOCAB, "tie_embeddings": False},
            "data": {"train": "random", "seq_len": size.seq},
            "train": {
                "steps": steps,
                "batch": size.batch,
                "precision": precision.removesuffix("-row"),
                "fp8_scaling": "row" if precision.endswith("-row") else "tensor",
                "compile": True,
                "optimizer": {"moments": size.moments},
            },
            "mesh": {**axes, "micro_batch": size.batch, "recompute": way},
            "resources": {"device": "cuda", "processes": 1, "threads": 1},
        }
    )
    place = Place(0, 1, torch.device("cuda", 0))
    torch.cuda.set_device(place.device)
    model = build(run, place)
    optimizers = Optimizers(run.train.optimizer, model.named_parameters())
    positions = np.broadcast_to(np.arange(size.seq), (size.batch, size.seq)).copy()
    whole = np.zeros((size.batch, size.seq), np.int32)
    ready = [Batch(tokens.numpy(), targets.numpy(), positions, whole) for tokens, targets in batches(size)]

    def step(i: int) -> float:
        loss = model.total(model.backward([ready[i % len(ready)]])) / size.tokens
        norm, factor = model.norm(1 / size.tokens, run.train.clip)
        told = float(loss), float(norm)
        optimizers.step(1.0, factor)
        return told[0]

    measure(f"shoal {precision}", size, step, began, steps)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))
