"""`shoal plan compare RUN.yaml --on A,B --fabric X,Y`: the same run on several machines: what it costs, how long it
takes, how it scales."""

from __future__ import annotations

import argparse
import itertools
import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from shoal.cli.checkpoint.shared import progress
from shoal.cli.plan.shared import (
    Target,
    as_json,
    coming_back,
    counts,
    failing,
    figure,
    layouts,
    names,
    priced,
    prices,
    ranged,
    target,
    wanted,
)
from shoal.errors import SetupError, SpecError, UsageError
from shoal.plan.asked import Asked
from shoal.plan.chart import NONE_NEEDED, Cost, Curve, draw
from shoal.plan.explain import words
from shoal.plan.scaling import Point, numbers, strong, weak
from shoal.plan.verdict import Verdict, verdict
from shoal.spec.run import Run
from shoal.spec.shape import Shape

Refused = tuple[Target, str]  # and why


@dataclass(frozen=True)
class Row:
    where: Target
    asked: Asked
    verdict: Verdict
    price: float | None  # of one device and hour, where somebody has said it

    @property
    def fabric(self) -> str:
        return _fabric(self.where)

    @property
    def name(self) -> str:
        joined = "" if self.fabric == NONE_NEEDED else f", {self.fabric}"
        return f"{self.where.devices:,} {self.where.device.name}{joined}"


@dataclass(frozen=True)
class Scaling:
    """Of one machine and fabric."""

    where: Target
    strong: list[Point]
    weak: list[Point]


def run(args: argparse.Namespace) -> int:
    machines = names(args.on)
    if not machines:
        raise UsageError("name the machines to compare, as in `shoal plan compare RUN.yaml --on h100,b200`.")
    given = prices(args.price)
    if len(given) not in (0, 1, len(machines)):
        raise UsageError(f"--price {args.price}: give one price, or one for each of the {len(machines)} of --on.")
    if args.chart and not args.chart.endswith(".png"):
        raise UsageError(f"--chart {args.chart}: the chart is a PNG; give the file a name that ends in .png.")
    cost = dict(zip(machines, given * len(machines) if len(given) == 1 else given, strict=False))
    spec, shape = wanted(args)
    rates, how = failing(args, spec), coming_back(args, spec)
    if not given and spec.plan.price and spec.plan.on in machines:
        cost = {spec.plan.on: spec.plan.price}
    targets = list(_targets(args, spec, machines))
    rows: list[Row] = []
    refused: list[Refused] = []
    curves = len(machines) if len(machines) > 1 else len(targets)
    with progress("compared", len(targets) + curves, quiet=args.json) as done:
        for name, where in targets:
            try:
                asked = where.asked(spec, shape)
                best = layouts(asked, 1)[0]
                price = cost.get(name)
                rows.append(Row(where, asked, verdict(asked, where.device, best, rates, how, price), price))
            except (SetupError, SpecError) as e:
                refused.append((where, str(e).rstrip(".")))
            done(1)
        rows.sort(key=_order)
        devices, scaling = [row.where.devices for row in rows], []
        for where in _to_scale(rows):
            scaling.append(_scaled(where, spec, shape, devices))
            done(1)
    if args.json:
        print(json.dumps(_as_json(spec, shape, rows, refused, scaling), indent=2))
    else:
        print("\n".join(_lines(spec, shape, rows, refused, scaling)))
    if args.chart and rows:
        draw(Path(args.chart), _title(spec, shape), _costs(rows), _curves(scaling))
        if not args.json:
            print(f"\n{args.chart} written.")
    return 0 if rows else SetupError.exit_code


def _targets(args: argparse.Namespace, spec: Run, machines: Sequence[str]) -> Iterator[tuple[str, Target]]:
    """Each once, however it is named; and one fabric where no fabric is needed."""
    seen = set()
    many, fabrics = counts(args.devices), names(args.fabric)
    for name in machines:
        for devices, fabric in itertools.product(many or (None,), fabrics or (None,)):
            where = target(args, spec, name, fabric, devices)
            key = (where.device.name, where.devices, _fabric(where))
            if key not in seen:
                seen.add(key)
                yield name, where


def _fabric(where: Target) -> str:
    return NONE_NEEDED if where.devices <= where.device.link.domain else where.joined_by


def _order(row: Row) -> tuple[bool, float, float]:
    """By cost; those whose price nobody knows come last, by time."""
    usd, days = row.verdict.usd, row.verdict.days
    return usd is None, days.expected if usd is None else usd.expected, days.expected


def _to_scale(rows: Sequence[Row]) -> list[Target]:
    """Every fabric of a single machine, and of several machines the cheapest of each."""
    best: dict[tuple[str, ...], Target] = {}
    several = len({row.where.device.name for row in rows}) > 1
    for row in rows:
        name = row.where.device.name
        best.setdefault((name,) if several else (name, row.where.joined_by), row.where)
    return list(best.values())


def _scaled(where: Target, spec: Run, shape: Shape, devices: Sequence[int]) -> Scaling:
    """A batch that grows has the run's size on the fewest devices that are compared."""
    asked, wide = replace(where.asked(spec, shape), devices=min(devices)), numbers(devices)
    return Scaling(where, strong(asked, wide), weak(asked, wide))


def _title(spec: Run, shape: Shape) -> str:
    tokens = spec.train.batch * spec.data.seq_len
    return (
        f"{spec.name}: {shape.params / 1e9:.3g}B parameters, {tokens * spec.steps / 1e9:,.4g}B tokens, "
        f"{spec.train.batch:,} x {spec.data.seq_len:,} a step"
    )


def _lines(
    spec: Run,
    shape: Shape,
    rows: Sequence[Row],
    refused: Sequence[Refused],
    scaling: Sequence[Scaling],
) -> Iterator[str]:
    yield _title(spec, shape)
    yield ""
    if rows:
        yield from _table(rows)
    for words_of, why in _grouped(refused):
        yield f"not on {words_of}: {why}."
    if not rows:
        return
    yield ""
    yield from _scaling_lines(scaling)
    yield ""
    machines = {row.where.device.name: row for row in rows}
    told = [priced(row.where.device, row.price) for row in machines.values()]
    yield f"Prices: {'; '.join(told)}."
    if measured := [name for name, row in machines.items() if row.where.device.measured]:
        yield f"Of {', '.join(measured)} it is known what `shoal bench` measured; the others are as the catalogue says."
    yield _sentence(rows)


def _table(rows: Sequence[Row]) -> Iterator[str]:
    head = ("machine", "devices", "fabric", "tokens/s a device", "days", "$", "$/B tokens", "MFU", "goodput", "layout")
    body = [
        (
            row.where.device.name,
            f"{row.where.devices:,}",
            row.fabric,
            ranged(row.verdict.tokens_s.times(1 / row.where.devices)),
            figure(row.verdict.days.expected),
            "unknown" if row.verdict.usd is None else figure(row.verdict.usd.expected),
            "unknown" if row.verdict.usd_per_billion is None else f"{row.verdict.usd_per_billion.expected:,.2f}",
            f"{row.verdict.mfu:.1%}",
            f"{row.verdict.goodput.expected:.1%}",
            words(row.verdict.found.layout, row.verdict.found.recompute),
        )
        for row in rows
    ]
    yield from _aligned([head, *body], left=(0, 2, 3, 9))


def _scaling_lines(scaling: Sequence[Scaling]) -> Iterator[str]:
    wide = sorted({point.devices for one in scaling for point in (*one.strong, *one.weak)})
    lines = [("tokens/s a device on", *(f"{n:,}" for n in wide))]
    for one in scaling:
        for kind, points in (("strong", one.strong), ("weak", one.weak)):
            at = {point.devices: figure(point.tokens_s.expected) for point in points}
            name = f"{one.where.device.name}, {one.where.joined_by}: {kind}"
            lines.append((name, *(at.get(n, "-") for n in wide)))
    yield from _aligned(lines, left=(0,))
    yield "(strong: the same batch on more devices; weak: a batch that grows with them; -: nothing fits)"


def _aligned(lines: Sequence[tuple[str, ...]], left: Sequence[int]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = (f"{c:<{w}}" if i in left else f"{c:>{w}}" for i, (c, w) in enumerate(zip(line, widths, strict=True)))
        yield "  ".join(cells).rstrip()


def _grouped(refused: Sequence[Refused]) -> Iterator[tuple[str, str]]:
    """One sentence for all fabrics that it is true of."""
    at: dict[tuple[str, str], list[str]] = defaultdict(list)
    for where, why in refused:
        at[f"{where.devices:,} {where.device.name}", why].append(_fabric(where))
    for (machine, why), fabrics in at.items():
        joined = "" if fabrics == [NONE_NEEDED] else f" with {' or '.join(fabrics)}"
        yield f"{machine}{joined}", why


def _sentence(rows: Sequence[Row]) -> str:
    fast = min(rows, key=lambda row: row.verdict.days.expected)
    days = f"{figure(fast.verdict.days.expected)} days"
    cheap, usd = rows[0], rows[0].verdict.usd
    if usd is None:
        return f"The fastest is {fast.name} ({days}); of none a price is known: give --price."
    if cheap is fast:
        return f"Both the cheapest and the fastest is {cheap.name}: ${figure(usd.expected)}, {days}."
    paid = fast.verdict.usd
    more = "at a price that is not known" if paid is None else f"${figure(paid.expected)}"
    return (
        f"The cheapest is {cheap.name}: ${figure(usd.expected)}, {figure(cheap.verdict.days.expected)} days; "
        f"the fastest is {fast.name}: {days}, {more}."
    )


def _costs(rows: Sequence[Row]) -> list[Cost]:
    return [
        Cost(row.where.device.name, row.fabric, row.where.devices, row.verdict.days, row.verdict.usd)
        for row in rows
        if row.verdict.usd is not None
    ]


def _curves(scaling: Sequence[Scaling]) -> list[Curve]:
    return [
        Curve(one.where.device.name, one.where.joined_by, kind, [(p.devices, p.tokens_s) for p in points])
        for one in scaling
        for kind, points in (("strong", one.strong), ("weak", one.weak))
    ]


def _as_json(
    spec: Run,
    shape: Shape,
    rows: Sequence[Row],
    refused: Sequence[Refused],
    scaling: Sequence[Scaling],
) -> dict[str, Any]:
    def named(where: Target) -> dict[str, Any]:
        return {"device": where.device.name, "fabric": where.joined_by, "devices": where.devices}

    def point(p: Point) -> dict[str, Any]:
        layout = words(p.found.layout, p.found.recompute)
        speed = asdict(p.tokens_s)
        return {"devices": p.devices, "batch": p.batch, "tokens_s_a_device": speed, "layout": layout}

    fast = min(rows, key=lambda row: row.verdict.days.expected, default=None)
    return {
        "run": spec.name,
        "parameters": shape.params,
        "tokens": spec.train.batch * spec.data.seq_len * spec.steps,
        "rows": [{**named(row.where), **as_json(row.verdict)} for row in rows],
        "refused": [{**named(where), "why": why} for where, why in refused],
        "cheapest": named(rows[0].where) if rows and rows[0].verdict.usd is not None else None,
        "fastest": None if fast is None else named(fast.where),
        "scaling": [
            {
                "device": one.where.device.name,
                "fabric": one.where.joined_by,
                "strong": [point(p) for p in one.strong],
                "weak": [point(p) for p in one.weak],
            }
            for one in scaling
        ],
    }
