"""How evenly a router spreads tokens over its experts, as the journal tells it.

Every step record gets two or three numbers; a `router` record of its own, every fifty steps, has them layer by layer:
a run of a million steps must not be mostly about its router. Loads are tokens (a token counts once for each of its
top_k experts), summed over the whole batch of the step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # nothing in observe imports torch when it is imported; tensors bring their methods with them
    from torch import Tensor

    from shoal.observe.steps import Steps

EVERY = 50  # steps between two `router` records
MOST_LOADS = 256  # numbers: a record carries the load of each expert only when there are at most so many
STEP_METRICS = ("expert_imbalance", "expert_dead", "ep_imbalance")  # what `step_fields` may give, for the trackers


def step_fields(loads: Tensor, ep: int = 1) -> dict[str, float]:
    """What the step record gets. loads [sparse layers, experts]; nothing for a model without experts."""
    if loads.numel() == 0:
        return {}
    loads = loads.double()
    fields = {"expert_imbalance": _imbalance(loads).max(), "expert_dead": _dead(loads).mean()}
    if ep > 1:
        fields["ep_imbalance"] = _imbalance(_by_process(loads, ep)).max()
    return {key: round(float(value), 4) for key, value in fields.items()}


def due(step: int) -> bool:
    """Whether the `step`-th step, counted from 1, is followed by a `router` record."""
    return step == 1 or step % EVERY == 0


def record(step: int, loads: Tensor, biases: Tensor | None = None, ep: int = 1, first_layer: int = 0) -> dict[str, Any]:
    """The fields of a `router` record; loads and biases [sparse layers, experts], the first being layer `first_layer`.

    Lists have one number a layer. `imbalance` is the busiest expert's load over the mean (1.0 is even, the number of
    experts is everything to one), `entropy` that of the loads over its largest possible value, `dead` the share of
    experts that saw no token, `bias_range` how far apart balancing has pushed the experts, `ep_imbalance` the load of
    the busiest of the `ep` processes that share a layer over their mean: what the others wait for.
    """
    loads = loads.double()
    imbalance, dead = _imbalance(loads), _dead(loads)
    fields: dict[str, Any] = {
        "step": step,
        "experts": loads.shape[1],
        "first_layer": first_layer,
        "imbalance_max": round(float(imbalance.max()), 4),
        "imbalance_mean": round(float(imbalance.mean()), 4),
        "dead_share": round(float(dead.mean()), 4),
        "imbalance": _rounded(imbalance),
        "entropy": _rounded(_entropy(loads)),
        "dead": _rounded(dead),
    }
    if biases is not None:
        fields["bias_range"] = _rounded(biases.double().amax(1) - biases.double().amin(1))
    if ep > 1:
        by_process = _imbalance(_by_process(loads, ep))
        fields |= {
            "ep": ep,
            "ep_imbalance_max": round(float(by_process.max()), 4),
            "ep_imbalance": _rounded(by_process),
        }
    if loads.numel() <= MOST_LOADS:
        fields["loads"] = [[int(n) for n in layer] for layer in loads.tolist()]
    return fields


def lines(record: Mapping[str, Any] | None, steps: Steps | None = None) -> list[str]:
    """For a report: the newest `router` record, and what the step records say of the worst step and the last."""
    told = []
    if steps is not None and steps.told.has("expert_imbalance") and steps.told.has("expert_dead"):
        told += _of_steps(steps)
    if record is not None:
        where = record["first_layer"] + record["imbalance"].index(max(record["imbalance"]))
        told.append(
            f"{'' if told else 'experts':<12}at step {record['step']} {record['imbalance_mean']:.2f}x the mean load "
            f"over all layers; layer {where} is the worst"
        )
        if "ep" in record and "ep_imbalance_max" in record:
            told.append(
                f"            and the busiest of {record['ep']} processes {record['ep_imbalance_max']:.2f}x their mean"
            )
    return told


def _of_steps(steps: Steps) -> list[str]:
    import numpy as np

    imbalance, dead = steps.column("expert_imbalance"), steps.column("expert_dead")
    counted = np.flatnonzero(~np.isnan(imbalance) & ~np.isnan(dead))
    if not counted.size:
        return []
    fewest = counted[dead[counted] == dead[counted].max()]  # experts at work
    last, worst = int(counted[-1]), int(fewest[imbalance[fewest].argmax()])

    def tell(i: int) -> str:
        named = {"expert_imbalance": imbalance, "expert_dead": dead, "step": steps.column("step")}
        return _step({name: values[i].item() for name, values in named.items()})

    return [f"experts     {tell(last)}" + (f"; at worst {tell(worst)}" if worst != last else "")]


def _step(record: Mapping[str, Any]) -> str:
    return (
        f"the busiest has {record['expert_imbalance']:.2f}x the mean load of its layer, "
        f"{100 * record['expert_dead']:.1f}% have no token at step {record['step']}"
    )


def _imbalance(loads: Tensor) -> Tensor:
    """Largest over mean, [layers]; 0 for a layer that saw no token at all."""
    return loads.amax(1) / loads.mean(1).clamp(min=1e-12)


def _dead(loads: Tensor) -> Tensor:
    return (loads == 0).double().mean(1)  # [layers]


def _entropy(loads: Tensor) -> Tensor:
    shares = loads / loads.sum(1, keepdim=True).clamp(min=1e-12)
    full = shares.new_full((), float(loads.shape[1])).log()
    return -(shares * shares.clamp(min=1e-300).log()).sum(1) / full  # [layers]; 0 log 0 is 0


def _by_process(loads: Tensor, ep: int) -> Tensor:
    """Expert parallelism gives each process a run of neighbouring experts. [layers, ep]"""
    return loads.unflatten(1, (ep, -1)).sum(2)


def _rounded(values: Tensor) -> list[float]:
    return [round(value, 4) + 0.0 for value in values.tolist()]  # + 0.0: never -0.0
