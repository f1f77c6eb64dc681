"""Whether a net that is cut by the plan of its class still computes what the class does: found by trying.

A plan is somebody's claim about a class. A norm over all heads that sees its own, a weight whose gradient is a part on
each process and is taken for the whole, heads that a class counts by its config: none of these is an error, and AdamW
hides most of them for long. So the loss of a row and the norm of every parameter's gradient are taken of the net while
it is whole, and again when it is cut. Parts that begin at zero get numbers meanwhile, as nothing comes through them.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shoal.errors import SpecError
from shoal.model.init import local_box
from shoal.model.own_model import OwnModel
from shoal.model.packed import in_parts
from shoal.model.seen import SPREAD, STILL, quiet
from shoal.parallel.clip import copies_of, settled, squared

TOLERANCE = 1e-3  # a gradient that is not summed is off by a third at least; GPUs may convolve in fewer bits
UNSEEN = 1e-4  # of the largest norm: what is below is rounding, as of a key's bias, whose gradient is zero
TOKENS = 16


@dataclass(frozen=True)
class Tried:
    loss: float
    norms: dict[str, float]
    stirred: frozenset[str]  # parameters that stood still
    tokens: int


def whole(model: OwnModel, length: int) -> Tried:
    """Of a model that is whole and on the CPU, with rows of at most `length` tokens."""
    still = frozenset(
        name for name, p in model.named_parameters() if p.numel() and float(p.detach().abs().max()) < STILL
    )
    for stirred in (still, frozenset[str]()):  # what stood still for a reason may have no number elsewhere
        loss, norms = _numbers(model, stirred, min(length, TOKENS), None)
        if all(torch.tensor([loss, *norms.values()]).isfinite()):
            break
    return Tried(loss, norms, stirred, min(length, TOKENS))


def refuse_other(model: OwnModel, was: Tried, mesh: DeviceMesh, called: str) -> None:
    """Unless it computes the same now that it is cut over `mesh`. Collective."""
    try:
        loss, norms = _numbers(model, was.stirred, was.tokens, mesh)
    except (RuntimeError, ValueError, IndexError, TypeError, AttributeError, AssertionError) as e:
        words = str(e).strip().splitlines()[0][:200] if str(e).strip() else type(e).__name__
        raise SpecError(
            f"{called} cannot compute what its plan cuts over mesh.tp {mesh.size()} ({words}): take dp_shard."
        ) from e
    if not abs(loss - was.loss) <= TOLERANCE * abs(was.loss):
        raise SpecError(
            f"{called} computes something else when it is cut over mesh.tp {mesh.size()} by its own plan (a loss of "
            f"{loss:.6g}, and {was.loss:.6g} whole): take dp_shard."
        )
    unseen = UNSEEN * max(was.norms.values())
    wrong = {name: norm for name, norm in norms.items() if not abs(norm - was.norms[name]) <= max(
        TOLERANCE * was.norms[name], unseen)}  # fmt: skip
    if wrong:
        worst = max(wrong, key=lambda name: abs(wrong[name] - was.norms[name]))
        raise SpecError(
            f"{called} does not learn the same when it is cut over mesh.tp {mesh.size()} by its own plan: the gradient "
            f"of {worst} has norm {wrong[worst]:.4g}, and {was.norms[worst]:.4g} whole; take dp_shard."
        )


def _numbers(
    model: OwnModel, stirred: frozenset[str], length: int, mesh: DeviceMesh | None
) -> tuple[float, dict[str, float]]:
    """The loss of two rows, and every parameter's gradient norm. No gradient outlives its norm."""
    generator = torch.Generator().manual_seed(0)
    device = next(model.parameters()).device
    tokens = torch.randint(model.shape.vocab_size, (2, length + 1), generator=generator).to(device)
    names = {p: name for name, p in model.named_parameters() if p.requires_grad}
    squares = torch.zeros(len(names), dtype=torch.float64, device=device)
    places = {name: i for i, name in enumerate(names.values())}
    peers = 1 if mesh is None else mesh.size()

    def measure(p: Tensor) -> None:
        assert isinstance(p, nn.Parameter)
        grad = settled(p)
        if grad is not None:
            squares[places[names[p]]] = squared([grad]) / copies_of(p, peers)
        p.grad = None

    hooks = [p.register_post_accumulate_grad_hook(measure) for p in names]
    try:
        with quiet(model), _stirred(model, stirred), torch.enable_grad():
            loss = model(tokens[:, :-1], targets=tokens[:, 1:].contiguous())
            loss.backward()
    finally:
        for hook in hooks:
            hook.remove()
    if mesh is not None:
        dist.all_reduce(squares, group=mesh.get_group())
    return float(loss.detach()), dict(zip(names.values(), squares.sqrt().tolist(), strict=True))


@contextmanager
def _stirred(model: nn.Module, names: frozenset[str]) -> Iterator[None]:
    """These have numbers that depend on their names alone, whole or cut; as they were afterwards, to the bit."""
    with torch.no_grad():
        still = {name: p for name, p in model.named_parameters() if name in names}
        kept = {name: _local(p).clone() for name, p in still.items()}
        for name, p in still.items():
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            numbers = torch.empty(p.shape).normal_(std=SPREAD, generator=generator)
            _local(p).copy_(in_parts(numbers, p)[local_box(p)[1]])
    try:
        yield
    finally:
        with torch.no_grad():
            for name, p in still.items():
                _local(p).copy_(kept[name])


def _local(p: Tensor) -> Tensor:
    return p.to_local().detach() if isinstance(p, DTensor) else p.detach()
