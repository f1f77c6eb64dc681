"""What tasks have shown of a run, step by step: `tasks` and `samples` records as people read them.

A record holds figures: of each task and measure a value and its 95% interval. They come from the trainer
(`eval.tasks`) and from `shoal eval RUN`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from shoal.journal.journal import Record

MOST_NAMED = 3  # figures in a line; more are in a table
MOST_WORDS = 60  # letters of a sample in a line


@dataclass(frozen=True)
class Point:
    step: int
    value: float
    low: float
    high: float
    n: int


@dataclass(frozen=True)
class Series:
    """One measure of one task over the steps; of a step the newest counts."""

    task: str
    measure: str
    higher_is_better: bool
    points: tuple[Point, ...]

    @property
    def best(self) -> Point | None:
        finite = [point for point in self.points if math.isfinite(point.value)]
        sign = 1 if self.higher_is_better else -1
        return max(finite, key=lambda point: (sign * point.value, -point.step)) if finite else None


def series(records: Iterable[Record]) -> list[Series]:
    """In the order in which they came up."""
    found: dict[tuple[str, str], dict[int, Point]] = {}
    better: dict[tuple[str, str], bool] = {}
    for record in records:
        step = int(record["step"])
        for one in record["figures"]:
            key = (one["task"], one["measure"])
            better[key] = bool(one.get("higher_is_better", True))
            low, high = (float(one.get(name, "nan")) for name in ("low", "high"))
            found.setdefault(key, {})[step] = Point(step, float(one["value"]), low, high, int(one["n"]))
    return [Series(*key, better[key], tuple(points[step] for step in sorted(points))) for key, points in found.items()]


def sentence(record: Record) -> str:
    """`arithmetic exact_match 0.415 (0.348 to 0.485), copy exact_match 0.02 (0.008 to 0.05)`."""
    figures = record["figures"]
    told = [
        f"{one['task']} {one['measure']} {_figure(one['value'])}{_bounds(one.get('low'), one.get('high'))}"
        for one in figures[:MOST_NAMED]
    ]
    more = len(figures) - len(told)
    return ", ".join(told) + (f" and {more} more" if more > 0 else "")


def table(found: Sequence[Series]) -> list[str]:
    """A line for each measure: at its last step, and at its best."""
    names = [f"{one.task} {one.measure}" for one in found]
    wide = max(map(len, names), default=0)
    lines = []
    for name, one in zip(names, found, strict=True):
        last, best = one.points[-1], one.best
        at_best = f", {_figure(best.value)} at best (step {best.step})" if best and best.value != last.value else ""
        bounds = _bounds(last.low, last.high)
        lines.append(f"{name:<{wide}}  {_figure(last.value)}{bounds} of {last.n:,} at step {last.step}{at_best}")
    return lines


def first_words(record: Record) -> str:
    one = record["texts"][0]
    return f"writes {cut(one['prompt'] + one['text'], MOST_WORDS)!r}"


def written(record: Record, most: int) -> list[str]:
    """The samples of a step: a prompt, and what the model made of it."""
    lines = [f"samples at step {record['step']}"]
    for one in record["texts"][:most]:
        end = f" [{one['end']}]" if one.get("end") not in (None, "", "length") else ""
        lines.append(f"  {plain(one['prompt'])} → {plain(one['text'])}{end}")
    if (more := len(record["texts"]) - most) > 0:
        lines.append(f"  and {more} more (--json has them)")
    return lines


def plain(text: str) -> str:
    """For a terminal: what a model writes may hold its control sequences."""
    return "".join(c if c.isprintable() else " " if c in "\n\t" else "\ufffd" for c in text)


def cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _bounds(low: object, high: object) -> str:
    if low is None or high is None or math.isnan(float(str(low))):
        return ""
    return f" ({_figure(low)} to {_figure(high)})"


def _figure(value: object) -> str:
    """A share to four places, a perplexity as short as it can be."""
    number = float(str(value))
    return f"{number:.4f}" if abs(number) < 100 else f"{number:,.0f}" if abs(number) < 1e6 else f"{number:.3g}"
