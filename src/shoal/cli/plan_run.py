"""`shoal plan RUN.yaml`: the best layouts, what they cost, why the first one wins and what would change that."""

from __future__ import annotations

import argparse
import json
from typing import Any

from shoal.cli.plan_shared import (
    Target,
    as_json,
    counts,
    figure,
    lasting,
    layouts,
    names,
    one,
    priced,
    prices,
    ranged,
    target,
    wanted,
)
from shoal.errors import UsageError
from shoal.observe.words import count, size
from shoal.plan.asked import Asked
from shoal.plan.explain import CALLED, against, changes, words
from shoal.plan.failures import preset
from shoal.plan.restarts import style
from shoal.plan.verdict import Verdict, verdict


def run(args: argparse.Namespace) -> int:
    if args.top < 1:
        raise UsageError(f"--top {args.top}: at least one layout has to be shown.")
    if args.chart:
        raise UsageError("--chart draws what `shoal plan compare RUN.yaml --on A,B` compares.")
    name, fabric = one(names(args.on), "--on"), one(names(args.fabric), "--fabric")
    devices, price = one(counts(args.devices), "--devices"), one(prices(args.price), "--price")
    rates, how = preset(args.rates), style(args.style)
    spec, shape = wanted(args)
    where = target(args, spec, name, fabric, devices)
    asked = where.asked(spec, shape)
    verdicts = [verdict(asked, where.device, found, rates, how, price) for found in layouts(asked, args.top)]
    if args.json:
        print(json.dumps(_as_json(asked, where, verdicts), indent=2))
    else:
        print("\n".join(_lines(asked, where, verdicts, price)))
    return 0


def _lines(asked: Asked, where: Target, verdicts: list[Verdict], price: float | None) -> list[str]:
    run, best = asked.run, verdicts[0]
    lines = [
        f"{run.name}: {count(asked.shape.params)} parameters, {run.train.batch:,} x {run.data.seq_len:,} tokens a "
        f"step, on {where.devices:,} {where.device.name} ({where.device.per_node} a node, {where.joined_by} between "
        "nodes)",
        "",
        f"layout  {'tokens/s a device':<25}  step s    MFU  memory GB  $/B tokens  what it is",
    ]
    for number, each in enumerate(verdicts, 1):
        speed, money = each.tokens_s.times(1 / asked.devices), each.usd_per_billion
        lines.append(
            f"{number:>6}  {ranged(speed):<25}  {figure(each.found.seconds):>6}  {each.mfu:>5.1%}  "
            f"{each.found.memory.total / 1e9:>9.1f}  {'unknown' if money is None else f'{money.expected:,.2f}':>10}  "
            f"{words(each.found.layout, each.found.recompute)}"
        )
    lines += ["", *_about(best), f"Price: {priced(where.device, price)}.", ""]
    if len(verdicts) > 1:
        lines.append(f"It is {against(best.found, verdicts[1].found)}")
    lines += [f"With {text}." for text in changes(asked, best.found)]
    return lines


def _about(best: Verdict) -> list[str]:
    found, good = best.found, best.goodput
    parts = sorted(((n, s / found.seconds) for n, s in found.parts.items()), key=lambda x: -x[1])
    shown = ", ".join(f"{CALLED[name]} {share:.0%}" for name, share in parts if share >= 0.01)
    m = found.memory
    memory = {"weights": m.weights, "optimizer": m.optimizer, "gradients": m.gradients, "gathered weights": m.gathered}
    memory |= {"activations": m.activations, "work space": m.working}
    held = ", ".join(f"{name} {size(part)}" for name, part in memory.items() if part > 0.005 * m.total)
    return [
        f"A step of layout 1: {shown}.",
        f"Its memory at its worst ({m.moment}): {held}; {size(found.budget)} may be filled.",
        f"MFU {best.mfu:.1%}, or {best.mfu_whole:.1%} if the masked half of attention is counted too.",
        f"Goodput {good}: {good.advice}.",
        f"The whole run: {lasting(best.days)}"
        + ("" if best.usd is None else f", ${ranged(best.usd)}")
        + (
            "."
            if best.kwh_per_billion is None
            else f", {ranged(best.kwh_per_billion)} kWh a billion tokens at nameplate power."
        ),
    ]


def _as_json(asked: Asked, where: Target, verdicts: list[Verdict]) -> dict[str, Any]:
    return {
        "run": asked.run.name,
        "parameters": asked.shape.params,
        "device": where.device.name,
        "devices": where.devices,
        "fabric": where.joined_by,
        "layouts": [as_json(each) for each in verdicts],
        "why": against(verdicts[0].found, verdicts[1].found) if len(verdicts) > 1 else None,
        "what_if": list(changes(asked, verdicts[0].found)),
    }
