"""The global gradient norm, and the one factor that turns summed gradients into clipped means."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shoal.parallel.place import Place

CPU_MOST, CPU_ROW = 1 << 16, 1 << 14  # numbers: 2e-7 and 2e-8 are lost of so many
TINY = 1e-6  # keeps the factor finite where the norm is zero, as torch's own clipping does


def norm_and_factor(
    parameters: Iterable[tuple[nn.Parameter, int]], place: Place, scale: float, limit: float | None
) -> tuple[Tensor, Tensor]:
    """The norm of all gradients times `scale`, and what to multiply them by so that it does not pass `limit`.

    Each parameter comes with the number of processes that hold the same part of it. Every process squares what it
    holds and divides by that number, so that one sum over all of them is right for any mixture of meshes: torch's own
    clipping refuses parameters of different meshes, as pipeline stages and experts have. Both are the same numbers
    everywhere, and stay on the device.
    """
    held: dict[int, list[Tensor]] = defaultdict(list)
    for parameter, copies in parameters:
        if (grad := settled(parameter)) is not None:
            held[copies].append(grad)
    total = torch.zeros((), dtype=torch.float64, device=place.device)
    for copies, grads in held.items():
        total += squared(grads) / copies
    return clipping(place.sum_on_device(total), scale, limit)


def squared(grads: list[Tensor]) -> Tensor:
    """The square of their norm. A CPU adds squares up one after the other in float32, and loses small ones in a large
    sum: 400 million numbers come out 7% short. So of large tensors it gets rows, added up in float64."""
    large = [grad for grad in grads if not grad.is_cuda and grad.numel() > CPU_MOST]
    others = [grad for grad in grads if grad.is_cuda or grad.numel() <= CPU_MOST]
    norms = [*([torch.stack(torch._foreach_norm(others))] if others else []), *map(_by_rows, large)]
    return torch.cat(norms).double().square().sum()


def _by_rows(grad: Tensor) -> Tensor:
    flat = grad.flatten()
    whole = len(flat) // CPU_ROW * CPU_ROW
    rows = torch.linalg.vector_norm(flat[:whole].view(-1, CPU_ROW), dim=1)
    return torch.cat([rows, torch.linalg.vector_norm(flat[whole:])[None]])


def clipping(total: Tensor, scale: float, limit: float | None) -> tuple[Tensor, Tensor]:
    """Norm and factor of gradients whose squares sum up to `total`."""
    norm = total.sqrt() * scale
    return norm, norm.new_tensor(scale) if limit is None else scale * (limit / (norm + TINY)).clamp(max=1.0)


def unless_finite(factor: Tensor, *numbers: Tensor) -> Tensor:
    """The factor, or NaN where one of these is not finite: an update by that changes nothing, and the device decides it
    before the host knows."""
    fine = torch.stack([n.double() for n in numbers]).isfinite().all()
    return torch.where(fine, factor, torch.nan)


def read_later(*numbers: Tensor) -> Callable[[], list[float]]:
    """Begins to bring numbers to the host; it waits for the device when it asks, for what was launched until here and
    for nothing that is launched meanwhile."""
    if not numbers[0].is_cuda:
        return lambda: [float(n) for n in numbers]
    there = torch.stack([n.double() for n in numbers])
    here = torch.empty_like(there, device="cpu", pin_memory=True)
    here.copy_(there, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record()

    def read() -> list[float]:
        arrived.synchronize()
        return [float(n) for n in here]

    return read


def multiply(parameters: Iterable[Tensor], factor: Tensor) -> None:
    """This process's part of the gradients, in place; after `norm_and_factor`, which has settled them."""
    grads = [local(p.grad) for p in parameters if p.grad is not None]
    if grads:
        torch._foreach_mul_(grads, factor.to(grads[0].dtype))


def local(tensor: Tensor) -> Tensor:
    """This process's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def copies_of(parameter: Tensor, peers: int) -> int:
    """How many of `peers` processes (those of one pipeline stage) hold the same part of a parameter."""
    if not isinstance(parameter, DTensor):
        return peers
    mesh = parameter.device_mesh
    parts = 1
    for dim, placement in enumerate(parameter.placements):
        parts *= 1 if placement.is_replicate() else mesh.size(dim)
    return peers // parts


def settled(parameter: nn.Parameter) -> Tensor | None:
    """This process's part of a gradient. Tensor parallelism may leave it as a partial sum on each process."""
    grad = parameter.grad
    if grad is None or not isinstance(grad, DTensor):
        return grad
    assert isinstance(parameter, DTensor)
    if grad.placements != parameter.placements:
        grad = parameter.grad = grad.redistribute(placements=parameter.placements)
    return grad.to_local()
