"""torchtitan's own Trainer, with its own loop, model, sharding, compilation, optimizer and metrics; only the tokens are
ours, as its loader wants packages that a bare machine lacks. Argument: Asked. (On a processor, where torchtitan does
not run by itself, its metrics are left out: that is how this file is tried.)"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import torch
from benchmarks.beside.asked import STEPS, Asked
from benchmarks.beside.turns import Turns

# What it imports and a step does not use.
for package, names in {
    "datasets": ("datasets", "datasets.distributed"),
    "tensorboard": ("torch.utils.tensorboard",),
    "tokenizers": ("tokenizers",),
}.items():
    if importlib.util.find_spec(package) is None:
        sys.modules |= {name: MagicMock() for name in names}


class Tokens:
    """Windows of the same tokens as everybody's, one batch after the other."""

    def __init__(self, asked: Asked, rank: int, ranks: int) -> None:
        self._ids = np.load(Path(asked.data) / "tokens.npy", mmap_mode="r")
        self._asked, self._rank, self._ranks = asked, rank, ranks

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        size = self._asked.of
        windows = (len(self._ids) - 1) // size.seq
        at = self._rank * size.batch
        while True:
            rows = [(at + i) % windows * size.seq for i in range(size.batch)]
            ids = torch.from_numpy(np.stack([self._ids[row : row + size.seq + 1] for row in rows]).astype(np.int64))
            yield {"input": ids[:, :-1].contiguous()}, ids[:, 1:].contiguous()
            at += self._ranks * size.batch

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def main(asked: Asked) -> None:
    if asked.device == "cpu":
        _to_a_processor()
    from torchtitan.components.loss import build_cross_entropy_loss  # type: ignore[import-not-found]
    from torchtitan.components.lr_scheduler import build_lr_schedulers  # type: ignore[import-not-found]
    from torchtitan.components.optimizer import build_optimizers  # type: ignore[import-not-found]
    from torchtitan.config import JobConfig  # type: ignore[import-not-found]
    from torchtitan.models.llama3 import (  # type: ignore[import-not-found]
        Transformer,
        TransformerModelArgs,
        parallelize_llama,
    )
    from torchtitan.protocols.train_spec import TrainSpec, register_train_spec  # type: ignore[import-not-found]
    from torchtitan.train import Trainer  # type: ignore[import-not-found]

    size = asked.of
    plain = int(2 * 4 * size.dim / 3)  # what it makes of dim by itself, before it rounds up to 256
    rounded = -(-plain // 256) * 256
    args = TransformerModelArgs(
        dim=size.dim,
        n_layers=size.layers,
        n_heads=size.heads,
        n_kv_heads=size.kv_heads,
        vocab_size=size.vocab,
        ffn_dim_multiplier=None if rounded == size.ffn_dim else size.ffn_dim / plain,
        rope_theta=500_000,
        max_seq_len=size.seq,
    )
    config = JobConfig()
    config.job.dump_folder = asked.folder
    config.model.name, config.model.flavor = "beside", "beside"
    config.training.local_batch_size, config.training.seq_len = size.batch, size.seq
    config.training.steps = STEPS
    config.parallelism.data_parallel_shard_degree = asked.dp
    config.parallelism.tensor_parallel_degree = asked.tp
    config.activation_checkpoint.mode = "none"
    config.compile.enable = asked.compiled
    register_train_spec(
        "beside",
        TrainSpec(
            model_cls=Transformer,
            model_args={"beside": args},
            parallelize_fn=parallelize_llama,
            pipelining_fn=None,
            build_optimizers_fn=build_optimizers,
            build_lr_schedulers_fn=build_lr_schedulers,
            build_dataloader_fn=lambda dp_world_size, dp_rank, **_: Tokens(asked, dp_rank, dp_world_size),
            build_tokenizer_fn=None,
            build_loss_fn=build_cross_entropy_loss,
            build_metrics_processor_fn=None if asked.device == "cuda" else lambda *_: _no_metrics(),
        ),
    )
    turns = Turns(asked.device, asked.folder)

    class Waiting(Trainer):
        def should_continue_training(self) -> bool:
            return not turns()

    os.environ["LOCAL_RANK"] = str(int(os.environ["LOCAL_RANK"]) % max(1, torch.cuda.device_count()))
    trainer = Waiting(config)
    feed_forward = next(m for name, m in trainer.model_parts[0].named_modules() if name.endswith("feed_forward"))
    assert feed_forward.w1.weight.shape[0] == size.ffn_dim, feed_forward.w1.weight.shape
    trainer.train()


def _to_a_processor() -> None:
    """Past what torchtitan asks of a GPU's runtime and of NCCL alone."""
    torch._utils._get_available_device_type = lambda: "cpu"
    from torchtitan.distributed import utils  # type: ignore[import-not-found]
    from torchtitan.models.llama3.infra import parallelize  # type: ignore[import-not-found]

    utils.set_pg_timeouts = lambda **_: None
    parallelize.disable_fsdp_gradient_division = lambda model: None


def _no_metrics() -> SimpleNamespace:
    peak = SimpleNamespace(max_reserved_gib=0.0, max_reserved_pct=0.0)
    return SimpleNamespace(
        color=SimpleNamespace(blue="", red="", reset=""),
        device_memory_monitor=SimpleNamespace(device_name="cpu", get_peak_stats=lambda: peak),
        ntokens_since_last_log=0,
        data_loading_times=[],
        should_log=lambda step: False,
        close=lambda: None,
    )


if __name__ == "__main__":
    main(Asked.load(sys.argv[1]))
