"""Print the logs of a run's processes, merged, each line with its rank; -f follows them and the run's progress.

shoal logs demo -n 50
shoal logs demo -f --rank 1
"""

from __future__ import annotations

import argparse
import sys

from shoal.track.rundir import find_run, workspace


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="name of a run, or the path of its directory")
    parser.add_argument("-f", "--follow", action="store_true", help="go on as lines and steps come, until the run ends")
    parser.add_argument("-n", "--lines", type=int, metavar="N", help="only the last N lines (with -f: 20 unless told)")
    parser.add_argument("--rank", type=int, metavar="N", help="only this rank")
    parser.add_argument("--island", type=int, metavar="N", help="only this island (lines begin with ISLAND.RANK)")
    parser.add_argument("--attempt", type=int, metavar="N", help="this attempt; default: the newest")
    parser.add_argument(
        "--workspace", metavar="DIR", help="folder that holds runs/; else $SHOAL_WORKSPACE, else this one"
    )


def run(args: argparse.Namespace) -> int:
    from shoal.observe.logs import follow, merged

    run_dir = find_run(args.run, workspace(args.workspace))
    if args.follow:
        lines = follow(run_dir, args.rank, args.attempt, 20 if args.lines is None else args.lines, args.island)
    else:
        lines = merged(run_dir, args.rank, args.attempt, args.lines, args.island)
    shown = 0
    for shown, line in enumerate(lines, 1):  # noqa: B007  # how many there were is asked below
        sys.stdout.write(line + "\n")
        if args.follow:
            sys.stdout.flush()
    if not shown:
        print(
            "shoal: the processes of this attempt printed nothing; `shoal logs -f` tells how the run goes, "
            "--attempt N shows another attempt.",
            file=sys.stderr,
        )
    return 0
