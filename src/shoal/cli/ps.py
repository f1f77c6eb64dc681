"""List the runs of a workspace and what each is doing, the newest last; of one, why it waits, died and what it cost.

shoal ps               all of them, launched ones with what their scheduler says
shoal ps --sort loss   the best first; also name, status, step, speed, age
shoal ps demo          three sentences: what it waits for or does, what ended it last, what it has cost so far
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.cli.options import add_workspace
from shoal.journal.rundir import workspace

SORTS = ("age", "name", "status", "step", "loss", "speed")

if TYPE_CHECKING:
    from shoal.journal.rundir import RunDir
    from shoal.launch.watch import Seen
    from shoal.observe.status import Status


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="NAME", nargs="?", help="only this one, in three sentences")
    parser.add_argument("--sort", choices=SORTS, default="age", help="what the list is sorted by (default: age)")
    parser.add_argument("--reverse", action="store_true", help="the other way round")
    parser.add_argument("--json", action="store_true", help="a list of objects (of one run: an object), for programs")
    add_workspace(parser)


def run(args: argparse.Namespace) -> int:
    folder = workspace(args.workspace)
    if args.run is not None:
        return _one(args.run, folder, args.json)
    found = sorted(_all(folder), key=lambda pair: _by(args.sort, pair[0]), reverse=args.reverse)
    if args.json:
        print(json.dumps([s.as_json() if seen is None else seen.as_json() for s, seen in found], indent=2))
        return 0
    if not found:
        print(f"no runs in {folder / 'runs'}; `shoal train RUN.yaml` starts one.")
        return 0
    _table(found)
    if any(status.status in ("stopped", "failed", "dead") for status, _ in found):
        print("`shoal ps NAME` says why and what to do; `shoal resume NAME` goes on")
    return 0


def _by(what: str, s: Status) -> tuple[bool, float | str]:
    """What is not known comes last."""
    value: float | str | None
    match what:
        case "name" | "status":
            value = s.name if what == "name" else s.status
        case "step":
            value = s.step
        case "loss":
            value = None if s.loss is None or math.isnan(s.loss) else s.loss
        case "speed":
            value = None if s.tokens_per_s is None else -s.tokens_per_s
        case _:
            value = s.started
    return (True, 0.0) if value is None else (False, value)


def _all(folder: Path) -> list[tuple[Status, Seen | None]]:
    from shoal.launch.job import FILE
    from shoal.observe.status import damaged, statuses

    if not any((folder / "runs").glob(f"*/{FILE}")):
        return [(s, None) for s in statuses(folder)]
    from shoal.launch.watch import jobs_in, look  # and with it schedulers: others need not wait for them

    jobs, wrong = jobs_in(folder)
    wrong = {name: why.replace(f"{folder / 'runs' / name}/", "") for name, why in wrong.items()}  # short: for a table
    launched = look(jobs.values(), folder)
    found: list[tuple[Status, Seen | None]] = [(s, None) for s in statuses(folder, without=jobs)]
    found += [(seen.status, seen) for seen in launched.values()]
    found = [(_with(status, wrong.pop(status.name, None)), seen) for status, seen in found]
    for name, why in wrong.items():
        written = (folder / "runs" / name).stat().st_mtime
        found.append((damaged(name, why, written), None))
    return sorted(found, key=lambda pair: pair[0].started)


def _with(status: Status, wrong: str | None) -> Status:
    """What its journal says, after what is wrong beside it."""
    return status if wrong is None else replace(status, why=f"damaged: {wrong.rstrip('.')}; {status.why}")


def _table(found: list[tuple[Status, Seen | None]]) -> None:
    from shoal import readable

    now, launched = time.time(), any(seen for _, seen in found)
    rows = [["NAME", "STATUS", "ON", "STEP", "LOSS", "TOKENS/S", "AGE", "WHY"]]
    for s, seen in found:
        step = f"{s.step}/{s.total}" if s.total else str(s.step)
        speed = "-" if s.tokens_per_s is None else readable.count(s.tokens_per_s)
        age = readable.duration(max(0.0, now - s.started))
        rows.append(
            [
                s.name,
                s.status,
                seen.on if seen else "-",
                step,
                readable.number(s.loss),
                speed,
                age,
                readable.clause(s.why),
            ]
        )
    if not launched:  # on a laptop the column would say nothing
        rows = [row[:2] + row[3:] for row in rows]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
    # On a terminal a line that wraps makes the table unreadable; the whole sentence is in `ps NAME` and --json.
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    for row in rows:
        line = "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]])
        print(line if columns is None or len(line) <= columns else line[: columns - 1] + "…")


def _one(name: str, folder: Path, as_json: bool) -> int:
    from shoal.journal.reading import Told, told
    from shoal.journal.rundir import find_run
    from shoal.launch.job import launched, run_file
    from shoal.launch.price import stated
    from shoal.launch.why import answer
    from shoal.observe.status import status_of

    job = launched(name, folder)
    seen = None
    if job is None:
        run_dir = find_run(name, folder)
    else:
        from shoal.launch.watch import look, visible  # and with it schedulers: others need not wait for them

        seen, run_dir = look([job], folder)[job.run], visible(job, folder)
    status = status_of(run_dir) if seen is None else seen.status
    if run_dir.is_batch:
        return _batch(run_dir, status, seen, as_json)
    known = told(run_dir.journal_file) if run_dir.exists() else Told([])
    if known.odd.count:
        print(f"shoal: {known.odd}.", file=sys.stderr)
    file = run_dir.spec_file if job is None else run_file(job, folder)
    said = answer(status, seen, known, stated(file) if file.exists() else None)
    print(json.dumps({**(seen or status).as_json(), **said.as_json()}, indent=2) if as_json else said)
    return 0


def _batch(run_dir: RunDir, status: Status, seen: Seen | None, as_json: bool) -> int:
    from shoal.journal.tail import tail
    from shoal.observe.batch import page_of
    from shoal.observe.status import TAIL_BYTES

    page = page_of(run_dir, status.status, status.why, tail(run_dir.journal_file, TAIL_BYTES[0]))
    print(json.dumps({**(seen or status).as_json(), **page.as_json()}, indent=2) if as_json else page.as_text())
    return 0
