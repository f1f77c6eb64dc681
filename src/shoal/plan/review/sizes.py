"""How far a run can grow: the sizes that are looked at where nobody names one, and what ends each axis."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from shoal.plan.asked import Asked
from shoal.plan.failures import FailureRate
from shoal.plan.restarts import Style
from shoal.plan.review.every_rule import Reviewed, review
from shoal.spec.mesh import Layout, Sizes, divisors
from shoal.spec.mesh.rules import FIXED
from shoal.spec.mixers import KINDS, widest_tp

SIZES = (8, 64, 512, 4096)
# Of a device's best speed, what has to be left.
LEFT = 0.5
# Axes that take what a size leaves: named for one size, they are open for the others.
TAKES_THE_REST = ("dp_replicate", "dp_shard")


def at_sizes(asked_on: Callable[[int], Asked], rates: FailureRate, style: Style) -> list[Reviewed]:
    """The run on each of SIZES, or as near as its islands can share. The batch stays as it is. Beyond the first size
    that is too large for it nobody would go, so what is wrong there is not looked for."""
    reviews: list[Reviewed] = []
    for size in SIZES:
        asked = asked_on(size)
        islands, machine = asked.run.fleet.islands, asked.machine
        if islands == 1 and size < style.islands * machine.node:
            continue  # fewer than the way of coming back asks for
        mesh = asked.run.mesh.model_copy(update=dict.fromkeys(TAKES_THE_REST, "auto"))
        run, devices = asked.run.model_copy(update={"mesh": mesh}), max(1, size // islands) * islands
        asked = replace(asked, run=run, devices=devices)
        reviews.append(review(asked, rates, style, ask_rules=too_large(reviews) is None))
    return reviews


def too_large(reviews: Sequence[Reviewed]) -> tuple[int, int] | None:
    """The first size on which a device does less than half of what it does on some smaller one; and that one."""
    best: Reviewed | None = None
    for one in reviews:
        if one.works and best is not None and one.tokens_s < LEFT * best.tokens_s:
            return one.asked.devices, best.asked.devices
        if one.works and (best is None or one.tokens_s > best.tokens_s):
            best = one
    return None


def ends(asked: Asked) -> dict[str, str]:
    """Of each axis, how far it goes and what ends it."""
    shape, run, work = asked.shape, asked.run, replace(asked.work, processes=None)
    splits = [
        tp
        for tp in divisors(widest_tp(shape))
        if not any(True for rule in FIXED for _ in rule(Layout(Sizes(tp=tp)), work))
    ]
    dealt = {name.removeprefix("model."): n for kind in shape.mixers for name, n in KINDS[kind].widths(shape).items()}
    widths = ", ".join(
        f"{k} {n}" for k, n in (dealt | {"ffn_dim": shape.ffn_dim, "vocab_size": shape.vocab_size}).items()
    )
    whole = [kind for kind in shape.mixers if not KINDS[kind].SHARES_SEQUENCES]
    found = {
        "tp": f"{splits[-1]} ({widths})",
        "pp": f"{shape.layers} (layers)",
        "data parallelism": f"{work.batch:,} (train.batch)",
        "cp": f"1 (model.{whole[0]})" if whole else f"{run.data.seq_len // 2:,} (data.seq_len {run.data.seq_len:,})",
    }
    if asked.precision == "fp8":
        found["tp"] = "1 (train.precision fp8)"
    if shape.experts is not None:
        found["ep"] = f"{shape.experts.count} (experts)"
    return found
