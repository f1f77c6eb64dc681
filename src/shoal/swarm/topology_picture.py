"""A swarm's topology in words and as a drawing: who is near whom, and what crosses between the regions."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from shoal.errors import UsageError
from shoal.net.api import PeerId
from shoal.readable import short, size
from shoal.swarm.topology import Routes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK, GREY = "#23272e", "#8a939d"
COLOURS = ("#2f6fb5", "#d9822b", "#3a9d5d", "#c0392b", "#7d5ba6", "#8c6d46", "#d36fa8", "#5f6b78")
SUFFIXES = (".svg", ".png", ".pdf")
SIZE_INCHES = 9.0
TURN = 0.15  # of a region's peers, so that lines between regions lie beside each other
_Place = tuple[float, float]
_Name = Callable[[PeerId], str]


def _short(peer: PeerId) -> str:
    return peer[:8]


def picture(routes: Routes, name_of: _Name = _short) -> str:
    """In words, a line for each region and each pair of them."""
    found, crossing, everywhere = routes.regions, routes.crossing_bytes(), routes.all_to_all_bytes()
    peers = len(routes.measured.peers)
    lines = [f"{peers} peer{'s' * (peers != 1)} in {len(found)} region{'s' * (len(found) != 1)}"]
    if len(found) > 1:
        lines[0] += f"; {size(crossing)} cross between them in a round, {size(everywhere)} if all sent to all"
    for i, region in enumerate(found):
        inside = [(a, b) for a in region for b in region if a != b]
        told = f"  ({_links(routes, inside)})" if inside else ""
        lines.append(f"{_letter(i)}  {', '.join(name_of(peer) for peer in region)}{told}")
    for i, j in combinations(range(len(found)), 2):
        between = [(a, b) for a in found[i] for b in found[j]]
        lines.append(f"{_letter(i)}-{_letter(j)}  {_links(routes, between + [(b, a) for a, b in between])}")
    return "\n".join(lines)


def draw(routes: Routes, path: Path, name_of: _Name = _short, busy: Mapping[PeerId, float] | None = None) -> None:
    """As SVG, PNG or PDF, by the file's name. Lines are parts on their way in a round, as wide as they are large."""
    if path.suffix not in SUFFIXES:
        raise UsageError(f"{path}: a topology is drawn as one of {', '.join(SUFFIXES)}.")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(SIZE_INCHES, SIZE_INCHES), layout="constrained")
    axes = figure.add_subplot()
    axes.set_aspect("equal")
    axes.axis("off")
    axes.set_title(picture(routes, name_of).splitlines()[0], color=INK, fontsize=12)
    centres, places = _places(routes)
    _draw_regions(axes, routes, centres)
    _draw_flows(axes, routes, places)
    for i, region in enumerate(routes.regions):
        for peer in region:
            x, y = places[peer]
            told = name_of(peer) + (f"\n{busy[peer]:.0%} busy" if busy and peer in busy else "")
            axes.plot([x], [y], "o", markersize=16, color=COLOURS[i % len(COLOURS)], zorder=3)
            _write(axes, told, (x, y), -13)
    figure.savefig(path, dpi=150)


def _write(axes: Axes, text: str, place: _Place, below: int = 0) -> None:
    box = {"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none", "alpha": 0.8}
    text = text.replace("$", r"\$")  # not the beginning of a formula
    axes.annotate(
        text,
        place,
        (0, below),
        textcoords="offset points",
        ha="center",
        va="top" if below else "center",
        fontsize=9,
        color=INK if below else GREY,
        bbox=box,
        zorder=4,
    )


def _links(routes: Routes, pairs: list[tuple[PeerId, PeerId]]) -> str:
    measured = routes.measured
    rtts = [measured.rtt_s(a, b) for a, b in pairs]
    rates = [measured.bytes_per_s(a, b) * 8 / 1e6 for a, b in pairs]
    return f"{short(median(rtts))}, {median(rates):.3g} Mbit/s, at worst {short(max(rtts))}, {min(rates):.3g} Mbit/s"


def _letter(i: int) -> str:
    return chr(ord("A") + i) if i < 26 else str(i + 1)


def _places(routes: Routes) -> tuple[list[_Place], dict[PeerId, _Place]]:
    """Regions on a circle, and the peers of each on a smaller one."""
    found = routes.regions
    centres = [(0.0, 0.0)] if len(found) == 1 else [_around((0.0, 0.0), 3.0, i, len(found)) for i in range(len(found))]
    places = {}
    for centre, region in zip(centres, found, strict=True):
        for k, peer in enumerate(region):
            places[peer] = centre if len(region) == 1 else _around(centre, _radius(len(found)), k + TURN, len(region))
    return centres, places


def _radius(count: int) -> float:
    """Of a region's circle, so that neighbours do not touch."""
    return 2.5 if count == 1 else min(1.0, 0.7 * 3.0 * math.sin(math.pi / count))


def _around(centre: _Place, radius: float, i: float, n: int) -> _Place:
    angle = math.pi / 2 - 2 * math.pi * i / n
    return centre[0] + radius * math.cos(angle), centre[1] + radius * math.sin(angle)


def _draw_regions(axes: Axes, routes: Routes, centres: list[_Place]) -> None:
    from matplotlib.patches import Circle

    radius = _radius(len(centres)) + 0.5
    for i, (x, y) in enumerate(centres):
        axes.add_patch(Circle((x, y), radius, color=COLOURS[i % len(COLOURS)], alpha=0.10, linewidth=0))
        axes.annotate(_letter(i), (x, y + radius - 0.15), ha="center", va="top", color=GREY, fontsize=14)
    for i, j in combinations(range(len(centres)), 2):
        pairs = [(a, b) for a in routes.regions[i] for b in routes.regions[j]]
        middle = (centres[i][0] + centres[j][0]) / 2, (centres[i][1] + centres[j][1]) / 2
        _write(axes, _links(routes, pairs).partition(", at worst")[0].replace(", ", "\n"), middle)
    xs, ys = zip(*centres, strict=True)
    axes.set_xlim(min(xs) - radius - 0.2, max(xs) + radius + 0.2)
    axes.set_ylim(min(ys) - radius - 0.5, max(ys) + radius + 0.2)


def _draw_flows(axes: Axes, routes: Routes, places: Mapping[PeerId, _Place]) -> None:
    carried: dict[tuple[PeerId, PeerId], int] = {}
    for flow in routes.flows():
        pair = (flow.source, flow.receiver) if flow.source < flow.receiver else (flow.receiver, flow.source)
        carried[pair] = carried.get(pair, 0) + flow.size
    most = max(carried.values(), default=1)
    for (a, b), count in carried.items():
        (x1, y1), (x2, y2) = places[a], places[b]
        crosses = routes.region(a) != routes.region(b)
        axes.plot(
            [x1, x2],
            [y1, y2],
            color=INK if crosses else GREY,
            linewidth=0.5 + 4 * count / most,
            alpha=0.8 if crosses else 0.4,
            zorder=2 if crosses else 1,
        )
