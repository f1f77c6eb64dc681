"""Many runs of one run file, a grid or a random search, and a table of how they did.

shoal sweep run.yaml --grid train.optimizer.lr=1e-3,3e-4 --grid train.batch=16,32
shoal sweep run.yaml --random 20 --range train.optimizer.lr=1e-4..1e-2:log --stop-early --on slurm --at-once 4
shoal sweep --status NAME        how it goes, at any time

Runs are called NAME-000, NAME-001, …, and are runs as any other (`shoal ps`, `logs`, `report`). Ctrl-C leaves those
that were sent alone; the same command goes on with the sweep and sends nothing twice.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path

from shoal import readable
from shoal.cli.launch import rendered
from shoal.cli.options import BACKENDS, add_workspace
from shoal.decide.load import load
from shoal.errors import DONE, TRANSIENT, UsageError
from shoal.journal.rundir import workspace
from shoal.launch.backend import Rendered, backend
from shoal.launch.grid import drawn, grid
from shoal.launch.request import Request
from shoal.launch.send import checked, request_of, where_known
from shoal.launch.sweep import Drive, Row, Sweep, arrays, rows

TAKES_OVERRIDES = True
OWN_OPTIONS = ("seed", "grid", "range")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="RUN.yaml", nargs="?", help="the run file (`shoal init` writes one)")
    parser.add_argument(
        "--grid", metavar="NAME=A,B", action="append", default=[], help="every value of it; again for another name"
    )
    parser.add_argument("--random", metavar="N", type=int, help="so many drawn at random instead of every combination")
    parser.add_argument(
        "--range",
        metavar="NAME=A..B",
        action="append",
        default=[],
        help="with --random: drawn from it; `:log` at the end",
    )
    parser.add_argument("--seed", metavar="S", type=int, default=0, help="of the draws (default 0)")
    parser.add_argument("--at-once", metavar="K", type=int, help="runs at the same time (default: all; here: 1)")
    parser.add_argument(
        "--stop-early", action="store_true", help="stop the worse half at 1/8, 1/4 and 1/2 of the steps"
    )
    parser.add_argument("--on", choices=BACKENDS, help="who starts them; the same as launch.on=…")
    parser.add_argument("--status", metavar="NAME", help="only the table of that sweep")
    parser.add_argument("--render", action="store_true", help="print what would be sent, and send nothing")
    parser.add_argument("--json", action="store_true", help="the table as an object, for programs")
    parser.add_argument("--name", metavar="NAME", help="another name for the sweep: name=NAME")
    add_workspace(parser)


def run(args: argparse.Namespace) -> int:
    folder = workspace(args.workspace)
    if args.status is not None:
        return _show(rows(Sweep.read(args.status, folder), folder), args.json)
    if args.file is None:
        raise UsageError("name the run file, or a sweep to look at with --status NAME; see `shoal sweep --help`.")
    if args.at_once is not None and args.at_once < 1:
        raise UsageError(f"--at-once {args.at_once}: give a number from 1 on.")
    points = _points(args)
    chosen = [*args.overrides, *([] if args.on is None else [f"launch.on={args.on}"])]
    base = where_known(load(args.file, chosen).run, folder)
    if base.own.launcher is not None:
        raise UsageError(
            f"a sweep is not sent by own.launcher {base.own.launcher}: leave it out and set launch.on, or launch the "
            "runs one by one."
        )
    sweep = Sweep.of(base.name, points, base, args.stop_early, folder)
    together = [f"track.group={base.name}"] if base.track.group is None else []
    requests = {
        name: request_of(checked(load(args.file, [*together, *chosen, *point, f"name={name}"]).run), folder)
        for name, point in sweep.points.items()
    }
    at_once = args.at_once or (1 if base.launch.on == "local" else len(requests))
    if args.render:
        print(_rendered(requests, base.launch.on, at_once), end="")
        return 0
    sweep.save()
    return _drive(sweep, requests, at_once, folder, args.json)


def _points(args: argparse.Namespace) -> list[tuple[str, ...]]:
    if args.random is not None:
        return drawn(args.grid, args.range, args.random, args.seed)
    if args.range:
        raise UsageError("--range is drawn from: say how often with --random N.")
    return grid(args.grid)


def _drive(sweep: Sweep, requests: dict[str, Request], at_once: int, folder: Path, as_json: bool) -> int:
    try:
        Drive(sweep, requests, at_once, lambda text: print(text, file=sys.stderr, flush=True)).run()
    except KeyboardInterrupt:
        print(
            f"shoal: runs that were sent go on; the same command goes on with the sweep, `shoal sweep --status "
            f"{sweep.name}` shows it, `shoal stop RUN` ends one.",
            file=sys.stderr,
        )
        raise
    found = rows(sweep, folder)
    _show(found, as_json)
    return DONE if all(row.status in ("finished", "stopped early") for row in found) else TRANSIENT


def _rendered(requests: dict[str, Request], on: str, at_once: int) -> str:
    of = backend(on)
    if (array := arrays(of)) is not None and len(requests) > 1:
        return rendered(array.render_array(list(requests.values()), at_once))
    parts = [
        Rendered(f"{name}/{part.name}", part.text) for name, request in requests.items() for part in of.render(request)
    ]
    return rendered(parts)


def _show(found: list[Row], as_json: bool) -> int:
    if as_json:
        print(json.dumps([_as_json(row) for row in found], indent=2))
        return 0
    keys = list(dict.fromkeys(override.partition("=")[0] for row in found for override in row.point))
    table = [["RUN", *keys, "STATUS", "STEP", "LOSS", "EVAL", "WHY"]]
    for row in found:
        values = dict(override.partition("=")[::2] for override in row.point)
        losses = [readable.number(row.loss), readable.number(row.eval_loss)]
        table.append([row.run, *(values.get(key, "-") for key in keys), row.status, str(row.step), *losses, row.why])
    widths = [max(len(line[i]) for line in table) for i in range(len(table[0]) - 1)]
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    for cells in table:
        line = "  ".join([*(cell.ljust(width) for cell, width in zip(cells, widths, strict=False)), cells[-1]])
        print(line if columns is None or len(line) <= columns else line[: columns - 1] + "…")
    return 0


def _as_json(row: Row) -> dict[str, object]:
    return {
        "run": row.run,
        "overrides": list(row.point),
        "status": row.status,
        "step": row.step,
        "loss": readable.json_number(row.loss),
        "eval_loss": readable.json_number(row.eval_loss),
        "on": row.on,
        "why": row.why,
    }
