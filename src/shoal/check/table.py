"""The result of a check as people read it."""

from __future__ import annotations

import textwrap

from shoal.check.check import Result
from shoal.check.rows import bars_of

WIDTH = 110


def table(result: Result) -> str:
    run, shape = result.run, result.run.model
    about = f"{run.steps} steps of {run.train.batch} windows, {run.train.precision} on {run.resources.device}"
    model = f"dim {shape.dim}, {shape.layers} layers"
    cells = [(row.name, row.compared, row.found, "passed" if row.passed else "FAILED") for row in result.rows]
    widths = [max(len(row[i]) for row in cells) for i in range(4)]
    bars = bars_of(run)
    at_most = f"at most {bars.loss:.0e} (loss), {bars.norm:.0e} (norm) of the first step, {bars.later:g} times that of "
    at_most += f"later ones, and {bars.moved:.0e} (how far the weights went) pass"
    lines = [f"{about}; {model}", f"largest relative differences; {at_most}", ""]
    for row, cell in zip(result.rows, cells, strict=True):
        lines.append("  ".join(text.ljust(width) for text, width in zip(cell, widths, strict=True)).rstrip())
        lines += textwrap.wrap(row.why, WIDTH, initial_indent="    ", subsequent_indent="    ") if row.why else []
    failed = result.failed
    return "\n".join([*lines, "", f"not passed: {', '.join(failed)}" if failed else "passed"])
