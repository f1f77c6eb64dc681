"""A small state to save: a model with awkward shapes and AdamW, laid out as DDP, FSDP2, HSDP or two-way sharded."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

# name → world. `grid` shards both dimensions of a matrix over a 2 x 2 mesh, as FSDP with tensor parallelism does.
LAYOUTS = {"alone": 1, "ddp-2": 2, "fsdp-2": 2, "ddp-4": 4, "fsdp-4": 4, "hsdp-4": 4, "grid-4": 4}


class Model(nn.Module):
    """Sizes that divide by nothing: shards are uneven on 2 ranks and empty on some of 4."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(37, 10)
        self.inner = nn.Linear(10, 7)
        self.head = nn.Linear(7, 3)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.inner(self.embed(tokens)))) * self.scale


def build(layout: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Model()
    if layout.startswith("fsdp"):
        mesh = init_device_mesh("cpu", (LAYOUTS[layout],))
        fully_shard(model.inner, mesh=mesh)
        fully_shard(model, mesh=mesh)
    elif layout.startswith("hsdp"):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        fully_shard(model.inner, mesh=mesh)
        fully_shard(model, mesh=mesh)
    elif layout.startswith("grid"):
        mesh = init_device_mesh("cpu", (2, 2))
        for module in model.modules():
            for name, p in list(module.named_parameters(recurse=False)):
                cuts = [Shard(0), Shard(1 if p.ndim == 2 else 0)]
                module.register_parameter(name, nn.Parameter(distribute_tensor(p.detach(), mesh, cuts)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for p in model.parameters():
        optimizer.state[p].update(step=torch.zeros(()), exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
    return model, optimizer


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    """The same batch on every rank: the gradients of all layouts are those of one process."""
    for _ in range(steps):
        model(torch.arange(37)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def pretend_to_train(optimizer: torch.optim.Optimizer) -> None:
    """Numbers in the optimizer's state for layouts that have no forward of their own here."""
    for i, state in enumerate(optimizer.state.values()):
        for j, tensor in enumerate(state.values()):
            tensor.copy_(tensor + (i + 1) * 0.1 + j)


def tensors_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    state = {f"model.{name}": p.detach() for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        state |= {f"optim.{name}.{key}": t for key, t in optimizer.state[p].items()}
    return state


def whole(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: (t.full_tensor() if isinstance(t, DTensor) else t).clone() for name, t in tensors.items()}


def same_bits(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(_same_bits(a[name], b[name]) for name in a)


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a.contiguous().reshape(-1).view(torch.uint8), b.contiguous().reshape(-1).view(torch.uint8))
