"""The peers: torchtitan's own Llama with its own start values, or transformers' with its own. AdamW, clipping and
autocast as torchtitan's trainer runs them on one device. Arguments: which, a file with the jobs."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch
import torch.nn.functional as F
from benchmarks.to_loss.curve import learn
from benchmarks.to_loss.jobs import read
from benchmarks.to_loss.text import Reader
from benchmarks.to_loss.trials import Trial
from torch import Tensor, nn

from shoal.data.windows import NO_TARGET, Batch
from shoal.spec.model import Model
from shoal.spec.shape import Shape, shape_of

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CLIP = 1.0


def main(system: str, file: Path) -> None:
    if DEVICE.type == "cpu":
        torch.set_num_threads(1)
    for trial, data, jobs in read(file):
        shape = shape_of(Model.model_validate({**trial.model, "vocab_size": trial.vocab}))
        peer = {"torchtitan": Torchtitan, "transformers": Transformers}[system](shape, trial)
        reader = Reader(data, trial.seq, trial.batch)
        for job in jobs:
            peer.lr = trial.lr
            peer.begin(job.seed)
            learn(system, job, trial, reader, peer)


class Peer:
    """A model that gives logits, with the optimizer beside it."""

    model: nn.Module
    lr: float

    def fill(self) -> None:
        """Its own start values."""
        raise NotImplementedError

    def logits(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.model(tokens)
        return out

    def begin(self, seed: int) -> None:
        torch.manual_seed(seed)
        with torch.no_grad():
            self.fill()
        self.model.train()
        settings: dict[str, Any] = {"lr": self.lr, "betas": (0.9, 0.95), "weight_decay": 0.1, "fused": True}
        self._optimizer = torch.optim.AdamW(self.model.parameters(), **settings)

    def step(self, batch: Batch, ratio: float) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = self.lr * ratio
        (self._loss(batch) / batch.target_count).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), CLIP, foreach=True)
        self._optimizer.step()
        self._optimizer.zero_grad()

    @torch.no_grad()
    def loss(self, batch: Batch) -> float:
        return float(self._loss(batch))

    def _loss(self, batch: Batch) -> Tensor:
        tokens, targets = (torch.from_numpy(a).to(DEVICE, non_blocking=True) for a in (batch.tokens, batch.targets))
        with torch.autocast(DEVICE.type, dtype=torch.bfloat16, enabled=DEVICE.type == "cuda"):
            logits = self.logits(tokens).flatten(0, 1).float()
            return F.cross_entropy(logits, targets.flatten(), reduction="sum", ignore_index=NO_TARGET)


class Torchtitan(Peer):
    def __init__(self, shape: Shape, trial: Trial) -> None:
        if importlib.util.find_spec("datasets") is None:
            sys.modules |= {name: MagicMock() for name in ("datasets", "datasets.distributed")}
        from torchtitan.models.llama3 import Transformer, TransformerModelArgs  # type: ignore[import-not-found]
        from torchtitan.models.llama3.infra.parallelize import apply_compile  # type: ignore[import-not-found]

        plain = int(2 * 4 * shape.dim / 3)  # what it makes of dim by itself
        args = TransformerModelArgs(
            dim=shape.dim,
            n_layers=shape.layers,
            n_heads=shape.heads,
            n_kv_heads=shape.kv_heads,
            vocab_size=shape.vocab_size,
            multiple_of=1,
            ffn_dim_multiplier=None if plain == shape.ffn_dim else (shape.ffn_dim + 0.5) / plain,
            rope_theta=shape.rope_theta,
            max_seq_len=trial.seq,
        )
        with torch.device("meta"):
            self.model = Transformer(args)
        self.model.to_empty(device=DEVICE)
        assert self.model.layers["0"].feed_forward.w1.weight.shape[0] == shape.ffn_dim
        if DEVICE.type == "cuda":
            apply_compile(self.model, SimpleNamespace(backend="inductor"))

    def fill(self) -> None:
        self.model.init_weights(buffer_device=DEVICE)  # type: ignore[operator]


class Transformers(Peer):
    def __init__(self, shape: Shape, trial: Trial) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        from shoal.spec.hf.config import to_hf

        self._config = LlamaConfig(**to_hf(shape), attn_implementation="sdpa", use_cache=False)
        self._of = LlamaForCausalLM

    def fill(self) -> None:
        with torch.device(DEVICE):
            self.model = self._of(self._config)

    def logits(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.model(input_ids=tokens).logits
        return out


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
