"""Where the time went, the curves, what failed and what was done about it; of several runs, which is best and why.

shoal report demo
shoal report demo --json | jq .ledger
shoal report lr-000 lr-001 lr-002      in one picture, the best first, with the settings that differ
shoal report lr                        the same for all runs of a sweep
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from shoal.cli.options import add_workspace
from shoal.errors import UsageError
from shoal.journal.rundir import RunDir, find_run, workspace


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run", metavar="RUN", nargs="+", help="names of runs or of a sweep, or paths of run directories"
    )
    parser.add_argument("--json", action="store_true", help="everything as JSON, for programs")
    parser.add_argument("--no-png", action="store_true", help="draw no pictures")
    add_workspace(parser)


def run(args: argparse.Namespace) -> int:
    folder = workspace(args.workspace)
    if (asked := _asked(args.run, folder)) is not None:
        from shoal.observe import several

        beside = several.several(asked, pictures=not args.no_png)
        print(json.dumps(several.as_json(beside), indent=2) if args.json else several.as_text(beside))
        return 0
    run_dir = find_run(args.run[0], folder)
    if run_dir.is_batch:
        return _batch(run_dir, args.json)
    from shoal.observe.report import as_json, as_text, report

    found = report(run_dir, pictures=not args.no_png)
    print(json.dumps(as_json(found), indent=2) if args.json else as_text(found))
    return 0


def _batch(run_dir: RunDir, as_json: bool) -> int:
    from shoal.journal.tail import tail
    from shoal.observe.batch import page_of, report_text
    from shoal.observe.status import TAIL_BYTES, status_of

    status = status_of(run_dir)
    page = page_of(run_dir, status.status, status.why, tail(run_dir.journal_file, TAIL_BYTES[0]))
    print(json.dumps(page.as_json(), indent=2) if as_json else report_text(page))
    return 0


def _asked(names: list[str], folder: Path) -> list[RunDir] | None:
    """Those to lay beside each other; None where one run alone is asked for."""
    found: dict[Path, RunDir] = {}
    for name in names:
        for run_dir in _of_sweep(name, folder) or [find_run(name, folder)]:
            found[run_dir.path] = run_dir
    if len(found) > 1 and (batch := next((run for run in found.values() if run.is_batch), None)):
        raise UsageError(f"run '{batch.name}' is a batch, which has no curves to lay beside others; report it alone.")
    if len(names) == 1 and len(found) == 1 and not _of_sweep(names[0], folder):
        return None
    return list(found.values())


def _of_sweep(name: str, folder: Path) -> list[RunDir]:
    """The runs of the sweep of that name that have begun; none where it is the name of a run, or of nothing."""
    if "/" in name or RunDir.of(name, folder).exists():
        return []
    from shoal.launch.sweep import Sweep, file_of

    if not file_of(name, folder).exists():
        return []
    begun = [run for run in (RunDir.of(run, folder) for run in Sweep.read(name, folder).points) if run.exists()]
    if not begun:
        raise UsageError(f"no run of sweep '{name}' has begun yet; `shoal sweep --status {name}` shows how it goes.")
    return begun
