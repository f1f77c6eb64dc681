"""How far a run can grow: the sizes that are looked at where nobody names one, and what ends each axis."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from shoal.plan.asked import Asked
from shoal.plan.failures import FailureRate
from shoal.plan.restarts import Style
from shoal.plan.review.every_rule import Reviewed, review
from shoal.spec.mesh import Layout, Sizes, divisors
from shoal.spec.mesh_rules import FIXED

SIZES = (8, 64, 512, 4096)
# Axes that take what a size leaves: named for one size, they are open for the others.
TAKES_THE_REST = ("dp_replicate", "dp_shard")


def at_sizes(asked_on: Callable[[int], Asked], rates: FailureRate, style: Style) -> list[Reviewed]:
    """The run on each of SIZES that its islands can share. The batch stays as it is."""

    def on(devices: int) -> Asked:
        asked = asked_on(devices)
        mesh = asked.run.mesh.model_copy(update=dict.fromkeys(TAKES_THE_REST, "auto"))
        return replace(asked, run=asked.run.model_copy(update={"mesh": mesh}))

    islands = style.islands
    return [review(on(devices), rates, style) for devices in SIZES if devices % islands == 0]


def ends(asked: Asked) -> dict[str, str]:
    """Of each axis, how far it goes and what ends it."""
    shape, run, work = asked.shape, asked.run, replace(asked.work, processes=None)
    splits = [
        tp for tp in divisors(shape.heads) if not any(True for rule in FIXED for _ in rule(Layout(Sizes(tp=tp)), work))
    ]
    widths = f"heads {shape.heads}, kv_heads {shape.kv_heads}, ffn_dim {shape.ffn_dim}, vocab_size {shape.vocab_size}"
    found = {
        "tp": f"{splits[-1]} ({widths})",
        "pp": f"{shape.layers} (layers)",
        "data parallelism": f"{work.batch:,} (train.batch)",
        "cp": f"{run.data.seq_len // 2:,} (data.seq_len {run.data.seq_len:,})",
    }
    if asked.precision == "fp8":
        found["tp"] = "1 (train.precision fp8)"
    if shape.experts is not None:
        found["ep"] = f"{shape.experts.count} (experts)"
    return found
