"""Where a layer that computes with plain tensors meets the other processes of an axis: four ways, each with its
gradient (arXiv:1909.08053 calls the first two f and g). Sizes divide; whoever lays a model out has seen to it."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard


def shared(whole: Tensor, mesh: DeviceMesh) -> Tensor:
    """What all processes have alike, and each uses for a part of its own: its gradients are summed."""
    return DTensor.from_local(whole, mesh, [Replicate()], run_check=False).to_local(grad_placements=[Partial()])


def summed(part: Tensor, mesh: DeviceMesh) -> Tensor:
    """The sum over the processes; all go on alike, so each has its whole gradient."""
    return _changed(part, mesh, Partial(), Replicate())


def joined(part: Tensor, mesh: DeviceMesh) -> Tensor:
    """The processes' parts of the last dimension, put together."""
    return _changed(part, mesh, Shard(part.ndim - 1), Replicate())


def dealt_out(whole: Tensor, mesh: DeviceMesh, dim: int = -1) -> Tensor:
    """This process's part of a dimension; the gradient is put together again."""
    return _changed(whole, mesh, Replicate(), Shard(dim % whole.ndim))


def _changed(tensor: Tensor, mesh: DeviceMesh, given: Placement, wanted: Placement) -> Tensor:
    return DTensor.from_local(tensor, mesh, [given], run_check=False).redistribute(placements=[wanted]).to_local()
