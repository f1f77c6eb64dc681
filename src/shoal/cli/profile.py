"""Trace a few steps of a run's own trainer, and say where the time goes and what to fix next.

  shoal profile run.yaml                       5 steps after 5 to warm up, as `shoal train` would take them
  shoal profile run.yaml mesh.micro_batch=8    any value of the run file
  shoal profile --trace FILE                   read an earlier trace again (another trainer's too)

Nothing of the run is touched: no run directory, no checkpoint. The traces open in Perfetto.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.cli.options import add_workspace
from shoal.errors import UsageError
from shoal.journal.rundir import workspace

if TYPE_CHECKING:
    from shoal.profile.analyse import Analysis

TAKES_OVERRIDES = True
PERFETTO = "https://ui.perfetto.dev"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="RUN.yaml", nargs="?", help="the run file")
    parser.add_argument("--steps", type=int, default=5, metavar="N", help="steps to trace (5)")
    parser.add_argument("--warmup", type=int, default=5, metavar="N", help="steps before them, untraced (5)")
    parser.add_argument("--trace", metavar="FILE", help="no run: analyse this trace of torch's profiler again")
    parser.add_argument("--out", metavar="DIR", help="an empty folder for traces and result (profiles/NAME-TIME)")
    parser.add_argument("--processes", type=int, metavar="N", help="the same as resources.processes=N")
    parser.add_argument("--json", action="store_true", help="the analysis as JSON, all kernels and all ranks")
    add_workspace(parser, "profiles/")


def run(args: argparse.Namespace) -> int:
    for name in ("steps", "warmup"):
        if getattr(args, name) < 1:
            raise UsageError(f"--{name} is {getattr(args, name)}, but 1 is the least it can be.")
    if args.trace:
        if args.file or args.overrides:
            raise UsageError("--trace reads a trace that exists; leave the run file and its values out.")
        return _tell(args, _analyse(args, [Path(args.trace)]))
    if not args.file:
        raise UsageError("say which run file to profile, or which trace to read (--trace FILE).")
    return _profile(args)


def _profile(args: argparse.Namespace) -> int:
    from shoal.decide.auto import decide
    from shoal.decide.checks import local_inputs, trainable
    from shoal.decide.load import load
    from shoal.profile import processes

    overrides = list(args.overrides)
    if args.processes is not None:
        overrides.append(f"resources.processes={args.processes}")
    spec = load(args.file, overrides).run
    trainable(spec)
    local_inputs(spec)
    if (islands := spec.fleet.islands) > 1:
        share = max(1, spec.train.batch // islands)
        raise UsageError(
            f"fleet.islands is {islands}, and a profile shows one of them: add `fleet.islands=1 train.batch={share}`."
        )
    place = workspace(args.workspace)
    decided = decide(spec, place)
    many = f"{decided.world} process{'es' * (decided.world > 1)} on {decided.run.resources.device}"
    said = f"profiling {spec.name}: {many}, {args.steps} steps after {args.warmup} to warm up"
    print(said, file=sys.stderr if args.json else sys.stdout, flush=True)
    with processes.own_folder(args.out, place, spec.name) as folder:
        traces = processes.trace(decided.run, decided.world, place, folder, args.steps, args.warmup)
    ranks = _analyse(args, traces)
    (folder / processes.RESULT).write_text(json.dumps(_as_json(ranks), indent=1) + "\n")
    return _tell(args, ranks)


def _analyse(args: argparse.Namespace, traces: Sequence[Path]) -> list[Analysis]:
    from shoal.profile.analyse import analyse

    return [analyse(file, [workspace(args.workspace) / "hardware"]) for file in traces]


def _tell(args: argparse.Namespace, ranks: list[Analysis]) -> int:
    from shoal.profile.analyse import slowest
    from shoal.profile.render import report

    if args.json:
        print(json.dumps(_as_json(ranks), indent=1))
        return 0
    print(report(ranks))
    others = f" ({len(ranks)} ranks beside each other there)" if len(ranks) > 1 else ""
    print(f"trace: {os.path.relpath(slowest(ranks).file)}{others}; open it in {PERFETTO}")
    return 0


def _as_json(ranks: list[Analysis]) -> dict[str, object]:
    from shoal.profile.advice import advice
    from shoal.profile.analyse import slowest

    slow = slowest(ranks)
    best = advice(slow)
    return {
        "format": 1,
        "slowest_rank": slow.rank,
        "accounted": min(rank.accounted for rank in ranks),
        "next": None if best is None else {"kind": best.kind, "saves_s": best.saves_s, "sentence": best.sentence},
        "ranks": [rank.as_json() for rank in ranks],
    }
