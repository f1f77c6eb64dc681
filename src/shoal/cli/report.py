"""Where the time went, the curves, what failed and what was done about it.

shoal report demo
shoal report demo --json | jq .ledger
"""

from __future__ import annotations

import argparse
import json

from shoal.cli.options import add_workspace
from shoal.track.rundir import find_run, workspace


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="name of a run, or the path of its directory")
    parser.add_argument("--json", action="store_true", help="everything as JSON, for programs")
    parser.add_argument("--no-png", action="store_true", help="draw no pictures")
    add_workspace(parser)


def run(args: argparse.Namespace) -> int:
    from shoal.observe.report import as_json, as_text, report

    run_dir = find_run(args.run, workspace(args.workspace))
    found = report(run_dir, pictures=not args.no_png)
    print(json.dumps(as_json(found), indent=2) if args.json else as_text(found))
    return 0
