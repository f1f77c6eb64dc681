"""`shoal plan validate CASES.csv`: predictions beside what was measured, by source, by machine and over all."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median

from shoal.plan.validate import Errors, Validation, validate


def run(args: argparse.Namespace) -> int:
    found = validate(Path(args.file))
    if args.json:
        print(json.dumps(found.as_json(), indent=2))
    else:
        print("\n".join(_lines(found)))
    return 0


def _lines(found: Validation) -> Iterator[str]:
    yield f"{found.rows} rows, {found.rows - sum(found.refused.values())} predicted"
    for why, count in sorted(found.refused.items(), key=lambda item: -item[1]):
        yield f"  refused {count}: {why}"
    groups = {"by source": found.by_source, "by machine": found.by_machine, "overall": {"all rows": found.overall}}
    for title, group in groups.items():
        yield ""
        yield f"{title:<48} {'':<8} rows  median    mean     p90    bias"
        for name, errors in group.items():
            yield from _rows(name, errors)
    ranks = {"same model and machine": found.ranked, "that differ in nothing but the layout": found.layouts}
    for title, ranked in ranks.items():
        if ranked:
            middle = median(r.spearman for r in ranked)
            lost = median(r.regret for r in ranked)
            yield ""
            yield f"rank correlation, {len(ranked)} groups of 5 or more runs {title}: median {middle:.2f}; "
            yield f"the run predicted to be the fastest is {lost:.1%} slower than the best of its group (median)"


def _rows(name: str, errors: Mapping[str, Errors | None]) -> Iterator[str]:
    for what in ("speed", "dense", "experts", "memory"):
        e = errors[what]
        if e is None or (what == "dense" and errors["experts"] is None):
            continue
        yield f"{name[:48]:<48} {what:<8} {e.rows:>4}  {e.median:>6.1%}  {e.mean:>6.1%}  {e.p90:>6.1%}  {e.bias:>+6.1%}"
        name = ""
