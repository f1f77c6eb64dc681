"""`shoal plan review RUN.yaml`: what in it will be refused or will hurt at scale, before anything runs."""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

from shoal.cli.plan.shared import Target, coming_back, counts, failing, figure, is_here, names, one, target, wanted
from shoal.plan.explain import words
from shoal.plan.review.every_rule import LOOKED_AT, Reviewed, merged, review
from shoal.plan.review.finding import Finding, Severity
from shoal.plan.review.sizes import at_sizes, ends, too_large
from shoal.readable import count
from shoal.spec.mesh.rules import AXES
from shoal.spec.run import Run
from shoal.spec.shape import Shape

# What is looked at where no machine is named and this one has no accelerator.
USUAL = "h100"
HERE = "no machine is named, and this one has no accelerator"


def run(args: argparse.Namespace) -> int:
    name, fabric = one(names(args.on), "--on"), one(names(args.fabric), "--fabric")
    devices = one(counts(args.devices), "--devices")
    spec, shape = wanted(args)
    rates, style = failing(args, spec), coming_back(args, spec)
    where, note = target(args, spec, name, fabric, devices), ""
    sized = _sized(spec, devices)
    if is_here(where.device) and not (sized and where.devices <= len(os.sched_getaffinity(0))):
        where, note = target(args, spec, USUAL, fabric, devices), f" ({HERE})"
    if sized:
        reviews = [review(where.asked(spec, shape), rates, style)]
    else:
        reviews = at_sizes(lambda n: _of(where, n).asked(spec, shape), rates, style)
    findings = merged(reviews)
    if args.json:
        print(json.dumps(_as_json(spec, shape, where, reviews, findings), indent=2))
    else:
        print("\n".join(_lines(spec, shape, f"{_words(where, reviews)}{note}", reviews, findings)))
    codes = [finding.code for finding, _ in findings if finding.code]
    return min(codes, default=0)


def _sized(spec: Run, devices: int | None) -> bool:
    """Whether somebody says how many devices there are."""
    return not (devices is None and spec.plan.devices is None and spec.resources.processes == "auto")


def _of(where: Target, devices: int) -> Target:
    return Target(where.device, where.fabric, devices, where.workspace)


def _words(where: Target, reviews: list[Reviewed]) -> str:
    if len(reviews) == 1:
        return where.words
    return f"{where.device.name}, {where.device.per_node} per node, {where.joined_by} between nodes"


def _lines(
    spec: Run, shape: Shape, where: str, reviews: list[Reviewed], findings: list[tuple[Finding, list[int]]]
) -> list[str]:
    first = reviews[0]
    lines = [
        f"{spec.name}: {count(shape.params)} parameters, {spec.train.batch:,} x {spec.data.seq_len:,} tokens a step in "
        f"{first.asked.precision}, on {where}"
    ]
    if len(reviews) == 1:
        lines += [*_layout(spec, first), ""]
    else:
        lines += ["", *_table(reviews), "", _ends(first)]
        if large := too_large(reviews):
            lines.append(f"On {large[0]:,} devices each does less than half of what it does on {large[1]:,}.")
        lines.append("")
    if not findings:
        return [*lines, f"Nothing found. Looked at: {', '.join(LOOKED_AT)}."]
    for severity in Severity:
        some = [pair for pair in findings if pair[0].severity == severity]
        lines += [severity.words] * bool(some)
        for finding, seen in some:
            lines.append(f"  {_where(finding, seen, reviews)}{finding.what}")
            lines += [f"      change: {finding.change}"] * bool(finding.change)
        lines += [""] * bool(some)
    return lines[:-1]


def _layout(spec: Run, one: Reviewed) -> list[str]:
    if not one.works or one.found is None:
        return []
    named = [name for name in type(spec.mesh).model_fields if getattr(spec.mesh, name) != "auto"]
    whose = "the planner's choice, as the mesh is open"
    if named:
        some = "" if all(name in named for name in AXES) else f", which names {', '.join(named)}"
        whose = f"the mesh of the run file{some}"
    return [
        f"Layout: {words(one.found.layout, one.found.recompute)} ({whose}); {figure(one.found.seconds)} s per step, "
        f"{figure(one.tokens_s)} tokens/s per device, MFU {one.mfu:.1%}."
    ]


def _table(reviews: list[Reviewed]) -> list[str]:
    lines = ["devices  tokens/s per device    MFU  layout, or why there is none"]
    for each in reviews:
        devices = f"{each.asked.devices:>7,}"
        if each.works and each.found is not None:
            layout = words(each.found.layout, each.found.recompute)
            lines.append(f"{devices}  {figure(each.tokens_s):>19}  {each.mfu:>5.1%}  {layout}")
        else:
            lines.append(f"{devices}  {'-':>19}  {'-':>5}  {each.findings[0].what}")
    return lines


def _ends(first: Reviewed) -> str:
    return f"How far each axis goes: {'; '.join(f'{axis} {end}' for axis, end in ends(first.asked).items())}."


def _where(finding: Finding, seen: list[int], reviews: list[Reviewed]) -> str:
    """The number of devices that a sentence is about, and the first that it is true of."""
    if len(reviews) == 1:
        return ""
    first = "" if seen[0] == finding.devices else f" (from {seen[0]:,} on)"
    return f"on {finding.devices:,} devices{first}: "


def _as_json(
    spec: Run, shape: Shape, where: Target, reviews: list[Reviewed], findings: list[tuple[Finding, list[int]]]
) -> dict[str, Any]:
    return {
        "run": spec.name,
        "parameters": shape.params,
        "device": where.device.name,
        "fabric": where.joined_by,
        "precision": reviews[0].asked.precision,
        "findings": [{**finding.as_json(), "seen_on": seen} for finding, seen in findings],
        "looked_at": list(LOOKED_AT),
        "sizes": [_size(each) for each in reviews],
        "axes": ends(reviews[0].asked),
    }


def _size(each: Reviewed) -> dict[str, Any]:
    found = each.found if each.works else None
    return {
        "devices": each.asked.devices,
        "layout": None if found is None else words(found.layout, found.recompute),
        "step_s": None if found is None else found.seconds,
        "tokens_s_a_device": None if found is None else each.tokens_s,
        "mfu_causal": None if found is None else each.mfu,
        "why_not": None if found else each.findings[0].what,
    }
