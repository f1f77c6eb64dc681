"""Horovod's DistributedOptimizer: gradients are reduced over all ranks before a step.

They are reduced when the step is taken (or by `synchronize`), not during backward: that is the same sum, with
accumulation too, and there is no moment at which a gradient is half reduced. What it costs is the overlap of sending
and computing. As in Horovod, micro-batches are summed up, not averaged; a parameter without a gradient gets zeros.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from shoal.script.horovod.collectives import reducing
from shoal.script.horovod.compression import Compression, Compressor
from shoal.script.horovod.reduction import Average, How, Reduction
from shoal.script.horovod.world import size


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None = None,
    compression: Compressor = Compression.none,
    backward_passes_per_step: int = 1,
    op: Reduction = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    sparse_as_dense: bool = False,
) -> Any:
    """The optimizer itself, which from now on reduces first. Groups decide what travels together in Horovod, and do not
    change a value; nor does `backward_passes_per_step`, since nothing is reduced before the step."""
    if gradient_predivide_factor != 1.0 and op != Average:
        raise ValueError("gradient_predivide_factor not supported with op != Average")
    if backward_passes_per_step <= 0:
        raise ValueError("backward_passes_per_step must be > 0")
    how = How.asked(op, None, 1.0 / gradient_predivide_factor, gradient_predivide_factor)
    made: Any = optimizer
    made._shoal_horovod = Gradients(_names(optimizer, named_parameters), compression, how, sparse_as_dense)
    made.backward_passes_per_step = backward_passes_per_step
    # A schedule that was made before has put the step of the old class into the object.
    made.__dict__.pop("step", None)
    made.__class__ = type(type(optimizer).__name__, (_Distributed, type(optimizer)), {})
    return made


def _names(
    optimizer: torch.optim.Optimizer, named: Iterable[tuple[str, torch.nn.Parameter]] | None
) -> dict[torch.Tensor, str]:
    mine = [p for group in optimizer.param_groups for p in group["params"]]
    if named is None:
        return {p: f"parameter {i}" for i, p in enumerate(mine)}
    pairs = list(named)
    if any(not isinstance(pair, tuple) for pair in pairs):
        raise ValueError("named_parameters should be a sequence of tuples (name, parameter).")
    if len({name for name, _ in pairs}) < len(pairs):
        raise ValueError("Parameter names in named_parameters must be unique.")
    names = {p: name for name, p in pairs}
    if left := sum(p not in names for p in mine):
        raise ValueError(f"named_parameters was specified, but {left} of the optimizer's parameters were not named.")
    return {p: names[p] for p in mine}


class Gradients:
    """Of one optimizer: how they are reduced."""

    def __init__(self, names: dict[torch.Tensor, str], compression: Compressor, how: How, dense: bool) -> None:
        self._names, self._compression, self._how, self._dense = names, compression, how, dense
        self.reduced = False  # since the last step, by the script itself
        self.left_out = False  # the script has said so

    @torch.no_grad()
    def reduce(self, optimizer: torch.optim.Optimizer) -> None:
        if size() == 1:
            return
        moved = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        packed = [self._compression.compress(self._gradient(p)) for p in moved]
        reduced = reducing([t for t, _ in packed], self._how).result()
        for p, value, (_, about) in zip(moved, reduced, packed, strict=True):
            p.grad.copy_(self._compression.decompress(value, about))

    def _gradient(self, p: torch.Tensor) -> torch.Tensor:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        if p.grad.is_sparse:
            if not self._dense:
                name = self._names.get(p, "a parameter")
                raise ImportError(
                    f"the gradient of {name} is sparse, and Shoal's stand-in for Horovod reduces dense ones: give "
                    "DistributedOptimizer sparse_as_dense=True."
                )
            p.grad = p.grad.to_dense()
        return p.grad


class _Distributed(torch.optim.Optimizer):
    """In front of the optimizer's own class."""

    _shoal_horovod: Gradients

    def synchronize(self) -> None:
        self._shoal_horovod.reduce(self)
        self._shoal_horovod.reduced = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        self._shoal_horovod.left_out = True
        try:
            yield
        finally:
            self._shoal_horovod.left_out = False

    def set_backward_passes_per_step(self, passes: int) -> None:
        self.backward_passes_per_step = passes

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        gradients = self._shoal_horovod
        if gradients.left_out:
            gradients.reduced = False
            return super().step(closure)
        if closure is not None:
            return super().step(lambda: self._reduced_after(closure))
        if gradients.reduced:
            warnings.warn(
                "optimizer.step() reduces the gradients a second time after optimizer.synchronize(); put it into "
                "`with optimizer.skip_synchronize():`",
                stacklevel=2,
            )
        gradients.reduce(self)
        gradients.reduced = False
        return super().step()

    # Torch wraps the step of each class whose objects it loads, and would call its hooks twice: here and above.
    step.hooked = True  # type: ignore[attr-defined]  # as torch marks it

    def _reduced_after(self, closure: Callable[[], Any]) -> Any:
        loss = closure()
        self._shoal_horovod.reduce(self)
        return loss
