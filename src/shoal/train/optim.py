"""Optimizers with their state laid out from the start, so that a fresh run and a resumed one take the same path."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shoal import kernels
from shoal.kernels.rounding import Spot
from shoal.model.init import local_box
from shoal.parallel.clip import local, multiply
from shoal.spec.run import Optimizer as Spec
from shoal.train.muon import Muon

ENDS = ("embed.weight", "head.weight")


class Optimizers:
    """AdamW alone, or Muon for the matrices of the blocks and AdamW for the rest; one thing to the loop."""

    def __init__(self, spec: Spec, named: Iterable[tuple[str, nn.Parameter]], seed: int = 0) -> None:
        """`seed`: of the run, for what is rounded at random."""
        self._names: dict[torch.Tensor, str] = {p: name for name, p in named if p.requires_grad}
        matrices_by_muon: list[torch.Tensor] = []
        rest: list[torch.Tensor] = []
        for p, name in self._names.items():
            # A router and a convolution of single channels are no matrices that turn one token into another.
            other = ".router." in name or "_conv." in name
            by_muon = spec.name == "muon" and name.startswith("blocks.") and p.ndim >= 2 and not other
            (matrices_by_muon if by_muon else rest).append(p)
        # A fused update takes parameters of one mesh; stages, experts and plain tensors are not on the same one.
        groups: dict[tuple[object, float], list[torch.Tensor]] = defaultdict(list)
        for p in rest:
            mesh = p.device_mesh if isinstance(p, DTensor) else None
            groups[mesh, decay_of(spec, self._names[p], p.ndim)].append(p)
        self.parts: list[torch.optim.Optimizer] = [
            torch.optim.AdamW(
                [{"params": ps, "weight_decay": decay} for (_, decay), ps in groups.items()],
                lr=spec.lr,
                betas=spec.betas,
                eps=spec.eps,
                fused=True,
            )
        ]
        muon_lr, matched = (spec.lr, True) if spec.muon_lr == "auto" else (spec.muon_lr, False)
        if matrices_by_muon:
            decay = spec.weight_decay if spec.muon_weight_decay is None else spec.muon_weight_decay
            self.parts.append(Muon(matrices_by_muon, muon_lr, spec.muon_momentum, decay, matched))
        self._peaks = [spec.lr, muon_lr]
        self.taken = 0
        self._narrow = spec.moments == "bf16"
        for part in self.parts:
            _lay_out_state(part, torch.bfloat16 if self._narrow else torch.float32)
        narrow = rest if self._narrow else []
        self._spots = {p: Spot.of(seed, self._names[p], p.shape, local_box(p)[1]) for p in narrow}

    @property
    def skips_by_itself(self) -> bool:
        """Whether a factor that is NaN leaves everything as it is, and nobody waits for a device to know it."""
        on_host = not any(p.is_cuda for p in self._names)
        return len(self.parts) == 1 and (kernels.fit(self._names) or (self._narrow and on_host))

    def step(self, ratio: float, factor: torch.Tensor) -> float:
        """One update by `factor` times the gradients at `ratio` of the peak learning rate; returns AdamW's rate."""
        self.taken += 1
        for part, peak in zip(self.parts, self._peaks, strict=False):
            for group in part.param_groups:
                group["lr"] = peak * ratio
            if isinstance(part, torch.optim.AdamW) and (self._narrow or kernels.fit(self._names)):
                self._in_one_pass(part, factor)
            else:
                multiply((p for group in part.param_groups for p in group["params"]), factor)
                part.step()
            part.zero_grad(set_to_none=True)
        return self._peaks[0] * ratio

    def _in_one_pass(self, part: torch.optim.Optimizer, factor: torch.Tensor) -> None:
        if kernels.fit(self._names):
            from shoal.kernels.adamw import adamw_all_
        else:
            from shoal.train.adamw import adamw_all_
        factor = factor.float()
        for group in part.param_groups:
            about = {key: group[key] for key in ("lr", "betas", "eps", "weight_decay")}
            rows, spots = [], []
            for p in group["params"]:
                if p.grad is not None:
                    tensors = p.detach(), p.grad, part.state[p]["exp_avg"], part.state[p]["exp_avg_sq"]
                    rows.append((local(tensors[0]), local(tensors[1]), local(tensors[2]), local(tensors[3])))
                    spots += [self._spots[p]] if self._narrow else []
            adamw_all_(rows, factor, spots, step=self.taken, **about)

    def begin(self) -> None:
        """The state of a run that has taken no step."""
        for tensor in self.tensors().values():
            tensor.zero_()
        self.set_step(0)

    def forget(self, taken: int | None = None) -> None:
        """The step is not taken: its gradients are of no use. `taken`: so many are, if it was counted already."""
        self.taken = self.taken if taken is None else taken
        for part in self.parts:
            part.zero_grad(set_to_none=True)

    def tensors(self) -> dict[str, torch.Tensor]:
        """The state that a checkpoint holds, by the name of its parameter; filled in place on resume."""
        return {f"optim.{self._names[p]}.{key}": t for p, key, t in self._state() if key != "step"}

    def taken_in(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """What was restored into `tensors`, which are the state itself here. Collective."""

    def owners(self) -> dict[str, str]:
        """Each name of `tensors` to the name of its parameter."""
        return {f"optim.{self._names[p]}.{key}": self._names[p] for p, key, _ in self._state() if key != "step"}

    def without(self) -> list[str]:
        """Parameters that have no state, as none has moved them yet; `tensors` has zeros for them."""
        return []

    def forget_state(self, names: object) -> None:
        """Of parameters that had none when it was saved."""

    def set_step(self, step: int) -> None:
        """AdamW's own step counts, which are the run's committed steps."""
        self.taken = step
        for _, key, t in self._state():
            if key == "step":
                t.fill_(step)

    def _state(self) -> Iterator[tuple[torch.Tensor, str, torch.Tensor]]:
        for part in self.parts:
            for p, state in part.state.items():
                yield from ((p, key, t) for key, t in _tensors(state))


def decay_of(spec: Spec, name: str, dims: int) -> float:
    """Of a parameter of AdamW's. Norms and biases have no scale to decay."""
    if dims < 2 or (name in ENDS and not spec.decay_embeddings):
        return 0.0
    return spec.weight_decay


def _tensors(state: Mapping[str, object]) -> Iterator[tuple[str, torch.Tensor]]:
    return ((key, t) for key, t in state.items() if isinstance(t, torch.Tensor))


def _lay_out_state(optimizer: torch.optim.Optimizer, moments: torch.dtype) -> None:
    """torch creates state at the first step; a checkpoint needs it before, to be loaded into."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            state = optimizer.state[p]
            if isinstance(optimizer, Muon):
                state["momentum"] = torch.zeros_like(p)
            else:
                state["step"] = torch.zeros((), dtype=torch.float32, device=p.device)
                state["exp_avg"] = torch.zeros_like(p, dtype=moments)
                state["exp_avg_sq"] = torch.zeros_like(p, dtype=moments)
