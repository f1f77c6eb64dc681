"""Break a real run on purpose, and report what it cost.

The run file is trained twice in a folder of the drill's own: once as it is, once with faults at moments that the seed
chooses. Your runs, trackers and stores are not touched. A run file with a section `script:` is run in copies of the
folder that it runs in, and may be broken by kill, stop, preempt and coordinator.

shoal drill run.yaml --scenario kill --count 3 --seed 7 train.steps=200
shoal drill run.yaml --scenario kill,preempt,bitflip
shoal drill run.yaml --scenario mix --count 8 --json
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

from shoal.decide.checks import local_inputs, trainable
from shoal.decide.length import with_steps
from shoal.decide.load import load
from shoal.drill.plan import MIX, SCENARIOS, plan
from shoal.errors import DONE, TRANSIENT, UsageError
from shoal.held_signals import stoppable
from shoal.journal.rundir import workspace

TAKES_OVERRIDES = True
OWN_OPTIONS = ("seed",)  # the drill's; that of the run is `seed=…`


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="RUN.yaml", help="the run file; it should take a minute or so, not a week")
    kinds = "; ".join(f"{name}: {what}" for name, what in SCENARIOS.items())
    parser.add_argument(
        "--scenario", default="kill", metavar="NAME,…", help=f"{kinds}; {MIX}: all that apply, by chance"
    )
    parser.add_argument("--count", type=int, metavar="N", help="how many faults (each scenario once)")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="chooses the moments and the victims (0)")
    parser.add_argument(
        "--pause", type=float, default=15.0, metavar="SECONDS", help="how long stop, slow and partition last"
    )
    parser.add_argument(
        "--pace",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="longer steps, with faults: tiny ones leave no time",
    )
    parser.add_argument(
        "--baseline", metavar="DIR", help="directory of a finished run of the same spec, not to run it first"
    )
    parser.add_argument("--keep", metavar="DIR", help="keep both runs there (`shoal report drill --workspace DIR`)")
    parser.add_argument(
        "--patience", type=float, default=180.0, metavar="SECONDS", help="a run that is silent so long hangs"
    )
    parser.add_argument(
        "--workspace", metavar="DIR", help="where the drill's folder is made (default: $SHOAL_WORKSPACE or here)"
    )
    parser.add_argument("--json", action="store_true", help="the result as JSON, for programs")


def run(args: argparse.Namespace) -> int:
    from shoal.drill.drill import Asked, Result, drill, own_folder
    from shoal.drill.of_script import Result as OfScript
    from shoal.drill.of_script import as_text, refuse
    from shoal.drill.of_script import drill as of_script
    from shoal.drill.table import table

    for name in ("count", "pause", "patience"):
        if (value := getattr(args, name)) is not None and not 0 < value < math.inf:
            raise UsageError(f"--{name} must be more than 0, and a number.")
    if not 0 <= args.pace < math.inf:
        raise UsageError("--pace must be 0 or more, and a number.")
    spec = load(args.file, args.overrides).run
    place = workspace(args.workspace)
    baseline = Path(args.baseline) if args.baseline else None
    if spec.script is not None:
        trainable(spec, "script")
        refuse(args.scenario, args.count, spec, baseline is not None, args.pace)
        planned = []  # once it is known how many steps there are
    else:
        trainable(spec)
        local_inputs(spec)
        spec = with_steps(spec, place)
        planned = plan(args.scenario, spec, args.count, args.seed)
    asked = Asked(args.file, list(args.overrides), spec, planned, baseline, args.pause, args.patience, args.pace)
    for option, path in (("--workspace", place), ("--keep", Path(args.keep or ""))):
        if path.exists() and not path.is_dir():
            raise UsageError(f"{path} is no folder; {option} takes one.")
    place.mkdir(parents=True, exist_ok=True)
    with stoppable(), own_folder(place, Path(args.keep) if args.keep else None) as folder:
        if spec.script is not None:
            result: Result | OfScript = of_script(asked, args.scenario, args.count, args.seed, folder)
        else:
            result = drill(asked, folder)
    if args.json:
        print(json.dumps({"scenario": args.scenario, "seed": args.seed, **result.as_json()}, indent=2))
    else:
        print(table(result) if isinstance(result, Result) else as_text(result))
    return DONE if result.passed else TRANSIENT
