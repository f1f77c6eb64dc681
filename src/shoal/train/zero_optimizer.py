"""AdamW whose state ZeRO keeps, as the step and checkpoints need it: by the names of whole parameters."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from shoal.parallel.zero.flat_adamw import MOMENTS, FlatAdamW
from shoal.parallel.zero.laid import ZeroLaid
from shoal.parallel.zero.shares import gather, spread
from shoal.spec.run import Optimizer as Spec
from shoal.train.optim import Optimizers, decay_of


class ZeroOptimizer(Optimizers):
    def __init__(self, spec: Spec, model: ZeroLaid, seed: int) -> None:
        self._model, self._peak, self.taken = model, spec.lr, 0
        self._parameters: dict[str, nn.Parameter] = dict(model.named_parameters())
        groups: dict[float, list[Tensor]] = {}
        for name, p in self._parameters.items():
            groups.setdefault(decay_of(spec, name, len(model.shapes[name])), []).append(p)
        self._adamw = FlatAdamW(
            [{"params": ps, "weight_decay": decay} for decay, ps in groups.items()],
            lr=spec.lr,
            betas=spec.betas,
            eps=spec.eps,
            fused=True,
        )
        self.parts = [self._adamw]
        model.zero.begin(model.module, self._adamw)
        model.begin(seed)

    @property
    def skips_by_itself(self) -> bool:
        return False

    def step(self, ratio: float, factor: Tensor) -> float:
        self.taken += 1
        rate = self._peak * ratio
        for group in self._adamw.param_groups:
            group["lr"] = rate
        self._adamw.factor = factor
        self._model.zero.step()
        return rate

    def begin(self) -> None:
        for state in self._adamw.state.values():
            for key in MOMENTS:
                state[key].zero_()
        self.set_step(0)

    def forget(self, taken: int | None = None) -> None:
        self.taken = self.taken if taken is None else taken
        self._adamw.factor = None
        self._model.zero.step()

    def tensors(self) -> dict[str, Tensor]:
        """This process's share. Collective."""
        return {f"optim.{name}.{key}": t for key in MOMENTS for name, t in self._share(key).items()}

    def owners(self) -> dict[str, str]:
        return {f"optim.{name}.{key}": name for name in self._parameters for key in MOMENTS}

    def taken_in(self, tensors: Mapping[str, Tensor]) -> None:
        for key in MOMENTS:
            self._put(key, tensors)

    def _share(self, key: str) -> dict[str, Tensor]:
        model = self._model
        return gather(model.owners, model.place, lambda name: model.zero.moment(self._parameters[name], key))

    def _put(self, key: str, tensors: Mapping[str, Tensor]) -> None:
        model = self._model
        mine = {n: tensors[f"optim.{n}.{key}"] for n, owner in model.owners.items() if owner == model.place.rank}

        def put(name: str, whole: Tensor) -> None:
            model.zero.set_moment(self._parameters[name], key, whole)

        spread(model.owners, model.shapes, model.place, mine, put)

    def set_step(self, step: int) -> None:
        self.taken = step
        self._adamw.set_step(step)
