"""List, verify, compare, delete, export, import and join checkpoints.

  shoal checkpoint ls RUN                    what there is, where, and what is wrong with it
  shoal checkpoint verify RUN [--step N]     every byte against its checksum; exit code 78 if one differs
  shoal checkpoint diff A B                  where two differ; exit code 0 if their tensors are equal, else 1
  shoal checkpoint rm RUN --step N           delete; the last good one is refused
  shoal checkpoint export RUN DIR            the newest good one as a Hugging Face folder
  shoal checkpoint import SOURCE DIR         a folder of DCP, DeepSpeed or Hugging Face, or a checkpoint, as weights
  shoal checkpoint join FOLDER … DIR         the stages of a model cut over peers, from their folders, as one run

RUN is the name of a run in the workspace or the path of its directory; RUN@STEP is its checkpoint of that step. The
path of a folder of checkpoints, of one of them, or an address (s3://bucket/prefix) may stand in its place.
"""

from __future__ import annotations

import argparse
from importlib import import_module

from shoal.cli.options import add_workspace
from shoal.errors import UsageError

_VERBS = {
    "ls": "list them",
    "verify": "compare every byte with its checksum",
    "diff": "tell where two differ",
    "rm": "delete some",
    "export": "write a Hugging Face folder",
    "import": "take in what others have saved",
    "join": "make one run of the stages of a model cut over peers",
}

MODULES = {"import": "bring_in"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(dest="verb", metavar=" | ".join(_VERBS))
    made = {name: verbs.add_parser(name, help=about, description=f"{about}.") for name, about in _VERBS.items()}
    for name, verb in made.items():
        places = {"diff": ["a", "b"], "import": ["source"], "join": []}.get(name, ["run"])
        for place in places:
            verb.add_argument(place, metavar=place.upper(), help="a run (RUN, RUN@STEP), a folder, or an address")
        add_workspace(verb)
        if name != "export":
            verb.add_argument("--json", action="store_true", help="machine-readable output")
    made["join"].add_argument("stages", metavar="FOLDER", nargs="+", help="the folder of a peer; one of each stage")
    for name in ("export", "import", "join"):
        made[name].add_argument("folder", metavar="DIR", help="a folder that does not exist yet, or is empty")
    for name in ("verify", "export", "join"):
        made[name].add_argument("--step", type=int, metavar="N", help="the checkpoint of this step")
    for name in ("verify", "export", "rm"):
        made[name].add_argument("--term", type=int, metavar="T", help="the one that this start of the workers saved")
    made["verify"].add_argument("--remote", action="store_true", help="also those in the run's bucket")
    made["diff"].add_argument("--weights", action="store_true", help="leave out the state of optimizers")
    _of_rm(made["rm"])
    _of_export(made["export"])
    _of_import(made["import"])


def _of_rm(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("--step", type=int, metavar="N", action="append", help="of this step; may be given again")
    verb.add_argument("--all-but", type=int, metavar="K", help="all but the newest K good ones")
    verb.add_argument("--tier", choices=["disk", "remote"], help="only there (default: wherever it is)")
    verb.add_argument("--even-the-last", action="store_true", help="even when no good one remains")


def _of_export(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("--dtype", choices=["fp32", "bf16", "fp16"], help="cast the weights (default: as they are)")
    verb.add_argument("--tokenizer", metavar="PATH", help="another than that of the run's data; 'byte'; or 'none'")
    verb.add_argument(
        "--drop-biases", action="store_true", help="leave out routers' biases that the family's class cannot hold"
    )


def _of_import(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("--like", metavar="PATH", help="a run file or a Hugging Face folder that has the model's shape")
    verb.add_argument("--step", type=int, metavar="N", help="the step to give it (default: what the source says, or 0)")
    verb.add_argument("--weights", action="store_true", help="leave out the state of optimizers")


def run(args: argparse.Namespace) -> int:
    if args.verb is None:
        raise UsageError("say what to do: `shoal checkpoint ls RUN`, or one of " + ", ".join([*_VERBS][1:]) + ".")
    verb = import_module(f"shoal.cli.checkpoint.{MODULES.get(args.verb, args.verb)}")
    return int(verb.run(args) or 0)
