"""After each step of a mixture of experts: the loads of all processes are summed, biases nudged, and both told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shoal.model import moe
from shoal.observe import router
from shoal.parallel.laid import Laid


def forget(model: Laid) -> None:
    """The step is not taken: what its batch has counted is of no use."""
    moe.forget_loads(model.decoders)


def balance(model: Laid, step: int, tell: Callable[..., None]) -> dict[str, Any]:
    """Fields for the record of the `step`-th step, counted from 1; nothing for a dense model. Collective."""
    experts = model.shape.experts
    if experts is None:
        return {}
    place, ep = model.place, model.place.sizes.ep
    loads = place.sum_on_device(moe.loads(model.decoders))  # [sparse layers, experts]
    if router.due(step):
        peers = place.world // place.sizes.pp  # each of them holds the same biases
        biases = place.sum_on_device(moe.biases(model.decoders)) / peers
        squares = place.sum_on_device(moe.squares(model.decoders))
        record = router.record(step, loads.cpu(), biases.cpu(), ep, first_layer=experts.dense_layers)
        per_token = squares[:, 0] * experts.top_k / loads.sum(1)
        tell("router", **record, z=[round(float(z), 4) for z in per_token])
    moe.apply_loads(model.decoders, loads)
    return router.step_fields(loads.cpu(), ep)
