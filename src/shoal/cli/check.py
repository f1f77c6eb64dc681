"""Train a run for a few steps in several ways, and compare: does it repeat, resume and split exactly?

Made for own code (`own` in the run file), and right for any run. The run's own model, code and data are trained with a
small batch, in real processes, in a folder that is gone afterwards: twice, stopped and resumed, on two processes, and
in micro-batches. float32 on the CPU unless train.precision or resources.device say otherwise. Exit code 0: all is the
same; 2: something is not, and the line says likely why.

shoal check run.yaml
shoal check run.yaml --steps 10 model.layers=2 own.settings.dropout=0
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from shoal.cli.options import add_workspace
from shoal.decide.checks import local_inputs, trainable
from shoal.decide.load import load
from shoal.errors import DONE, WRONG_USAGE, UsageError
from shoal.held_signals import stoppable
from shoal.journal.rundir import workspace

TAKES_OVERRIDES = True
OWN_OPTIONS = ("steps", "batch")  # the check's; those of the run are replaced by them
FEWEST, MOST = 3, 1000  # before the stop, after it, and one between


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="RUN.yaml", help="the run file; its model has to fit this machine")
    parser.add_argument("--steps", type=int, default=6, metavar="N", help="of each run (6)")
    parser.add_argument("--batch", type=int, default=4, metavar="N", help="windows in a step, an even number (4)")
    parser.add_argument("--keep", metavar="DIR", help="keep the runs there (`shoal report whole --workspace DIR`)")
    parser.add_argument(
        "--patience", type=float, default=600.0, metavar="SECONDS", help="a run that is silent so long hangs (600)"
    )
    add_workspace(parser)
    parser.add_argument("--json", action="store_true", help="the result as JSON, for programs")


def run(args: argparse.Namespace) -> int:
    from shoal.check.check import check, planned
    from shoal.check.table import table
    from shoal.check.trained import train
    from shoal.drill.drill import own_folder
    from shoal.own import record
    from shoal.own.files import files_of

    if not FEWEST <= args.steps <= MOST:
        raise UsageError(f"--steps must be from {FEWEST} to {MOST}: some before the stop, and some after it.")
    if args.batch < 2 or args.batch % 2:
        raise UsageError("--batch must be an even number: two processes share it.")
    if not 0 < args.patience < float("inf"):
        raise UsageError("--patience must be more than 0, and a number.")
    spec = load(args.file, args.overrides).run
    trainable(spec)
    local_inputs(spec)
    place = workspace(args.workspace)
    files = files_of(spec, Path(spec.own.folder or "."))
    told = {override.partition("=")[0] for override in args.overrides}
    todo = planned(spec, args.steps, args.batch, told, place)
    place.mkdir(parents=True, exist_ok=True)
    with stoppable(), own_folder(place, Path(args.keep) if args.keep else None, "check") as folder:
        result = check(todo, lambda job: train(job, folder, args.patience))
    if args.json:
        print(json.dumps(result.as_json(), indent=2))
    else:
        print(table(result))
    if spec.own.objects:
        where = record.file_of(place, spec, files)
        record.write(where, result.as_json())
        if not args.json:
            print(f"recorded in {where}")
    return WRONG_USAGE if result.failed else DONE
