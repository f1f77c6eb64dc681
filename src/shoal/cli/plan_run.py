"""`shoal plan RUN.yaml`: the best layouts, what they cost, why the first one wins and what would change that."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import Any

from shoal.cli.plan_shared import Target, target, wanted
from shoal.errors import SetupError, UsageError
from shoal.plan.explain import CALLED, against, changes, make_it_fit, words
from shoal.plan.failures import preset
from shoal.plan.restarts import style
from shoal.plan.search import Asked, search
from shoal.plan.verdict import Range, Verdict, verdict


def run(args: argparse.Namespace) -> int:
    if args.top < 1:
        raise UsageError(f"--top {args.top}: at least one layout has to be shown.")
    spec, shape = wanted(args)
    where = target(args, spec, args.on, args.fabric)
    asked = where.asked(spec, shape)
    found = search(asked, args.top)
    if not found:
        raise SetupError(
            f"no layout of {where.devices} devices is legal for this run: train.batch {spec.train.batch} and the mesh "
            "leave none; take a batch that divides by more of them, or leave values of the mesh open."
        )
    if not found[0].fits:
        raise SetupError(make_it_fit(asked, found[0]))
    rates, how = preset(args.rates), style(args.style)
    verdicts = [verdict(asked, where.device, one, rates, how, args.price) for one in found if one.fits]
    if args.json:
        print(json.dumps(_as_json(asked, where, verdicts), indent=2))
    else:
        print("\n".join(_lines(asked, where, verdicts)))
    return 0


def _lines(asked: Asked, where: Target, verdicts: list[Verdict]) -> list[str]:
    run, best = asked.run, verdicts[0]
    fabric = where.fabric.name if where.fabric else where.device.scale_out.fabric
    lines = [
        f"{run.name}: {asked.shape.params / 1e9:.3g}B parameters, {run.train.batch:,} x {run.data.seq_len:,} tokens a "
        f"step, on {where.devices:,} {where.device.name} ({where.device.per_node} a node, {fabric} between nodes)",
        "",
        "layout  tokens/s a device      step s   MFU    memory GB  $/B tokens  what it is",
    ]
    for number, one in enumerate(verdicts, 1):
        speed, money = one.tokens_s.times(1 / asked.devices), one.usd_per_billion
        lines.append(
            f"{number:>6}  {_range(speed):<21}  {one.found.seconds:>6.3g}  {one.mfu:>5.1%}  "
            f"{one.found.memory.total / 1e9:>9.1f}  {'unknown' if money is None else f'{money.expected:,.2f}':>10}  "
            f"{words(one.found.layout, one.found.recompute)}"
        )
    lines += ["", *_about(asked, best), ""]
    if len(verdicts) > 1:
        lines.append(f"It is {against(best.found, verdicts[1].found)}")
    lines += [f"With {text}." for text in changes(asked, best.found)]
    return lines


def _about(asked: Asked, best: Verdict) -> list[str]:
    found, good = best.found, best.goodput
    parts = sorted(((n, s / found.seconds) for n, s in found.parts.items()), key=lambda x: -x[1])
    shown = ", ".join(f"{CALLED[name]} {share:.0%}" for name, share in parts if share >= 0.01)
    m = found.memory
    memory = {"weights": m.weights, "optimizer": m.optimizer, "gradients": m.gradients, "gathered weights": m.gathered}
    memory |= {"activations": m.activations, "work space": m.working}
    held = ", ".join(f"{name} {size / 1e9:.1f}" for name, size in memory.items() if size > 5e7)
    return [
        f"A step of layout 1: {shown}.",
        f"Its memory in GB, at its worst ({m.moment}): {held}; {found.budget / 1e9:.0f} may be filled.",
        f"MFU {best.mfu:.1%}, or {best.mfu_whole:.1%} if the masked half of attention is counted too.",
        f"Goodput {good}: {good.advice}",
        f"The whole run: {_range(best.days)} days"
        + ("" if best.usd is None else f", ${_range(best.usd)}")
        + (
            "."
            if best.kwh_per_billion is None
            else f", {_range(best.kwh_per_billion)} kWh a billion tokens at nameplate power."
        ),
    ]


def _range(r: Range) -> str:
    return f"{_figure(r.expected)} ({_figure(r.low)} to {_figure(r.high)})"


def _figure(x: float) -> str:
    return f"{x:,.0f}" if x >= 100 else f"{x:.3g}"


def _as_json(asked: Asked, where: Target, verdicts: list[Verdict]) -> dict[str, Any]:
    return {
        "run": asked.run.name,
        "parameters": asked.shape.params,
        "device": where.device.name,
        "devices": where.devices,
        "fabric": where.fabric.name if where.fabric else where.device.scale_out.fabric,
        "layouts": [_layout_json(one) for one in verdicts],
    }


def _layout_json(one: Verdict) -> dict[str, Any]:
    layout = one.found.layout
    return {
        "mesh": {
            **asdict(layout.sizes),
            "micro_batch": layout.micro_batch,
            "schedule": layout.schedule,
            "cp_method": layout.cp_method,
            "recompute": one.found.recompute,
        },
        "step_s": one.found.seconds,
        "parts_s": one.found.parts,
        "tokens_s": asdict(one.tokens_s),
        "mfu_causal": one.mfu,
        "mfu_whole": one.mfu_whole,
        "memory_bytes": {**asdict(one.found.memory), "total": one.found.memory.total},
        "goodput": {"expected": one.goodput.expected, "low": one.goodput.low, "high": one.goodput.high},
        "checkpoint_interval_s": one.goodput.interval_s,
        "days": asdict(one.days),
        "usd": None if one.usd is None else asdict(one.usd),
        "usd_per_billion_tokens": None if one.usd_per_billion is None else asdict(one.usd_per_billion),
        "kwh_per_billion_tokens": None if one.kwh_per_billion is None else asdict(one.kwh_per_billion),
    }
