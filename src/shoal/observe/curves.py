"""The loss and throughput of a run as pictures (PNG), with restarts marked and lost steps shown as what they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from shoal import readable
from shoal.journal.columns import Array
from shoal.observe import tasks
from shoal.observe.history import History
from shoal.observe.tasks import Series

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK, BLUE, ORANGE, GREY, RED = "#23272e", "#2f6fb5", "#d9822b", "#9aa3ad", "#c0392b"
SPIKE_AMONG = 500  # so many points may leave one of them above the picture
SIZE_INCHES = (8.0, 4.2)
MOST_POINTS = 4000  # more than the picture has pixels
FEW = 12  # points that are each marked
SMOOTH_OVER = 40  # the bold line is a running mean over this fraction of the run


def draw(found: History, name: str, about: str, folder: Path) -> list[Path]:
    """Writes loss.png, throughput.png and rate.png; nothing to draw gives nothing."""
    if not len(found.steps):
        return []

    def of(content: Callable[[Axes, History], None]) -> Callable[[Axes], None]:
        def drawn(axes: Axes) -> None:
            content(axes, found)
            _mark_restarts(axes, found)

        return drawn

    drawn = [_picture(folder / "loss.png", f"{name}: loss", about, of(_loss))]
    if not found.script:  # nobody counts its tokens
        drawn.append(_picture(folder / "throughput.png", f"{name}: throughput", about, of(_throughput)))
    if measured := tasks.series(found.tasks):
        drawn.append(_picture(folder / "tasks.png", f"{name}: tasks", about, of(partial(_tasks, measured))))
    if np.isfinite(found.steps.column("lr")).any():
        drawn.append(_picture(folder / "rate.png", f"{name}: learning rate", about, of(_rate)))
    return drawn


def draw_many(runs: Sequence[tuple[str, History]], about: str, path: Path) -> Path:
    """The losses of several runs in one picture, the first on top."""

    def losses(axes: Axes) -> None:
        ends = []
        for place, (label, found) in enumerate(runs):
            losses = found.steps.column("loss")
            style, above = "-" if place < 10 else "--", 20 - place
            _curve(axes, found.steps.column("step"), losses, f"C{place % 10}", label, style, above)
            ends.append(losses)
        axes.set_ylabel("loss (nats a token)", color=INK, fontsize=9)
        _fit(axes, np.concatenate(ends))

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
    losses = found.steps.column("loss")
    _curve(axes, found.steps.column("step"), losses, BLUE, "training")
    if lost := len(found.lost):
        points = thinned(found.lost.column("step"), found.lost.column("loss"))
        axes.plot(*points, ".", color=GREY, markersize=2.5, label=f"{lost} steps done again", zorder=1)
    evals = np.array([(int(r["step"]), float(r["loss"])) for r in found.evals]).reshape(-1, 2)
    if len(evals):
        axes.plot(*evals.T, "o-", color=ORANGE, markersize=4, linewidth=1.2, label="evaluation", zorder=4)
    axes.set_ylabel("loss given to backward" if found.script else "loss (nats a token)", color=INK, fontsize=9)
    _fit(axes, np.concatenate((losses, evals[:, 1])))


def _tasks(measured: Sequence[Series], axes: Axes, found: History) -> None:
    """Each measure with its interval; of many the first ten. Perplexities and the like have another scale: they are
    drawn where nothing else is."""
    shares = [one for one in measured if one.higher_is_better]
    shown = (shares or measured)[:10]
    at = {point.step for one in shown for point in one.points}
    once = len(at) == 1
    for place, one in enumerate(shown):
        # Measured once, they stand side by side: those that are equal would hide each other.
        beside = 0.1 * (place - (len(shown) - 1) / 2) if once else 0.0
        steps, values = [point.step + beside for point in one.points], np.array([point.value for point in one.points])
        bounds = np.array([(point.low, point.high) for point in one.points])
        colour = f"C{place}"
        axes.plot(steps, values, "o-", color=colour, markersize=3.5, linewidth=1.4, label=f"{one.task} {one.measure}")
        if not np.isfinite(bounds).all():
            continue
        if len(steps) > 1:
            axes.fill_between(steps, bounds[:, 0], bounds[:, 1], color=colour, alpha=0.15, linewidth=0)
        else:
            axes.vlines(steps, bounds[:, 0], bounds[:, 1], color=colour, alpha=0.6, linewidth=1.4)
    if once:
        axes.set_xticks(list(at))
        axes.set_xlim(min(at) - 1, max(at) + 1)
    axes.set_ylabel("share, with its 95% interval" if shares else "value", color=INK, fontsize=9)


def _throughput(axes: Axes, found: History) -> None:
    rates = found.steps.tokens_per_s()
    _curve(axes, found.steps.column("step"), rates, BLUE, "tokens/s")
    middle, high = len(rates) // 2, len(rates) - 1 - len(rates) // SPIKE_AMONG
    median, most = np.partition(rates, [middle, high])[[middle, high]].tolist()
    axes.axhline(median, color=ORANGE, linewidth=1, linestyle="-", label=f"median {readable.count(median)} tokens/s")
    axes.set_ylim(0, max(most * 1.15, 1e-9))
    axes.yaxis.set_major_formatter(lambda y, _: readable.count(y))
    axes.set_ylabel("tokens/s", color=INK, fontsize=9)


def _rate(axes: Axes, found: History) -> None:
    """As it was, step by step: nothing is smoothed, so that a jump is seen."""
    points = thinned(found.steps.column("step"), found.steps.column("lr"))
    axes.plot(*points, color=BLUE, linewidth=1.6, label="learning rate", zorder=3)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("learning rate" if found.script else "learning rate (of AdamW)", color=INK, fontsize=9)


def _curve(axes: Axes, xs: Array, ys: Array, color: str, label: str, style: str = "-", above: float = 3) -> None:
    """Every point faint, a running mean bold; short runs need no smoothing."""
    window = len(xs) // SMOOTH_OVER
    points = thinned(xs, ys)
    if window < 3:
        few = "o" if len(xs) <= FEW else ""  # a line between two points, or of one, is hard to see
        axes.plot(*points, style, color=color, linewidth=1.6, marker=few, markersize=3.5, label=label, zorder=above)
        return
    axes.plot(*points, color=color, linewidth=0.7, alpha=0.3, zorder=2)
    axes.plot(*thinned(xs, smooth(ys, window)), style, color=color, linewidth=1.8, label=label, zorder=above)


def smooth(ys: Array, window: int) -> Array:
    """A centred running mean that shrinks at the ends instead of inventing points there."""
    sums = np.concatenate(([0.0], np.cumsum(np.where(np.isfinite(ys), ys, 0.0))))
    half = max(0, min(window // 2, (len(ys) - 1) // 2))
    out = np.empty(len(ys))
    inner = slice(half, len(ys) - half)
    np.subtract(sums[2 * half + 1 :], sums[: len(ys) - 2 * half], out=out[inner])
    out[inner] /= 2 * half + 1
    for i in range(half):
        out[i] = sums[2 * i + 1] / (2 * i + 1)
        out[-1 - i] = (sums[-1] - sums[-2 - 2 * i]) / (2 * i + 1)
    return out


def _mark_restarts(axes: Axes, found: History) -> None:
    """A line where the run broke off; a shade over the steps that were done again after it."""
    for failed, color, label in ((True, RED, "restart after a failure"), (False, GREY, "resumed")):
        for i, b in enumerate(b for b in found.breaks if b.failed == failed):
            named = label if i == 0 else None  # once in the legend, however many there are
            axes.axvline(b.reached, color=color, linewidth=0.9, linestyle=(0, (4, 3)), label=named, zorder=2)
            if b.reached > b.resumed_at:
                axes.axvspan(b.resumed_at, b.reached, color=color, alpha=0.06, linewidth=0, zorder=0)


def _fit(axes: Axes, ys: Array) -> None:
    """A single spike among very many must not flatten the rest of the curve; of few points none is left out."""
    finite = ys[np.isfinite(ys)]
    if not finite.size:
        return
    highest = len(finite) - 1 - len(finite) // SPIKE_AMONG
    low, high = float(finite.min()), float(np.partition(finite, highest)[highest])
    pad = 0.05 * ((high - low) or abs(low) or 1.0)
    axes.set_ylim(low - pad, high + pad)


def thinned(xs: Array, ys: Array) -> tuple[Array, Array]:
    """Keeps the lowest and the highest of each bucket, so that no spike is thinned away, and one that is not finite, so
    that no gap in the line is."""
    if len(xs) <= MOST_POINTS:
        return xs, ys
    bucket = -(-2 * len(xs) // MOST_POINTS)
    begins = np.arange(0, len(xs), bucket)
    kept = [
        _first_in_each(begins, ys == np.repeat(best, bucket)[: len(ys)])
        for best in (np.fmin.reduceat(ys, begins), np.fmax.reduceat(ys, begins))
    ]
    kept.append(_first_in_each(begins, np.isnan(ys)))
    rows = np.unique(np.concatenate(kept))
    return xs[rows], ys[rows]


def _first_in_each(begins: Array, which: Array) -> Array:
    """The first place of each bucket where it is true, of those that have one."""
    places = np.flatnonzero(which)
    _, first = np.unique(np.searchsorted(begins, places, side="right"), return_index=True)
    return places[first]
