"""A model that DeepSpeed itself trains and saves, with all that makes its flat groups odd, and what its own scripts
make of them. Nothing of Shoal's engine is in here."""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
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


KINDS: dict[str, dict[str, Any]] = {
    "zero-1": {"zero_optimization": {"stage": 1}},
    "zero-2": {"zero_optimization": {"stage": 2}},
    "zero-3": {"zero_optimization": {"stage": 3}},
    "bf16": {
        "zero_optimization": {"stage": 1},
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": "fp32"},
    },
}


def save(folder: Path, kinds: Mapping[str, Mapping[str, Any]] = KINDS, world: int = 2) -> None:
    """What `engine.save_checkpoint` writes after a few steps: `KIND/latest`, `KIND/global_step3`. Beside it, what
    DeepSpeed's own scripts make of it: `KIND.safetensors` by `zero_to_fp32` (of bf16: the model's own), and
    `KIND/universal` by `ds_to_universal`."""

    def work(rank: int, world: int) -> None:
        deepspeed = package()
        deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
        with _quiet():
            for kind, settings in kinds.items():
                _train(deepspeed, folder / kind, rank, settings)
                if rank == 0 and kind != "bf16":  # its scripts know no checkpoint of its own BF16_Optimizer
                    _convert(folder / kind)

    run_ranks(work, world, timeout_s=180)


def _train(deepspeed: Any, folder: Path, rank: int, settings: Mapping[str, Any]) -> None:
    torch.manual_seed(0)
    model = Odd()
    config = {"train_micro_batch_size_per_gpu": 2, "zero_allow_untested_optimizer": True, **settings}
    decayed = [p for p in model.parameters() if p.requires_grad and p.dim() > 1]
    others = [p for p in model.parameters() if p.requires_grad and p.dim() < 2]
    adamw = torch.optim.AdamW([{"params": decayed}, {"params": others, "weight_decay": 0.0}], lr=1e-2)
    engine, *_ = deepspeed.initialize(model=model, optimizer=adamw, config=config)
    for step in range(STEPS):
        tokens = torch.randint(0, 11, (2, 6), generator=torch.Generator().manual_seed(10 * step + rank))
        engine.backward(engine(tokens))
        engine.step()
    if rank == 0 and "bf16" in settings:
        kept = {name: t.detach().clone() for name, t in model.state_dict().items()}
        save_file(kept, folder.with_name(f"{folder.name}.safetensors"))
    # A program's own state: whatever it likes.
    state = {"mine": {"args": argparse.Namespace(lr=1), "where": Path("x"), "seen": {1, 2}}, "epoch": 4}
    engine.save_checkpoint(str(folder), tag=f"global_step{STEPS}", client_state=state)
    engine.destroy()


def _convert(folder: Path) -> None:
    from deepspeed.checkpoint import ds_to_universal
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    merged = get_fp32_state_dict_from_zero_checkpoint(str(folder))
    tensors = {name: t.detach().clone() for name, t in merged.items() if t.is_floating_point()}
    save_file(tensors, folder.with_name(f"{folder.name}.safetensors"))
    options = {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False, "strict": True}
    where = {"input_folder": str(folder / f"global_step{STEPS}"), "output_folder": str(folder / "universal")}
    ds_to_universal.main(argparse.Namespace(**where, **options, inject_missing_state=True))


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
