"""Where a layer that computes with plain tensors meets the other processes of an axis: four ways, each with its
gradient (arXiv:1909.08053 calls the first two f and g). Sizes divide; whoever lays a model out has seen to it.

What comes out is a tensor like any other. A part of a DTensor is a view, which no code may change in place, and classes
do (`out.add_(routed)`).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed._functional_collectives as collectives
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh


def shared(whole: Tensor, mesh: DeviceMesh) -> Tensor:
    """What all processes have alike, and each uses for a part of its own: its gradients are summed."""
    return _Shared.apply(whole, mesh)


def summed(part: Tensor, mesh: DeviceMesh) -> Tensor:
    """The sum over the processes; all go on alike, so each has its whole gradient."""
    return _Summed.apply(part, mesh)


def joined(part: Tensor, mesh: DeviceMesh) -> Tensor:
    """The processes' parts of the last dimension, put together."""
    return _Joined.apply(part, mesh)


def dealt_out(whole: Tensor, mesh: DeviceMesh, dim: int = -1) -> Tensor:
    """This process's part of a dimension; the gradient is put together again."""
    return _DealtOut.apply(whole, mesh, dim)


class _Shared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, mesh: DeviceMesh) -> Tensor:
        ctx.mesh = mesh
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _sum(grad, ctx.mesh), None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, mesh: DeviceMesh) -> Tensor:
        return _sum(part, mesh)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, mesh: DeviceMesh) -> Tensor:
        ctx.mesh = mesh
        return _join(part, -1, mesh)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _part(grad, -1, ctx.mesh), None


class _DealtOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, mesh: DeviceMesh, dim: int) -> Tensor:
        ctx.mesh, ctx.dim = mesh, dim
        return _part(whole, dim, mesh)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _join(grad, ctx.dim, ctx.mesh), None, None


def _sum(part: Tensor, mesh: DeviceMesh) -> Tensor:
    return collectives.wait_tensor(collectives.all_reduce(part.contiguous(), "sum", (mesh, 0)))


def _join(part: Tensor, dim: int, mesh: DeviceMesh) -> Tensor:
    parts = collectives.wait_tensor(_all_gather(part.contiguous(), 0, (mesh, 0)))
    return torch.cat(parts.chunk(mesh.size()), dim)


def _part(whole: Tensor, dim: int, mesh: DeviceMesh) -> Tensor:
    return whole.chunk(mesh.size(), dim)[mesh.get_local_rank()].contiguous()


# torch 2.12 gave it a new name, and 2.13 warns of the old one.
_all_gather = getattr(collectives, "all_gather_single", None) or collectives.all_gather_tensor
