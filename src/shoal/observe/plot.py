"""Curves in the terminal: braille dots, 2 x 4 of them a character, with the numbers on the axes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from shoal import readable
from shoal.journal.columns import Array

Points = Sequence[tuple[float, float]]
# Unicode numbers the dots of a braille cell column by column, with the lowest row added later.
_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
_BLANK = 0x2800
_FEW = 12  # points that are each worth a mark of their own
_POINT = "•"
_LOG_FROM = 1000.0  # largest over smallest value: from here on a linear axis shows one point and a flat line
_LARGEST = 1e150  # beyond it the difference of two numbers may be none
NOTHING = "(nothing to draw)"
WIDTH = 64  # characters


def shown(xs: Array, ys: Array, among: Iterable[float] = (), columns: int = 2 * WIDTH) -> Points:
    """Of very many points those that a plot of so many columns shows: of each column, and each stretch of numbers in
    it, the first, the lowest, the highest and the last. A line through them looks as one through all of them does (M4:
    Jugel et al., VLDB 7(10), 2014). `xs` ascend; `among` are the x of what else is in the plot."""
    if len(xs) <= 4 * columns:
        return list(zip(xs.tolist(), ys.tolist(), strict=True))
    finite = np.isfinite(ys)
    edge = np.array([*xs[finite][:1].tolist(), *xs[finite][-1:].tolist(), *among] or [0.0])
    column = np.rint((xs - edge.min()) / (np.ptp(edge) or 1.0) * (columns - 1))
    edges = np.flatnonzero((np.diff(column) != 0) | (np.diff(finite) != 0)) + 1
    begins = np.concatenate(([0], edges))
    lengths = np.diff(np.append(begins, len(xs)))
    kept = [begins, begins + lengths - 1]
    for best in (np.fmin.reduceat(ys, begins), np.fmax.reduceat(ys, begins)):
        places = np.flatnonzero(ys == np.repeat(best, lengths))
        kept.append(places[np.unique(np.searchsorted(begins, places, side="right"), return_index=True)[1]])
    rows = np.unique(np.concatenate(kept))
    return list(zip(xs[rows].tolist(), ys[rows].tolist(), strict=True))


def plot(
    line: Points,
    marks: Points = (),
    breaks: Sequence[float] = (),
    from_zero: bool = False,
    width: int = WIDTH,
    height: int = 10,
) -> str:
    """`line` is joined up (not over what is not finite), `marks` are drawn as o, `breaks` are x where a vertical line
    goes. Few points are marked each."""
    pieces = _pieces(line)
    marks = [p for piece in _pieces(marks) for p in piece]
    every = [p for piece in pieces for p in piece]
    if not every:
        return NOTHING
    frame = _Frame.of([*every, *marks], from_zero, 2 * width, 4 * height)
    cells = [[_BLANK] * width for _ in range(height)]

    def paint(column: int, row: int) -> None:
        cells[row // 4][column // 2] |= _DOTS[column % 2][row % 4]

    for x in breaks:
        if frame.x_low <= x <= frame.x_high:
            for row in range(0, 4 * height, 2):
                paint(frame.column(x), row)
    for piece in pieces:
        for column, (top, bottom) in _strokes([frame.dot(x, y) for x, y in piece]).items():
            for row in range(top, bottom + 1):
                paint(column, row)
    text = [[chr(c) for c in row] for row in cells]
    for mark, points in ((_POINT, every if len(every) <= _FEW else ()), ("o", marks)):
        for column, row in (frame.dot(x, y) for x, y in points):
            text[row // 4][column // 2] = mark
    return frame.around(text)


def plot_many(lines: Sequence[tuple[str, Points]], width: int = WIDTH, height: int = 14) -> str:
    """Several curves, each in its own letter; where they meet the first one is seen."""
    pieces = [(mark, _pieces(line)) for mark, line in lines]
    every = [p for _, parts in pieces for piece in parts for p in piece]
    if not every:
        return NOTHING
    frame = _Frame.of(every, False, width, height)
    text = [[" "] * width for _ in range(height)]
    for mark, parts in reversed(pieces):
        for piece in parts:
            for column, (top, bottom) in _strokes([frame.dot(x, y) for x, y in piece]).items():
                for row in range(top, bottom + 1):
                    text[row][column] = mark
    return frame.around(text)


@dataclass(frozen=True)
class _Frame:
    """The part of the plane that is drawn, and on how many dots."""

    x_low: float
    x_high: float
    y_low: float
    y_high: float
    log: bool
    columns: int
    rows: int

    @classmethod
    def of(cls, points: Points, from_zero: bool, columns: int, rows: int) -> _Frame:
        xs, ys = [x for x, _ in points], [y for _, y in points]
        low, high = min(ys), max(ys)
        log = not from_zero and low > 0 and high / low > _LOG_FROM
        if from_zero:
            low, high = min(0.0, low), max(0.0, high)
        if low == high:  # a flat line goes through the middle
            pad = abs(low) / 10 or 1.0
            low, high = low - pad, high + pad
        return cls(min(xs), max(xs), low, high, log, columns, rows)

    def column(self, x: float) -> int:
        if self.x_low == self.x_high:
            return self.columns // 2
        return round((x - self.x_low) / (self.x_high - self.x_low) * (self.columns - 1))

    def dot(self, x: float, y: float) -> tuple[int, int]:
        """Column and row, the highest value on row 0."""
        low, high = self.y_low, self.y_high
        if self.log:
            y, low, high = math.log(y), math.log(low), math.log(high)
        return self.column(x), round((high - y) / (high - low) * (self.rows - 1))

    def around(self, rows: list[list[str]]) -> str:
        """The picture with its axes."""
        y = list(_different(self.y_high, self.y_low))
        labels = [y[0], *[""] * (len(rows) - 2), y[1]] if len(rows) > 1 else [y[0]]
        if self.log and len(rows) > 2:
            labels[len(rows) // 2] = "log"
        margin = max(map(len, labels))
        lines = [f"{label:>{margin}} ┤{''.join(row).rstrip()}" for label, row in zip(labels, rows, strict=True)]
        width = len(rows[0])
        first, last = _step(self.x_low), _step(self.x_high)
        below = f"{first:^{width}}" if self.x_low == self.x_high else f"{first:<{width - len(last)}}{last}"
        return "\n".join([*lines, f"{'':>{margin}} └{'─' * width}", f"{'':>{margin}}  {below}".rstrip()])


def _step(x: float) -> str:
    """A step is a whole number, and people look for it in the table: 12,345 and not 12.3k."""
    return f"{round(x):,}" if abs(x) < 1e6 else readable.count(x)


def _different(high: float, low: float) -> tuple[str, str]:
    """Both as people read them, with as many digits as tell them apart."""
    said = _number(high), _number(low)
    for digits in range(4, 16):
        if said[0] != said[1]:
            break
        said = f"{high:.{digits}g}", f"{low:.{digits}g}"
    return said


def _number(y: float) -> str:
    return readable.count(y) if abs(y) < 1e15 else f"{y:.2g}"


def _pieces(line: Points) -> list[list[tuple[float, float]]]:
    """The stretches of a line between what is not finite."""
    found: list[list[tuple[float, float]]] = [[]]
    for x, y in line:
        if math.isfinite(y):
            found[-1].append((x, max(-_LARGEST, min(_LARGEST, y))))
        elif found[-1]:
            found.append([])
    return [piece for piece in found if piece]


def _strokes(dots: list[tuple[int, int]]) -> dict[int, tuple[int, int]]:
    """Of each column the highest and the lowest row that the joined-up line has there: a million points cost no more to
    draw than the eye can see, and no spike is lost."""
    found: dict[int, tuple[int, int]] = {}
    for column, row in _joined(dots):
        top, bottom = found.get(column, (row, row))
        found[column] = (min(top, row), max(bottom, row))
    return found


def _joined(dots: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """The dots, and those between two that are more than one column or row apart."""
    yield dots[0]
    for (c0, r0), (c1, r1) in itertools.pairwise(dots):
        steps = max(abs(c1 - c0), abs(r1 - r0), 1)
        for i in range(1, steps + 1):
            yield round(c0 + (c1 - c0) * i / steps), round(r0 + (r1 - r0) * i / steps)
