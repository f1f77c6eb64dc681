"""A comparison as a picture (PNG): cost against time, and how the machines scale."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.plan.verdict import Range

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# What a fabric is called where all devices are in one domain of fast links.
NONE_NEEDED = "none needed"
INK, GREY, PALE = "#23272e", "#8a939d", "#e7eaee"
COLOURS = ("#2f6fb5", "#d9822b", "#3a9d5d", "#c0392b", "#7d5ba6", "#8c6d46", "#d36fa8", "#5f6b78")
MARKS = "os^DvPXh"
LINES = {"strong": "-", "weak": (0, (4, 2))}
SIZE_INCHES = (13.0, 6.0)
# More labels than this do not fit beside their points: then colours and marks are explained below.
CROWDED = 14
# Points of one machine that are as near as this share one label.
NEAR = 0.02
# A scale is logarithmic where its ends are further apart than this factor.
WIDE = 6.0
# Where a label may stand: so many dots from its point, in all directions.
REACHES = (10, 18, 28, 40, 56, 76, 100, 130)
DIRECTIONS = 16


@dataclass(frozen=True)
class Cost:
    machine: str
    fabric: str
    devices: int
    days: Range
    usd: Range


@dataclass(frozen=True)
class Curve:
    machine: str
    fabric: str
    kind: str  # strong or weak
    points: list[tuple[int, Range]]  # devices, tokens/s a device


def draw(path: Path, title: str, costs: Sequence[Cost], curves: Sequence[Curve]) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.08, wspace=0.06)
    figure = Figure(figsize=SIZE_INCHES, dpi=150, layout=layout)
    canvas = FigureCanvasAgg(figure)
    figure.suptitle(title, x=0.012, ha="left", fontsize=12, fontweight="bold", color=INK)
    left, right = figure.subplots(1, 2)
    colours = _colours([*costs, *curves])
    _cost_panel(left, costs, colours)
    _scaling_panel(right, curves, colours)
    canvas.draw()  # places the axes, so that labels know where their points are
    figure.set_layout_engine("none")
    _label(left, canvas.get_renderer(), costs, colours)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".part.png")
    figure.savefig(temporary)
    temporary.replace(path)


def _colours(shown: Sequence[Cost | Curve]) -> Callable[[Cost | Curve], str]:
    """A colour for each machine; where there is but one, for each fabric."""
    one_machine = len({one.machine for one in shown}) == 1

    def name(one: Cost | Curve) -> str:
        return one.fabric if one_machine else one.machine

    colours = {each: COLOURS[i % len(COLOURS)] for i, each in enumerate(dict.fromkeys(map(name, shown)))}
    return lambda one: colours[name(one)]


def _cost_panel(axes: Axes, costs: Sequence[Cost], colours: Callable[[Cost | Curve], str]) -> None:
    """Cost is time at a price, so both are wrong by the same factor: an interval is a slanted line."""
    counts = {c.devices for c in costs}
    title = f"Cost against time on {counts.pop():,} devices" if len(counts) == 1 else "Cost against time"
    _frame(axes, title, "lower left is better; lines reach from the low to the high end of a prediction")
    axes.set_xlabel("days to the end of the run", color=INK, fontsize=9)
    axes.set_ylabel("dollars", color=INK, fontsize=9)
    if not costs:
        axes.text(0.5, 0.5, "no price is known", transform=axes.transAxes, ha="center", color=GREY)
        return
    marks = {name: MARKS[i % len(MARKS)] for i, name in enumerate(dict.fromkeys(c.fabric for c in costs))}
    _scale(axes.xaxis, axes.set_xscale, axes.set_xlim, [x for c in costs for x in (c.days.low, c.days.high)], "")
    _scale(axes.yaxis, axes.set_yscale, axes.set_ylim, [y for c in costs for y in (c.usd.low, c.usd.high)], "$")
    for c in costs:
        colour = colours(c)
        axes.plot([c.days.low, c.days.high], [c.usd.low, c.usd.high], color=colour, linewidth=1.2, alpha=0.45, zorder=2)
        axes.plot(
            c.days.expected, c.usd.expected, marks[c.fabric], color=colour, markersize=7, markeredgecolor="w", zorder=3
        )
    if len(_together(costs)) > CROWDED:
        named = {c.machine: axes.plot([], [], "-", color=colours(c), linewidth=3)[0] for c in costs}
        named |= {name: axes.plot([], [], mark, color=GREY)[0] for name, mark in marks.items()}
        _below(axes, list(named.values()), list(named))


def _scaling_panel(axes: Axes, curves: Sequence[Curve], colours: Callable[[Cost | Curve], str]) -> None:
    what = "solid: the same batch on more devices (strong); dashed: a batch that grows with them (weak)"
    _frame(axes, "Scaling", what)
    axes.set_xlabel("devices", color=INK, fontsize=9)
    axes.set_ylabel("tokens/s a device", color=INK, fontsize=9)
    for c in curves:
        if not c.points:
            continue
        devices, speeds = [n for n, _ in c.points], [r for _, r in c.points]
        name = f"{c.machine}, {c.fabric}" if c.kind == "strong" else None
        expected = [r.expected for r in speeds]
        style = {"color": colours(c), "linestyle": LINES[c.kind], "linewidth": 1.8, "marker": "o", "markersize": 3.5}
        axes.plot(devices, expected, label=name, zorder=3, **style)  # type: ignore[arg-type]  # one dict of many kinds
        if c.kind == "strong":
            lows, highs = [r.low for r in speeds], [r.high for r in speeds]
            axes.fill_between(devices, lows, highs, color=colours(c), alpha=0.08, linewidth=0)
    shown = sorted({n for c in curves for n, _ in c.points})
    if shown:
        axes.set_xscale("log", base=2)
        axes.set_xticks(shown, [f"{n:,}" for n in shown])
        axes.minorticks_off()
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter(lambda y, _: f"{y:,.0f}")
        _below(axes, *axes.get_legend_handles_labels())


def _below(axes: Axes, handles: Sequence[Any], labels: Sequence[str]) -> None:
    place = {"loc": "upper left", "bbox_to_anchor": (-0.02, -0.1), "ncols": 4}
    axes.legend(handles, labels, frameon=False, fontsize=8, labelcolor=INK, columnspacing=1.6, **place)


def _frame(axes: Axes, title: str, about: str) -> None:
    axes.set_title(f"{title}\n", loc="left", fontsize=11, fontweight="bold", color=INK)
    axes.text(0, 1.02, about, transform=axes.transAxes, fontsize=8, color=GREY, va="bottom")
    axes.tick_params(colors=INK, which="both", labelsize=8, length=3, width=0.6)
    axes.grid(color=PALE, linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set(color=GREY, linewidth=0.6)


def _scale(axis: Any, scale: Any, limits: Any, values: Sequence[float], unit: str) -> None:
    """Room on every side for labels."""
    low, high = min(values), max(values)
    if high / low > WIDE:
        scale("log")
        room = (high / low) ** 0.12
        limits(low / room, high * room)
        axis.set_major_locator(_ticks(low / room, high * room))
        axis.set_minor_locator(_none())
    else:
        room = 0.18 * (high - low) or 0.2 * high
        limits(max(0.0, low - room), high + room)
    axis.set_major_formatter(lambda value, _: f"{unit}{_figure(value)}")


def _ticks(low: float, high: float) -> Any:
    """1, 2, 5 of every power of ten; of many powers, these alone."""
    from matplotlib.ticker import FixedLocator

    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps = (1, 2, 5) if len(powers) <= 4 else (1,)
    return FixedLocator([step * 10.0**power for power in powers for step in steps])


def _none() -> Any:
    from matplotlib.ticker import NullLocator

    return NullLocator()


def _figure(value: float) -> str:
    for limit, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.4g}{unit}"
    return f"{value:.3g}"


def _label(axes: Axes, renderer: Any, costs: Sequence[Cost], colours: Callable[[Cost | Curve], str]) -> None:
    """Each label goes to the nearest free place: clear of points, of intervals and of other labels."""
    from matplotlib.transforms import Bbox

    several = len({c.devices for c in costs}) > 1
    dot = axes.figure.dpi / 72
    inside = axes.get_window_extent(renderer)
    taken = [_around(axes, c.days.expected, c.usd.expected, 5 * dot) for c in costs]
    for c in costs:  # an interval is a line: boxes along it
        ends = [axes.transData.transform((d, u)) for d, u in ((c.days.low, c.usd.low), (c.days.high, c.usd.high))]
        steps = [ends[0] + (ends[1] - ends[0]) * i / 12 for i in range(13)]
        taken += [Bbox.from_bounds(x - dot, y - dot, 2 * dot, 2 * dot) for x, y in steps]
    groups = _together(costs)
    crowded = len(groups) > CROWDED
    for near in groups if several or not crowded else ():
        c = near[0]
        text = axes.annotate(
            _named(near, several, crowded),
            (c.days.expected, c.usd.expected),
            (0, 0),
            textcoords="offset points",
            fontsize=8,
            color=colours(c),
            ha="center",
            va="center",
            zorder=4,
        )
        box = text.get_window_extent(renderer)
        half_w, half_h = box.width / 2, box.height / 2
        x, y = axes.transData.transform((c.days.expected, c.usd.expected))
        best: tuple[float, float, float, Any] | None = None
        for reach in REACHES:
            for i in range(DIRECTIONS):
                angle = 2 * math.pi * i / DIRECTIONS
                # From the edge of the label, not from its middle: a long one needs more room to the side.
                dx = math.cos(angle) * (reach * dot + half_w)
                dy = math.sin(angle) * (reach * dot + half_h)
                place = Bbox.from_bounds(x + dx - half_w, y + dy - half_h, 2 * half_w, 2 * half_h)
                hidden = sum(_shared(place, other) for other in taken) + 4 * _beyond(place, inside)
                score = hidden / (half_w * half_h) + reach / 400
                if best is None or score < best[0]:
                    best = score, dx, dy, place
        assert best is not None
        _, dx, dy, place = best
        text.set_position((dx / dot, dy / dot))
        taken.append(place)
        if math.hypot(max(0.0, abs(dx) - half_w), max(0.0, abs(dy) - half_h)) > 16 * dot:
            axes.annotate(
                "",
                (c.days.expected, c.usd.expected),
                (_toward(dx, half_w) / dot, _toward(dy, half_h) / dot),
                textcoords="offset points",
                arrowprops={"arrowstyle": "-", "color": GREY, "linewidth": 0.6, "shrinkA": 1, "shrinkB": 4},
                zorder=1,
            )


def _named(near: Sequence[Cost], several: bool, crowded: bool) -> str:
    first = near[0]
    if crowded:
        return f"{first.devices:,}"
    fabrics = [name for name in dict.fromkeys(one.fabric for one in near) if name != NONE_NEEDED]
    name = f"{first.devices:,} {first.machine}" if several else first.machine
    return name + (f", {' / '.join(fabrics)}" if fabrics else "")


def _together(costs: Sequence[Cost]) -> list[list[Cost]]:
    """Points of as many devices of one machine that lie on each other, such as two fabrics of the same speed."""
    groups: list[list[Cost]] = []
    for c in costs:
        for group in groups:
            first = group[0]
            same = (first.machine, first.devices) == (c.machine, c.devices)
            if same and abs(math.log(first.days.expected / c.days.expected)) < NEAR:
                group.append(c)
                break
        else:
            groups.append([c])
    return groups


def _around(axes: Axes, x: float, y: float, size: float) -> Any:
    from matplotlib.transforms import Bbox

    at = axes.transData.transform((x, y))
    return Bbox.from_bounds(at[0] - size, at[1] - size, 2 * size, 2 * size)


def _shared(a: Any, b: Any) -> float:
    """Area that two boxes share, in pixels."""
    width, height = min(a.x1, b.x1) - max(a.x0, b.x0), min(a.y1, b.y1) - max(a.y0, b.y0)
    return float(width * height) if width > 0 and height > 0 else 0.0


def _beyond(box: Any, inside: Any) -> float:
    """Area of a box that is outside of another."""
    return float(box.width * box.height) - _shared(box, inside)


def _toward(offset: float, half: float) -> float:
    """The edge of a label that faces its point."""
    return math.copysign(max(0.0, abs(offset) - half), offset)
