"""`shoal plan validate CASES.csv`: predictions beside what was measured, by source, by machine and over all."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median

from shoal.journal.rundir import workspace
from shoal.plan.validate import Errors, Ranked, Validation, validate


def run(args: argparse.Namespace) -> int:
    found = validate(Path(args.file), folders=[workspace(args.workspace) / "hardware"])
    if args.json:
        print(json.dumps(found.as_json(), indent=2))
    else:
        print("\n".join(_lines(found)))
    return 0


def _lines(found: Validation) -> Iterator[str]:
    yield f"{found.rows} rows, {found.rows - sum(found.refused.values())} of them predicted"
    for why, count in sorted(found.refused.items(), key=lambda item: -item[1]):
        yield f"  refused {count}: {why}"
    groups = {"by source": found.by_source, "by machine": found.by_machine, "overall": {"all rows": found.overall}}
    for title, group in groups.items():
        yield ""
        yield f"{title:<48} {'':<8} rows  median    mean     p90    bias"
        for name, errors in group.items():
            yield from _rows(name, errors)
    yield from _order("in groups of 5 or more runs of one model on one machine", found.ranked)
    yield from _order("in groups where nothing but the layout differs", found.layouts)


def _order(where: str, ranked: Sequence[Ranked]) -> Iterator[str]:
    if not ranked:
        return
    agreed, lost = (sorted(getattr(r, name) for r in ranked) for name in ("spearman", "regret"))
    yield ""
    yield f"Order {where} ({len(ranked)} of them):"
    yield f"  rank correlation of predicted and measured speed: median {median(agreed):.2f}, lowest {agreed[0]:.2f}"
    yield f"  speed lost by taking the run predicted to be the fastest: median {median(lost):.1%}, most {lost[-1]:.1%}"


def _rows(name: str, errors: Mapping[str, Errors | None]) -> Iterator[str]:
    for what in ("speed", "dense", "experts", "memory"):
        e = errors[what]
        if e is None or (what == "dense" and errors["experts"] is None):
            continue
        yield f"{name[:48]:<48} {what:<8} {e.rows:>4}  {e.median:>6.1%}  {e.mean:>6.1%}  {e.p90:>6.1%}  {e.bias:>+6.1%}"
        name = ""
