"""What the scripts beside this file share: a tiny model, numbers to learn, and one ending: all weights in a file."""

import argparse
import os

import torch
from torch import nn
from torch.utils.data import Dataset


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default="out")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--save", type=int, default=8, help="after each so many steps")
    parser.add_argument("--resume")
    return parser.parse_args()


class Numbers(Dataset):
    """Rows of numbers, each a function of its index."""

    def __init__(self, count: int = 512) -> None:
        generator = torch.Generator().manual_seed(0)
        self._rows = torch.randn(count, 32, generator=generator)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self._rows[index]


def net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 32))


def loss_of(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    return (model(rows) - rows.cumsum(1) / 8).square().mean()


def gpt2(folder: str) -> str:
    """A tiny GPT-2 with start values, as a folder of transformers."""
    from transformers import GPT2Config, GPT2LMHeadModel

    if int(os.environ.get("RANK", "0")) == 0 and not os.path.exists(f"{folder}/config.json"):
        torch.manual_seed(2)
        size = {"vocab_size": 128, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 2}
        GPT2LMHeadModel(GPT2Config(**size, bos_token_id=0, eos_token_id=0)).save_pretrained(folder)
    return folder


def tokens(count: int = 256) -> list[dict[str, list[int]]]:
    rows = torch.randint(128, (count, 16), generator=torch.Generator().manual_seed(3)).tolist()
    return [{"input_ids": row, "labels": row} for row in rows]


def done(model: nn.Module, out: str) -> None:
    """By rank 0: what two runs are compared by."""
    if int(os.environ.get("RANK", "0")) == 0:
        os.makedirs(out, exist_ok=True)
        torch.save({name: t.detach().cpu().clone() for name, t in model.state_dict().items()}, f"{out}/final.pt")
