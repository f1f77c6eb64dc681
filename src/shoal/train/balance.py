"""After each step of a mixture of experts: the loads of all processes are summed, biases nudged, and both told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shoal.model import loads as tables
from shoal.observe import router
from shoal.parallel.laid import Laid


def forget(model: Laid) -> None:
    """The step is not taken: what its batch has counted is of no use."""
    tables.forget_loads(model.decoders)


@dataclass(frozen=True)
class Counts:
    """What a batch, or a part of one, has done to the experts."""

    loads: Tensor  # [sparse layers, experts]; float64, as whole numbers are exact in it
    squares: Tensor | None  # [sparse layers, 1], of the router's logits, where they are to be told

    def __add__(self, other: Counts) -> Counts:
        both = self.squares is not None and other.squares is not None
        return Counts(self.loads + other.loads, self.squares + other.squares if both else None)  # type: ignore[operator]

    def said(self) -> dict[str, Any]:
        """As JSON."""
        return {"loads": self.loads.tolist(), "squares": None if self.squares is None else self.squares.tolist()}

    @staticmethod
    def of(said: dict[str, Any]) -> Counts:
        squares = said["squares"]
        return Counts(_table(said["loads"]), None if squares is None else _table(squares))


def _table(rows: list[list[float]]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def counted(model: Laid, step: int) -> Counts | None:
    """What all processes have counted for the `step`-th step, from 1; None for a dense model. Collective."""
    if model.shape.experts is None:
        return None
    loads = model.place.sum_on_device(tables.loads(model.decoders))
    squares = model.place.sum_on_device(tables.squares(model.decoders)) if router.due(step) else None
    return Counts(loads, squares)


def nudge(model: Laid, step: int, counts: Counts, tell: Callable[..., None]) -> dict[str, Any]:
    """Moves the biases by what the whole batch has counted; fields for the record of the step. Collective."""
    experts, place, loads = model.shape.experts, model.place, counts.loads
    assert experts is not None
    ep = place.sizes.ep
    if counts.squares is not None:
        peers = place.world // place.sizes.pp  # each of them holds the same biases
        biases = place.sum_on_device(tables.biases(model.decoders)) / peers
        record = router.record(step, loads.cpu(), biases.cpu(), ep, first_layer=experts.dense_layers)
        per_token = counts.squares[:, 0] * experts.top_k / loads.sum(1)
        tell("router", **record, z=[round(float(z), 4) for z in per_token])
    tables.apply_loads(model.decoders, loads)
    return router.step_fields(loads.cpu(), ep)


def balance(model: Laid, step: int, tell: Callable[..., None]) -> dict[str, Any]:
    """Fields for the record of the `step`-th step, counted from 1; nothing for a dense model. Collective."""
    counts = counted(model, step)
    return {} if counts is None else nudge(model, step, counts, tell)
