"""Predict speed, memory, cost and goodput of a run before it is launched.

  shoal plan RUN.yaml --on h100 --devices 64     the best layouts of this run there, and why
  shoal plan review RUN.yaml                     what in it will be refused or will hurt at scale, and what to change
  shoal plan compare RUN.yaml --on h100,b200     the same on several machines, as a table and a chart; also
                                                 --fabric ib,ethernet, --devices 8,64, --price 2.1,4.5 take several
  shoal plan goodput RUN.yaml                    what failures leave of the time, by the way a run comes back, on
                                                 --devices 1024,16384,131072
  shoal plan swarm RUN.yaml --mbit 100           how busy peers are that train it over slow links
  shoal plan validate CASES.csv                  how wrong predictions are on runs that were measured

Options win over the `plan` section of the run file. Where neither says --on, the plan is for this machine: what `shoal
bench` measured here, else the catalogue's entry. Values of the run file are set as `train.batch=512`; what its `mesh`
names is kept, what it leaves `auto` is searched. `fleet.islands` are planned too: --devices is for all of them.
"""

from __future__ import annotations

import argparse
from importlib import import_module

from shoal.errors import UsageError
from shoal.near import closest

TAKES_OVERRIDES = True
MODULES = {"run": "predict"}
_WORDS = ("compare", "goodput", "review", "swarm", "validate")
# Options that only some of the words know; those of `swarm` have no default here, so that one can tell.
_OWN = {
    "chart": ("compare",),
    "top": ("run",),
    "peers": ("swarm",),
    "mbit": ("swarm",),
    "latency_ms": ("swarm",),
    "loss": ("swarm",),
    "inner_steps": ("swarm",),
    "compression": ("swarm",),
    "exchange": ("swarm",),
    "overlap": ("swarm",),
    "achieved": ("swarm",),
    "step_s": ("swarm",),
    "target": ("swarm",),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "words",
        nargs="+",
        metavar="RUN.yaml",
        help="a run file, alone or after review, compare, goodput, swarm; validate CSV",
    )
    parser.add_argument("--on", metavar="DEVICE", help="an accelerator of the catalogue, such as h100")
    parser.add_argument(
        "--devices", metavar="N", help="how many, of all islands (default: resources.processes, a node)"
    )
    parser.add_argument("--fabric", metavar="NAME", help="what joins the nodes, such as ib or ethernet")
    parser.add_argument("--price", metavar="USD", help="of one device and hour, instead of the catalogue's")
    parser.add_argument(
        "--style", metavar="NAME", help="how a run comes back from failures (guide/goodput.md); goodput takes several"
    )
    parser.add_argument(
        "--rates", metavar="NAME", help="whose devices fail how often: llama3, …; or failures in 1,000 device-days"
    )
    parser.add_argument("--top", type=int, metavar="N", help="layouts to show (default 5)")
    parser.add_argument("--chart", metavar="FILE.png", help="compare: draw cost against time, and scaling")
    parser.add_argument("--json", action="store_true", help="machine-readable output")
    parser.add_argument("--workspace", metavar="DIR", help="the folder that holds runs/ and hardware/")
    swarm = parser.add_argument_group("swarm")
    swarm.add_argument(
        "--peers", type=int, metavar="N", help="that train together, each with --devices, else a node (default 8)"
    )
    swarm.add_argument("--mbit", metavar="RATE", help="of a peer's link, 100 or UP/DOWN as in 100/500 (default 100)")
    swarm.add_argument("--latency-ms", type=float, metavar="MS", help="there and back (default 100)")
    swarm.add_argument("--loss", metavar="SHARE", help="of packets, as in 0.1%% or 0.001 (default 0.1%%)")
    swarm.add_argument("--inner-steps", metavar="H", help="of a round, several with commas (default 10,30,100,500)")
    swarm.add_argument("--compression", metavar="NAME", help="top-k, int8, …; several with commas (default: all)")
    swarm.add_argument("--exchange", metavar="NAME", help="all_gather, store, ring, tree (default: the quickest)")
    swarm.add_argument(
        "--overlap", action="store_true", default=None, help="the exchange runs beside the next round's steps"
    )
    swarm.add_argument(
        "--achieved", action="store_true", default=None, help="--mbit is what transfers get, not what the line has"
    )
    swarm.add_argument("--step-s", type=float, metavar="S", help="of one inner step (default: as planned)")
    swarm.add_argument("--target", metavar="SHARE", help="of the time that a peer should be busy (default 97%%)")


def run(args: argparse.Namespace) -> int:
    word = args.words[0] if args.words[0] in _WORDS else "run"
    given = args.words[1:] if word in _WORDS else args.words
    near = closest(args.words[0], _WORDS)
    if word == "run" and len(given) == 2 and near:
        raise UsageError(f"there is no `shoal plan {args.words[0]}`; did you mean `shoal plan {near} {given[1]}`?")
    if len(given) != 1:
        needs = "CASES.csv" if word == "validate" else "RUN.yaml"
        raise UsageError(f"one file is needed: `shoal plan {'' if word == 'run' else word + ' '}{needs}`.")
    for option, words in _OWN.items():
        if getattr(args, option) is not None and word not in words:
            whose = "`shoal plan RUN.yaml`" if words == ("run",) else f"`shoal plan {words[0]} RUN.yaml`"
            raise UsageError(f"--{option.replace('_', '-')} is an option of {whose}.")
    args.file = given[0]
    return int(import_module(f"shoal.cli.plan.{MODULES.get(word, word)}").run(args) or 0)
