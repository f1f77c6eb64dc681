"""Figures as the journal of a run keeps them (`tasks` of the trainer, `evaluated` of this), and as people read them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shoal.evaluate.compare import Paired
from shoal.evaluate.metrics import MEASURES
from shoal.readable import json_number

if TYPE_CHECKING:
    from shoal.evaluate.ask import Figure
    from shoal.journal.rundir import RunDir


def told(figure: Figure) -> dict[str, Any]:
    """For JSON, where an infinite bound is a word."""
    found = figure.found
    return {
        "task": figure.name,
        "measure": figure.measure,
        "value": json_number(found.mean),
        "low": json_number(found.low),
        "high": json_number(found.high),
        "stderr": json_number(found.stderr),
        "n": found.n,
        **({} if found.clusters is None else {"clusters": found.clusters}),
        "method": found.method,
        "higher_is_better": MEASURES[figure.metric].higher_is_better,
        "weights": figure.model,
        "version": figure.version,
        "asked": figure.asked,
    }


def journaled(run_dir: RunDir, step: int, figures: Sequence[Figure]) -> None:
    """Into the journal of a run, once: what stands there already is not written again."""
    from shoal.journal.journal import Journal, read

    rows = [told(one) for one in figures]
    last = [record.get("figures") for record, _ in read(run_dir.journal_file) if _is_of(record, step)]
    if rows in last:
        return
    journal = Journal(run_dir.journal_file)
    try:
        journal.append("evaluated", step=step, figures=rows, by="shoal eval")
    finally:
        journal.close()


def _is_of(record: Mapping[str, Any], step: int) -> bool:
    return record.get("kind") == "evaluated" and record.get("step") == step


def table(figures: Sequence[Figure]) -> list[str]:
    """A line for each figure, under a heading."""
    rows = [("weights", "task", "metric", "n", "mean", "95% interval", "stderr", "by")]
    rows += [
        (
            one.model,
            one.name,
            one.measure,
            f"{one.found.n:,}" if one.found.clusters is None else f"{one.found.n:,} in {one.found.clusters:,}",
            number(one.found.mean),
            f"{number(one.found.low)} to {number(one.found.high)}",
            number(one.found.stderr),
            one.found.method,
        )
        for one in figures
    ]
    return aligned(rows, right=(3, 4, 6))


def differences(rows: Sequence[tuple[Figure, Figure, Paired, float]]) -> list[str]:
    """Of two models on the same items; the p is the corrected one."""
    lines = [("task", "metric", "n", "difference", "95% interval", "p", "could be seen")]
    lines += [
        (
            a.name,
            a.measure,
            f"{found.n:,}",
            f"{found.difference:+.4g} {MEASURES[a.metric].unit}".rstrip(),
            f"{number(found.low)} to {number(found.high)}",
            f"{p:.3g}",
            number(found.detectable),
        )
        for a, _, found, p in rows
    ]
    return aligned(lines, right=(2, 3, 5, 6))


def aligned(rows: Sequence[Sequence[str]], right: Sequence[int]) -> list[str]:
    wide = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
    return [
        "  ".join(f"{one:>{wide[k]}}" if k in right else f"{one:<{wide[k]}}" for k, one in enumerate(row)).rstrip()
        for row in rows
    ]


def number(value: float) -> str:
    return f"{value:.4f}" if abs(value) < 1000 else f"{value:.4g}"
