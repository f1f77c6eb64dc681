"""Predict speed, memory, cost and goodput of a run before it is launched.

  shoal plan RUN.yaml --on h100 --devices 64     the best layouts of this run there, and why
  shoal plan compare RUN.yaml --on h100,b200     the same on several machines, as a table and a chart; also
                                                 --fabric ib,ethernet, --devices 8,64, --price 2.1,4.5 take several
  shoal plan validate CASES.csv                  how wrong predictions are on runs that were measured

Without --on the plan is for this machine: what `shoal bench` measured here, else the catalogue's entry. Values of the
run file are set as `train.batch=512`; what its `mesh` names is kept, what it leaves `auto` is searched.
"""

from __future__ import annotations

import argparse
from importlib import import_module

from shoal.errors import UsageError

TAKES_OVERRIDES = True
_WORDS = ("compare", "validate")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "words", nargs="+", metavar="RUN.yaml", help="a run file; or `compare RUN.yaml`, `validate CSV`"
    )
    parser.add_argument("--on", metavar="DEVICE", help="an accelerator of the catalogue, such as h100")
    parser.add_argument("--devices", metavar="N", help="how many (default: resources.processes, else one node)")
    parser.add_argument("--fabric", metavar="NAME", help="what joins the nodes, such as ib or ethernet")
    parser.add_argument("--price", metavar="USD", help="of one device and hour, instead of the catalogue's")
    parser.add_argument(
        "--style", default="supervised", metavar="NAME", help="how a run comes back from failures (guide/goodput.md)"
    )
    parser.add_argument("--rates", default="default", metavar="NAME", help="whose devices fail how often: llama3, …")
    parser.add_argument("--top", type=int, default=5, metavar="N", help="layouts to show (default 5)")
    parser.add_argument("--chart", metavar="FILE.png", help="compare: draw cost against time, and scaling")
    parser.add_argument("--json", action="store_true", help="machine-readable output")
    parser.add_argument("--workspace", metavar="DIR", help="the folder that holds runs/ and hardware/")


def run(args: argparse.Namespace) -> int:
    word = args.words[0] if args.words[0] in _WORDS else "run"
    given = args.words[1:] if word in _WORDS else args.words
    if len(given) != 1:
        needs = {"run": "shoal plan RUN.yaml", "compare": "shoal plan compare RUN.yaml"}
        raise UsageError(f"one file is needed: `{needs.get(word, 'shoal plan validate CASES.csv')}`.")
    args.file = given[0]
    return int(import_module(f"shoal.cli.plan_{word}").run(args) or 0)
