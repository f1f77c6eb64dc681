"""An optimizer that own code makes, as the step and checkpoints need it: its state laid out before the first step.

A checkpoint is loaded into tensors that are there, and torch's optimizers make theirs in the first step. So one step is
taken for its shapes alone, with gradients and rates of zero on weights that are put back; whatever it has left in the
state is thrown away where nothing is restored into it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shoal.errors import SpecError
from shoal.parallel.clip import multiply
from shoal.spec.run import Run
from shoal.train.optim import Optimizers

Make = Callable[[list[tuple[str, nn.Parameter]], Run], torch.optim.Optimizer]


class OwnOptimizer(Optimizers):
    def __init__(self, make: Make, named: Iterable[tuple[str, nn.Parameter]], run: Run) -> None:
        mine = [(name, p) for name, p in named if p.requires_grad]
        self._names = {p: name for name, p in mine}
        made: Any = make(mine, run)
        if not isinstance(made, torch.optim.Optimizer):
            raise SpecError(f"own.optimizer gave {type(made).__name__}; it must give a torch.optim.Optimizer.")
        held = {p for group in made.param_groups for p in group["params"]}
        if left := [name for p, name in self._names.items() if p not in held]:
            more = f" and {len(left) - 1} more" if len(left) > 1 else ""
            raise SpecError(f"own.optimizer leaves {left[0]}{more} out; give it all parameters that train.")
        self.parts = [made]
        self._rates = [float(group["lr"]) for group in made.param_groups]
        self.taken = 0
        self._like: dict[str, dict[str, Callable[[], torch.Tensor]]] = {}  # what each parameter's state is made like
        self._lay_out()

    @property
    def skips_by_itself(self) -> bool:
        return False

    def step(self, ratio: float, factor: torch.Tensor) -> float:
        self.taken += 1
        (part,) = self.parts
        for group, rate in zip(part.param_groups, self._rates, strict=True):
            group["lr"] = rate * ratio
        multiply((p for p in self._names if p.grad is not None), factor)
        part.step()
        part.zero_grad(set_to_none=True)
        return self._rates[0] * ratio

    def begin(self) -> None:
        (part,) = self.parts
        part.state.clear()
        self.taken = 0

    def tensors(self) -> dict[str, torch.Tensor]:
        if not self.parts[0].state:
            self._lay_out()
        return super().tensors() | {key: make() for name in self.without() for key, make in self._like[name].items()}

    def owners(self) -> dict[str, str]:
        if not self.parts[0].state:
            self._lay_out()
        return super().owners() | {key: name for name in self.without() for key in self._like[name]}

    def without(self) -> list[str]:
        held = self.parts[0].state
        return [name for p, name in self._names.items() if not held.get(p) and name in self._like]

    def forget_state(self, names: object) -> None:
        wanted = {name for name in names if isinstance(name, str)} if isinstance(names, list) else set()
        for p, name in self._names.items():
            if name in wanted:
                self.parts[0].state.pop(p, None)

    def set_step(self, step: int) -> None:
        super().set_step(step)
        for state in self.parts[0].state.values():
            if "step" in state and not isinstance(state["step"], torch.Tensor):
                state["step"] = step

    @torch.no_grad()
    def _lay_out(self) -> None:
        (part,) = self.parts
        kept = {p: p.detach().clone() for p in self._names}
        about = [_settings(group) for group in part.param_groups]
        for group in part.param_groups:
            group["lr"] = 0.0
        for p in self._names:
            p.grad = torch.zeros_like(p)
        part.step()
        part.zero_grad(set_to_none=True)
        for p, value in kept.items():
            p.copy_(value)
        for group, rate, before in zip(part.param_groups, self._rates, about, strict=True):
            group["lr"] = rate
            if changed := [key for key, value in _settings(group).items() if before.get(key) != value]:
                raise SpecError(
                    f"own.optimizer keeps `{changed[0]}` in its groups, where no checkpoint finds it; keep it in the "
                    "state of a parameter."
                )
        for p, name in self._names.items():
            for key, value in part.state.get(p, {}).items():
                self._can_be_saved(name, p, key, value)
                if isinstance(value, torch.Tensor) and key != "step":
                    self._like.setdefault(name, {})[f"optim.{name}.{key}"] = _zeros_as(value, p)

    def _can_be_saved(self, name: str, p: torch.Tensor, key: str, value: object) -> None:
        if isinstance(value, torch.Tensor):
            if isinstance(p, DTensor) and not isinstance(value, DTensor) and value.numel() > 1:
                raise SpecError(
                    f"own.optimizer keeps `{key}` of {name} as a tensor of this process alone, and the parameter is "
                    "shared by several: make it with torch.zeros_like(parameter), or set mesh.dp_shard and tp to 1."
                )
        elif not (key == "step" and isinstance(value, int | float)) and value is not None:
            raise SpecError(
                f"own.optimizer keeps `{key}` of {name} as {type(value).__name__}; a checkpoint holds tensors: use one."
            )


def _zeros_as(value: torch.Tensor, p: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Makes zeros of the same kind, and holds no tensor but the parameter."""
    if isinstance(value, DTensor):
        return partial(torch.zeros_like, p, dtype=value.dtype)
    return partial(torch.zeros, value.shape, dtype=value.dtype, device=value.device)


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "lr") and not callable(value)}
