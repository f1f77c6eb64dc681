"""A model that DeepSpeed itself trains and saves, with all that makes its flat groups odd, and what its own scripts
make of them. Nothing of Shoal's engine is in here."""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.ranks import run_ranks

STEPS = 3


class Odd(nn.Module):
    """Sizes that no number of processes divides, a tied head, a frozen layer, buffers, a parameter of one number."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.frozen = nn.Embedding(11, 5), nn.Linear(5, 3)
        self.inner, self.norm = nn.Linear(3, 5), nn.LayerNorm(5)
        self.scale = nn.Parameter(torch.tensor([0.5]))
        self.head = nn.Linear(5, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("table", torch.arange(7).float() / 3)
        self.register_buffer("counted", torch.tensor([3, 4]))
        self.frozen.requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.inner(torch.tanh(self.frozen(self.embed(tokens))))) * self.scale
        logits: torch.Tensor = self.head(x)
        return nn.functional.cross_entropy(logits.flatten(0, -2).float(), tokens.flatten())


def save(folder: Path, stage: int, world: int = 2, precision: str = "fp32", **zero: Any) -> None:
    """What `engine.save_checkpoint` writes after a few steps."""

    def work(rank: int, world: int) -> None:
        deepspeed = package()
        deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
        torch.manual_seed(0)
        model = Odd()
        config = {
            "train_micro_batch_size_per_gpu": 2, "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": stage, **zero},
        }  # fmt: skip
        if precision == "bf16":
            config["bf16"] = {"enabled": True}
            config["data_types"] = {"grad_accum_dtype": "fp32"}
        decayed = [p for p in model.parameters() if p.requires_grad and p.dim() > 1]
        others = [p for p in model.parameters() if p.requires_grad and p.dim() < 2]
        adamw = torch.optim.AdamW([{"params": decayed}, {"params": others, "weight_decay": 0.0}], lr=1e-2)
        engine, *_ = deepspeed.initialize(model=model, optimizer=adamw, config=config)
        for step in range(STEPS):
            tokens = torch.randint(0, 11, (2, 6), generator=torch.Generator().manual_seed(10 * step + rank))
            engine.backward(engine(tokens))
            engine.step()
        with _quiet():  # of the caller's own: whatever it likes
            state = {"mine": {"args": argparse.Namespace(lr=1), "where": Path("x"), "seen": {1, 2}}, "epoch": 4}
            engine.save_checkpoint(str(folder), tag="global_step3", client_state=state)
        engine.destroy()

    run_ranks(work, world)


def merged(folder: Path) -> dict[str, torch.Tensor]:
    """What DeepSpeed's own `zero_to_fp32` makes of it. In a process of its own."""

    def work(rank: int, world: int) -> dict[str, torch.Tensor]:
        package()
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

        with _quiet():
            found = get_fp32_state_dict_from_zero_checkpoint(str(folder))
        return {name: tensor.detach().clone() for name, tensor in found.items()}

    (weights,) = run_ranks(work, 1)
    return dict(weights)


def universal(folder: Path) -> None:
    """Its own `ds_to_universal`, beside the folder it is made of: `universal/`."""

    def work(rank: int, world: int) -> None:
        package()
        from deepspeed.checkpoint import ds_to_universal

        options = {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False, "strict": True}
        where = {"input_folder": str(folder / "global_step3"), "output_folder": str(folder / "universal")}
        with _quiet():
            ds_to_universal.main(argparse.Namespace(**where, **options, inject_missing_state=True))

    run_ranks(work, 1)


def package() -> Any:
    os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": "0"}
    import deepspeed

    deepspeed.ops.__compatible_ops__ = {}  # nothing is compiled
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    return deepspeed


@contextmanager
def _quiet() -> Iterator[None]:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield
