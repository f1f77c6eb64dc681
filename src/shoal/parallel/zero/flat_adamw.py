"""torch's AdamW as ZeRO drives it: on flat pieces, group by group, by a factor that was found before."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

MOMENTS = ("exp_avg", "exp_avg_sq")


class FlatAdamW(torch.optim.AdamW):
    """`factor` scales and clips the gradient. None: no update, and DeepSpeed gets rid of the gradient as after one."""

    factor: Tensor | None = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # DeepSpeed has no closure
        if self.factor is None:
            return
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.mul_(self.factor.to(p.grad))
        super().step()

    def lay_out(self, masters: Iterable[Tensor]) -> None:
        """State of zeros: torch makes it at the first step, and a checkpoint needs it before, to be loaded into."""
        for master in masters:
            state = self.state[master]
            state["step"] = torch.zeros((), dtype=torch.float32, device=master.device)
            for key in MOMENTS:
                state[key] = torch.zeros_like(master, requires_grad=False)

    def set_step(self, step: int) -> None:
        for state in self.state.values():
            state["step"].fill_(step)
