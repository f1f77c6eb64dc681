"""Own losses: what they are given, and how they take the place of cross-entropy on every layout.

An objective turns the logits of some rows and their targets into one number, a sum. Sums add up over micro-batches and
processes whatever the layout, and the update divides by `count` of the whole batch, which is known before anything is
computed. The logits are whole: an own loss takes the memory that Shoal's own spares by going over them in chunks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shoal.data.windows import Batch
from shoal.errors import SpecError
from shoal.model.head import NO_TARGET, Head

Loss = Callable[[Tensor, Tensor], Tensor]


class Objective:
    """A loss with settings or state of its own; a plain function of (logits, targets) does for less."""

    per_token: bool = False
    """Each token's loss depends on its own logits alone: then it may be computed on a part of a row (mesh.cp)."""

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The sum over the targets [batch, seq] that are not -100, of logits [batch, seq, vocab] in float32."""
        raise NotImplementedError

    def count(self, batch: Batch) -> float:
        """What the sum is divided by, of these samples."""
        return batch.target_count


class _Function(Objective):
    def __init__(self, function: Loss) -> None:
        self._function, self.per_token = function, bool(getattr(function, "per_token", False))

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        return self._function(logits, targets)


def objective_of(named: Any, run: Any) -> Objective | None:
    """What `own.objective` names, ready: a class is made with the run."""
    if named is None:
        return None
    made = named(run) if isinstance(named, type) else named
    return made if isinstance(made, Objective) else _Function(made)


def install(head: Head, objective: Objective) -> None:
    head.loss = partial(_loss, head, objective)


def _loss(head: Head, objective: Objective, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    logits = head.logits(hidden, weight)
    with torch.autocast(logits.device.type, enabled=False):
        return checked(objective.loss(logits.float(), targets))


def checked(found: Any) -> Tensor:
    """What an own loss gave, if it is one number that a gradient comes from."""
    if not isinstance(found, Tensor) or found.ndim or not found.is_floating_point():
        what = f"a tensor of shape {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
        raise SpecError(f"own.objective gave {what}; it must give one number, the sum over all targets.")
    if torch.is_grad_enabled() and not found.requires_grad:
        raise SpecError("own.objective gave a number without a gradient: compute it from the logits, in torch.")
    return found


__all__ = ["NO_TARGET", "Objective", "checked", "install", "objective_of"]
