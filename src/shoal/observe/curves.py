"""The loss and throughput of a run as pictures (PNG), with restarts marked and lost steps shown as what they are."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.observe import words
from shoal.observe.history import History
from shoal.observe.throughput import tokens_per_s

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK, BLUE, ORANGE, GREY, RED = "#23272e", "#2f6fb5", "#d9822b", "#9aa3ad", "#c0392b"
SPIKE_AMONG = 500  # so many points may leave one of them above the picture
SIZE_INCHES = (8.0, 4.2)
MOST_POINTS = 4000  # more than the picture has pixels
FEW = 12  # points that are each marked
SMOOTH_OVER = 40  # the bold line is a running mean over this fraction of the run


def draw(found: History, name: str, about: str, folder: Path) -> list[Path]:
    """Writes loss.png and throughput.png; nothing to draw gives nothing."""
    if not found.steps:
        return []

    def of(content: Callable[[Axes, History], None]) -> Callable[[Axes], None]:
        def drawn(axes: Axes) -> None:
            content(axes, found)
            _mark_restarts(axes, found)

        return drawn

    return [
        _picture(folder / "loss.png", f"{name}: loss", about, of(_loss)),
        _picture(folder / "throughput.png", f"{name}: throughput", about, of(_throughput)),
    ]


def draw_many(runs: Sequence[tuple[str, History]], about: str, path: Path) -> Path:
    """The losses of several runs in one picture, the first on top."""

    def losses(axes: Axes) -> None:
        ends = []
        for place, (label, found) in enumerate(runs):
            points = [(int(r["step"]), float(r["loss"])) for r in found.steps]
            _curve(axes, points, f"C{place % 10}", label, "-" if place < 10 else "--", 20 - place)
            ends += [y for _, y in points]
        axes.set_ylabel("loss (nats a token)", color=INK, fontsize=9)
        _fit(axes, ends)

    return _picture(path, f"loss of {len(runs)} runs", about, losses)


def _picture(path: Path, title: str, about: str, content: Callable[[Axes], None]) -> Path:
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    matplotlib.use("Agg")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure = Figure(figsize=SIZE_INCHES, dpi=150, layout="constrained")
    axes = figure.add_subplot()
    content(axes)
    axes.set_title(f"{title}\n", loc="left", fontsize=12, fontweight="bold", color=INK)
    axes.text(0, 1.02, about, transform=axes.transAxes, fontsize=8, color=GREY, va="bottom")
    axes.set_xlabel("step", color=INK, fontsize=9)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))  # there is no step 1.25
    axes.tick_params(colors=INK, labelsize=8, length=3, width=0.6)
    axes.grid(axis="y", color="#e7eaee", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set(color=GREY, linewidth=0.6)
    axes.margins(x=0.01)
    axes.legend(frameon=False, fontsize=8, labelcolor=INK, loc="best")
    temporary = path.with_suffix(".part.png")
    figure.savefig(temporary)
    temporary.replace(path)
    return path


def _loss(axes: Axes, found: History) -> None:
    points = [(int(r["step"]), float(r["loss"])) for r in found.steps]
    _curve(axes, points, BLUE, "training")
    lost = [(int(r["step"]), float(r["loss"])) for r in found.lost]
    if lost:
        axes.plot(*_columns(lost), ".", color=GREY, markersize=2.5, label=f"{len(lost)} steps done again", zorder=1)
    if found.evals:
        evals = [(int(r["step"]), float(r["loss"])) for r in found.evals]
        axes.plot(*_columns(evals), "o-", color=ORANGE, markersize=4, linewidth=1.2, label="evaluation", zorder=4)
    axes.set_ylabel("loss (nats a token)", color=INK, fontsize=9)
    _fit(axes, [y for _, y in (*points, *(evals if found.evals else ()))])


def _throughput(axes: Axes, found: History) -> None:
    points = [(int(r["step"]), tokens_per_s(r)) for r in found.steps]
    _curve(axes, points, BLUE, "tokens/s")
    ordered = sorted(y for _, y in points)
    median = ordered[len(ordered) // 2]
    axes.axhline(median, color=ORANGE, linewidth=1, linestyle="-", label=f"median {words.count(median)} tokens/s")
    axes.set_ylim(0, max(ordered[-1 - len(ordered) // SPIKE_AMONG] * 1.15, 1e-9))
    axes.yaxis.set_major_formatter(lambda y, _: words.count(y))
    axes.set_ylabel("tokens/s", color=INK, fontsize=9)


def _curve(
    axes: Axes, points: list[tuple[int, float]], color: str, label: str, style: str = "-", above: float = 3
) -> None:
    """Every point faint, a running mean bold; short runs need no smoothing."""
    window = len(points) // SMOOTH_OVER
    xs, ys = _columns(_thin(points))
    if window < 3:
        few = "o" if len(points) <= FEW else ""  # a line between two points, or of one, is hard to see
        axes.plot(xs, ys, style, color=color, linewidth=1.6, marker=few, markersize=3.5, label=label, zorder=above)
        return
    axes.plot(xs, ys, color=color, linewidth=0.7, alpha=0.3, zorder=2)
    smoothed = _columns(_thin(smooth(points, window)))
    axes.plot(*smoothed, style, color=color, linewidth=1.8, label=label, zorder=above)


def smooth(points: list[tuple[int, float]], window: int) -> list[tuple[int, float]]:
    """A centred running mean that shrinks at the ends instead of inventing points there."""
    sums = [0.0]
    for _, y in points:
        sums.append(sums[-1] + (y if math.isfinite(y) else 0.0))
    out = []
    for i, (x, _) in enumerate(points):
        half = min(window // 2, i, len(points) - 1 - i)
        out.append((x, (sums[i + half + 1] - sums[i - half]) / (2 * half + 1)))
    return out


def _mark_restarts(axes: Axes, found: History) -> None:
    """A line where the run broke off; a shade over the steps that were done again after it."""
    for failed, color, label in ((True, RED, "restart after a failure"), (False, GREY, "resumed")):
        for i, b in enumerate(b for b in found.breaks if b.failed == failed):
            named = label if i == 0 else None  # once in the legend, however many there are
            axes.axvline(b.reached, color=color, linewidth=0.9, linestyle=(0, (4, 3)), label=named, zorder=2)
            if b.reached > b.resumed_at:
                axes.axvspan(b.resumed_at, b.reached, color=color, alpha=0.06, linewidth=0, zorder=0)


def _fit(axes: Axes, ys: list[float]) -> None:
    """A single spike among very many must not flatten the rest of the curve; of few points none is left out."""
    finite = sorted(y for y in ys if math.isfinite(y))
    if not finite:
        return
    low, high = finite[0], finite[-1 - len(finite) // SPIKE_AMONG]
    pad = 0.05 * ((high - low) or abs(low) or 1.0)
    axes.set_ylim(low - pad, high + pad)


def _thin(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """Keeps the lowest and the highest of each bucket, so that no spike is thinned away."""
    if len(points) <= MOST_POINTS:
        return points
    bucket = -(-2 * len(points) // MOST_POINTS)
    out: list[tuple[int, float]] = []
    for i in range(0, len(points), bucket):
        part = points[i : i + bucket]
        out += sorted({min(part, key=lambda p: p[1]), max(part, key=lambda p: p[1])})
    return out


def _columns(points: list[tuple[int, float]]) -> tuple[list[int], list[float]]:
    return [x for x, _ in points], [y for _, y in points]
