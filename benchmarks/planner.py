"""How wrong `shoal plan` is on published runs that it has not seen, and the fit of its few constants.

    python benchmarks/planner.py [RUNS.csv]            leaves out every source in turn, then every machine
    python benchmarks/planner.py [RUNS.csv] --write    also fits the constants to all rows, and writes them and the
                                                       scoreboard (docs/reference/scoreboard.md)

RUNS.csv has the columns of `shoal plan validate`; data/published_runs.csv beside this script does. Bars, on dense rows:
median 12%, 90th percentile 35%; rank correlation 0.85 in groups of five or more; memory 12%. Beside it stands what one
constant for each machine and precision reaches, fitted on the very rows that it is judged by.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import numpy as np

from shoal.plan.case import Cases, Column
from shoal.plan.constants import Constants, names
from shoal.plan.fit import Seen, errors, fit, unseen, weights
from shoal.plan.footprint import footprint
from shoal.plan.published import Published, read
from shoal.plan.validate import Errors, Validation, validate

HERE = Path(__file__).resolve().parents[1]
CONSTANTS = HERE / "src/shoal/plan/constants.toml"
SCOREBOARD = HERE / "docs/reference/scoreboard.md"
PROJECTS = ("Megatron-Bridge", "Megatron-LM", "dgxc-benchmarking", "vTrain", "LLM Foundry", "MaxText", "torchtitan")


@dataclass(frozen=True)
class Rows:
    published: list[Published]
    sources: list[str]
    machines: list[str]
    seen: Seen

    @staticmethod
    def of(published: list[Published]) -> Rows:
        sources = [_family(row.source) for row in published]
        machines = [_kind(row.case.machine.name) for row in published]
        measured = np.array([row.tokens_s for row in published], dtype=float)
        cases = Cases.of([row.case for row in published])
        return Rows(
            published, sources, machines, Seen(cases, measured, weights(list(zip(sources, machines, strict=True))))
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="?", default=HERE / "benchmarks/data/published_runs.csv")
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    found = [row for row in read(args.runs) if isinstance(row, Published)]
    dense = Rows.of([row for row in found if row.dense and row.tokens_s is not None])
    every = Rows.of([row for row in found if row.tokens_s is not None])
    by_source, by_machine = unseen(dense.seen, dense.sources), unseen(dense.seen, dense.machines)
    constants = fit(every.seen)
    whole = validate(args.runs, constants)
    lines = [
        *_table("Each source left out in turn", by_source, dense.sources),
        *_table("Each machine left out in turn", by_machine, dense.machines),
        *_others(found, dense, every, constants, whole),
    ]
    passed = _bars(by_source, by_machine, whole)
    print("\n".join(lines))
    print("\n".join(f"{'PASS' if ok else 'MISS'}  {words}" for ok, words in passed))
    if args.write:
        CONSTANTS.write_text(_toml(constants, len(every.published), by_source))
        SCOREBOARD.write_text(_page(lines, passed, len(found), whole))
        print(f"wrote {CONSTANTS.relative_to(HERE)} and {SCOREBOARD.relative_to(HERE)}")
    return int(not all(ok for ok, _ in passed))


def _family(source: str) -> str:
    """Releases of one project are one source: to leave one of them out and keep the others would be no test."""
    for project in PROJECTS:
        if project.lower() in source.lower():
            return project
    return source


def _kind(machine: str) -> str:
    """40 and 80 GB of one accelerator are one machine type."""
    return machine.split("-")[0].split(" SXM")[0].split(" DGX")[0]


def _table(title: str, found: Column, groups: list[str]) -> list[str]:
    lines = [f"| {title} | rows | median | mean | p90 | bias |", "| --- | --- | --- | --- | --- | --- |"]
    at = defaultdict(list)
    for error, group in zip(found, groups, strict=True):
        at[group].append(error)
    for name, errors_of in [*sorted(at.items()), ("**all**", list(found))]:
        lines.append(f"| {name} | {_row(Errors.of(errors_of))} |")
    return [*lines, ""]


def _row(e: Errors | None) -> str:
    assert e is not None
    return f"{e.rows} | {e.median:.1%} | {e.mean:.1%} | {e.p90:.1%} | {e.bias:+.1%}"


def _others(found: list[Published], dense: Rows, every: Rows, constants: Constants, whole: Validation) -> list[str]:
    sparse = Rows.of([row for row in every.published if not row.dense])
    memory = [row for row in found if row.memory_gb is not None]
    predicted = footprint(Cases.of([row.case for row in memory])).total / 1e9
    beside = {
        "dense rows, constants fitted to all of them": errors(dense.seen, constants),
        "no fit at all: what was expected of the constants": errors(dense.seen, Constants()),
        "baseline: one constant for each machine and precision, in-sample": _baseline(dense),
        "mixtures of experts, constants fitted to all rows": errors(sparse.seen, constants),
        "memory (nothing is fitted)": predicted / np.array([row.memory_gb for row in memory], dtype=float) - 1,
    }
    lines = ["| Beside it | rows | median | mean | p90 | bias |", "| --- | --- | --- | --- | --- | --- |"]
    lines += [f"| {name} | {_row(Errors.of(off))} |" for name, off in beside.items()]
    ranked = [r.spearman for r in whole.ranked]
    layouts = [r.spearman for r in whole.layouts]
    lines += [
        "",
        f"Rank correlation, same model and machine, 5 runs or more: median {median(ranked):.2f} of {len(ranked)}; "
        f"where nothing but the layout differs: {', '.join(f'{r.model} {r.spearman:.2f}' for r in whole.layouts)} "
        f"(median {median(layouts):.2f}), and the layout that was predicted to be the fastest loses "
        f"{', '.join(f'{r.regret:.1%}' for r in whole.layouts)} against the best.",
        "",
    ]
    return lines


def _baseline(rows: Rows) -> Column:
    """Achieved FLOP/s are one constant a machine and precision, the median of the rows themselves."""
    flops = np.array([row.case.net.flops_per_token(row.case.seq, causal=True) for row in rows.published])
    achieved = flops * rows.seen.tokens_s
    keys = [(row.case.machine.name, row.case.precision) for row in rows.published]
    constant = {key: median(a for a, k in zip(achieved, keys, strict=True) if k == key) for key in set(keys)}
    return np.array([constant[key] for key in keys]) / achieved - 1


def _bars(by_source: Column, by_machine: Column, whole: Validation) -> list[tuple[bool, str]]:
    found = []
    for what, off in (("sources", by_source), ("machines", by_machine)):
        e = Errors.of(off)
        assert e is not None
        found.append((e.median <= 0.12, f"unseen {what}: median {e.median:.1%} (bar 12%)"))
        found.append((e.p90 <= 0.35, f"unseen {what}: 90th percentile {e.p90:.1%} (bar 35%)"))
    ranks = median(r.spearman for r in whole.ranked)
    found.append((ranks >= 0.85, f"rank correlation {ranks:.2f} (bar 0.85)"))
    if (memory := whole.overall["memory"]) is not None:
        found.append((memory.median <= 0.12, f"memory: median {memory.median:.1%} of {memory.rows} rows (bar 12%)"))
    return found


def _toml(constants: Constants, rows: int, unseen_errors: Column) -> str:
    values = "\n".join(f"{name} = {asdict(constants)[name]:.4g}" for name in names())
    about = f"# Written by benchmarks/planner.py from {rows} published runs; shoal.plan.constants says what each is."
    low, high = (float(1 / (1 + np.quantile(unseen_errors, q))) for q in (0.9, 0.1))
    spread = (
        f"# Of a prediction, what was measured: 80% of runs of unseen sources lie between.\n[spread]\nlow = {low:.3g}"
    )
    return f"{about}\n\n[constants]\n{values}\n\n{spread}\nhigh = {high:.3g}\n"


def _page(lines: list[str], passed: list[tuple[bool, str]], rows: int, whole: Validation) -> str:
    refused = ", ".join(f"{count} ({why})" for why, count in sorted(whole.refused.items(), key=lambda x: -x[1]))
    bars = "\n".join(f"- {'met' if ok else '**missed**'}: {words}" for ok, words in passed)
    return (
        "# How wrong the planner is\n\n"
        "Written by `python benchmarks/planner.py RUNS.csv --write`; do not edit.\n\n"
        f"{rows} published runs are predicted, {sum(whole.refused.values())} are refused: {refused}. An error is "
        "that of tokens/s a device; every group is predicted by constants that were fitted without it.\n\n"
        f"{bars}\n\n" + "\n".join(lines)
    )


if __name__ == "__main__":
    sys.exit(main())
