"""Curves in the terminal: braille dots, 2 x 4 of them a character, with the numbers on the axes. No dependency."""

from __future__ import annotations

import math
from collections.abc import Sequence

from shoal.observe import words

Points = Sequence[tuple[float, float]]
# Unicode numbers the dots of a braille cell column by column, with the lowest row added later.
_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
_BLANK = 0x2800


def plot(
    line: Points,
    marks: Points = (),
    breaks: Sequence[float] = (),
    from_zero: bool = False,
    width: int = 64,
    height: int = 10,
) -> str:
    """`line` is joined up, `marks` are drawn as o, `breaks` are x where a vertical line goes."""
    line = [(x, y) for x, y in line if math.isfinite(y)]
    marks = [(x, y) for x, y in marks if math.isfinite(y)]
    if not line:
        return "(nothing to draw)"
    xs, ys = [x for x, _ in (*line, *marks)], [y for _, y in (*line, *marks)]
    x_low, x_high, y_low, y_high = min(xs), max(xs), 0.0 if from_zero else min(ys), max(ys)
    x_scale = (2 * width - 1) / ((x_high - x_low) or 1.0)
    y_scale = (4 * height - 1) / ((y_high - y_low) or 1.0)

    def dot(x: float, y: float) -> tuple[int, int]:
        return round((x - x_low) * x_scale), round((y_high - y) * y_scale)

    cells = [[_BLANK] * width for _ in range(height)]

    def paint(column: int, row: int) -> None:
        cells[row // 4][column // 2] |= _DOTS[column % 2][row % 4]

    for x in breaks:
        if x_low <= x <= x_high:
            for row in range(0, 4 * height, 2):
                paint(dot(x, y_high)[0], row)
    # All points of one dot column become one stroke from the lowest to the highest: a million points cost no more
    # to draw than the eye can see, and no spike is lost.
    columns: dict[int, tuple[int, int]] = {}
    before: int | None = None
    for column, row in (dot(x, y) for x, y in line):
        low, high = columns.get(column, (row, row))
        if before is not None:  # reach half-way to the neighbour, so that a steep line stays joined
            low, high = min(low, before + (before < row)), max(high, before - (before > row))
        columns[column] = (min(low, row), max(high, row))
        before = row
    for column, (low, high) in columns.items():
        for row in range(low, high + 1):
            paint(column, row)
    text = [[chr(c) for c in row] for row in cells]
    for column, row in (dot(x, y) for x, y in marks):
        text[row // 4][column // 2] = "o"
    return _with_axes(text, (words.count(y_high), words.count(y_low)), (words.count(x_low), words.count(x_high)))


def _with_axes(rows: list[list[str]], y: tuple[str, str], x: tuple[str, str]) -> str:
    margin = max(map(len, y))
    labels = [y[0], *[""] * (len(rows) - 2), y[1]] if len(rows) > 1 else [y[0]]
    lines = [f"{label:>{margin}} ┤{''.join(row)}" for label, row in zip(labels, rows, strict=True)]
    width = len(rows[0])
    return "\n".join([*lines, f"{'':>{margin}} └{'─' * width}", f"{'':>{margin}}  {x[0]:<{width - len(x[1])}}{x[1]}"])
