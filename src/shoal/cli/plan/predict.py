"""`shoal plan RUN.yaml`: the best layouts, what they cost, why the first one wins and what would change that."""

from __future__ import annotations

import argparse
import json
from typing import Any

from shoal.cli.plan.shared import (
    Target,
    as_json,
    coming_back,
    counts,
    failing,
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
from shoal.plan.asked import Asked
from shoal.plan.documents import WHOLE
from shoal.plan.explain import CALLED, against, changes, words
from shoal.plan.island_costs import shards
from shoal.plan.verdict import Verdict, verdict
from shoal.readable import count, short, size
from shoal.spec.hf.folder import notes_of


def run(args: argparse.Namespace) -> int:
    top = 5 if args.top is None else args.top
    if top < 1:
        raise UsageError(f"--top {top}: at least one layout has to be shown.")
    name, fabric = one(names(args.on), "--on"), one(names(args.fabric), "--fabric")
    devices, price = one(counts(args.devices), "--devices"), one(prices(args.price), "--price")
    spec, shape = wanted(args)
    rates, how = failing(args, spec), coming_back(args, spec)
    where, price = target(args, spec, name, fabric, devices), price or spec.plan.price
    asked = where.asked(spec, shape)
    verdicts = [verdict(asked, where.device, found, rates, how, price) for found in layouts(asked, top)]
    if args.json:
        print(json.dumps(_as_json(asked, where, verdicts), indent=2))
    else:
        print("\n".join(_lines(asked, where, verdicts, price)))
    return 0


def _lines(asked: Asked, where: Target, verdicts: list[Verdict], price: float | None) -> list[str]:
    run, best, islands = asked.run, verdicts[0], asked.run.fleet.islands
    lines = [
        f"{run.name}: {count(asked.shape.params)} parameters, {run.train.batch:,} x {run.data.seq_len:,} tokens a "
        f"step in {asked.precision}, on {where.words}" + f", {islands} islands of {asked.island:,}" * (islands > 1),
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
    lines += [
        "",
        *_about(best),
        _documents(asked),
        *(f"Weights: {text}" for text in notes_of(asked.run.model.weights)),
        *_islands(asked, where, best),
        f"Price: {priced(where.device, price)}.",
        "",
    ]
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
        f"MFU {best.mfu:.1%}, or {best.mfu_whole:.1%} if all of attention's square is counted, computed or not.",
        f"Goodput {good}: {good.advice}.",
        f"The whole run: {lasting(best.days)}"
        + ("" if best.usd is None else f", ${ranged(best.usd)}")
        + (
            "."
            if best.kwh_per_billion is None
            else f", {ranged(best.kwh_per_billion)} kWh a billion tokens at nameplate power."
        ),
    ]


def _documents(asked: Asked) -> str:
    """What attention has to do, and how that is known."""
    seen, half, shape = asked.seen, asked.run.data.seq_len / 2, asked.shape
    attending = shape.attending_layers
    if not attending:
        return "Attention: no layer has any."
    all_layers = shape.layers / attending  # the counts are means over all layers
    if seen.basis == WHOLE:
        return f"Attention: {WHOLE}, in which a token sees {seen.seen * all_layers:,.0f} tokens on average."
    sees = f"{seen.seen * all_layers:,.0f}"
    text = f"Attention: a token sees {sees} tokens on average ({seen.basis}), not a window's {half:,.0f}"
    if asked.computed is None:
        return f"{text}; a mask tells documents apart here, and what lies between them is computed all the same."
    return f"{text}; the kernel computes {seen.computed * all_layers:,.0f}, whole blocks where documents begin and end."


def _islands(asked: Asked, where: Target, best: Verdict) -> list[str]:
    """What goes between them, and how long a step waits for it."""
    islands, found = asked.run.fleet.islands, best.found
    if islands == 1:
        return []
    way = "inside a node" if where.devices <= asked.machine.node else f"over {where.joined_by}"
    return [
        f"Islands: of {shards(asked.run)} shards of a batch each computes its part; then a device sends "
        f"{size(found.traded_bytes)} (an island {size(found.traded_bytes * asked.island)}) to the others, by TCP from "
        f"the host's memory {way}, which takes {short(found.parts['islands'])} of each step of "
        f"{short(found.seconds)}; nothing hides it."
    ]


def _as_json(asked: Asked, where: Target, verdicts: list[Verdict]) -> dict[str, Any]:
    return {
        "run": asked.run.name,
        "parameters": asked.shape.params,
        "device": where.device.name,
        "devices": where.devices,
        "islands": asked.run.fleet.islands,
        "precision": asked.precision,
        "documents": asked.seen.as_json(),
        "notes": notes_of(asked.run.model.weights),
        "fabric": where.joined_by,
        "layouts": [as_json(each) for each in verdicts],
        "why": against(verdicts[0].found, verdicts[1].found) if len(verdicts) > 1 else None,
        "what_if": list(changes(asked, verdicts[0].found)),
    }
