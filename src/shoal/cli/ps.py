"""List the runs of a workspace and what each is doing, the newest last."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time

from shoal.track.rundir import workspace


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="a list of objects, for programs")
    parser.add_argument(
        "--workspace", metavar="DIR", help="folder that holds runs/; else $SHOAL_WORKSPACE, else this one"
    )


def run(args: argparse.Namespace) -> int:
    from shoal.observe import words
    from shoal.observe.status import statuses

    folder, now = workspace(args.workspace), time.time()
    found = statuses(folder)
    if args.json:
        print(json.dumps([s.as_json() for s in found], indent=2))
        return 0
    if not found:
        print(f"no runs in {folder / 'runs'}; `shoal train RUN.yaml` starts one.")
        return 0
    rows = [("NAME", "STATUS", "STEP", "LOSS", "TOKENS/S", "AGE", "WHY")]
    for s in found:
        step = f"{s.step}/{s.total}" if s.total else str(s.step)
        speed = "-" if s.tokens_per_s is None else words.count(s.tokens_per_s)
        age = words.duration(max(0.0, now - s.started))
        rows.append((s.name, s.status, step, words.number(s.loss), speed, age, s.why))
    widths = [max(len(row[i]) for row in rows) for i in range(6)]
    # On a terminal a sentence that wraps makes the table unreadable; a pipe gets it whole.
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    for row in rows:
        line = "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[6]])
        print(line if columns is None or len(line) <= columns else line[: columns - 1] + "…")
    return 0
