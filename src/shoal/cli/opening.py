"""Which model a verb asks, in the same words: RUN or FOLDER, and how it is opened."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.cli.options import add_workspace, no_script
from shoal.errors import UsageError
from shoal.journal.rundir import find_run, workspace

if TYPE_CHECKING:
    from shoal.generate.opened import Opened
    from shoal.journal.rundir import RunDir


def add_opening(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("how the model is opened")
    group.add_argument("--step", type=int, metavar="N", help="the checkpoint of this step (default: the newest)")
    group.add_argument("--tokenizer", metavar="PATH", help="another than that of the run's data, or 'byte'")
    group.add_argument("--start", metavar="TOKEN", help="another start token than the data's or the folder's; or none")
    group.add_argument(
        "--device", choices=["auto", "cpu", "cuda"], default="auto", help="default: a GPU if there is one"
    )
    group.add_argument(
        "--exact", action="store_true", help="bits of train.kernels exact, whatever is computed beside; slower"
    )
    group.add_argument("--own-code", action="store_true", help="run the code of a model with blocks of its own")
    add_workspace(parser)


def is_folder(model: str) -> bool:
    """Whether it is a Hugging Face folder; else it names a run."""
    return "\0" not in model and (Path(model) / "config.json").is_file()


def run_of(model: str, args: argparse.Namespace) -> RunDir | None:
    """Checked at once, before torch is loaded: a typing mistake is answered quickly. None: it is a folder."""
    if is_folder(model):
        if args.step is not None:
            raise UsageError(f"--step names a checkpoint of a run, but {model} is a folder of one model.")
        return None
    run_dir = find_run(model, workspace(args.workspace))
    no_script(run_dir)
    return run_dir


def opened_as(model: str, run_dir: RunDir | None, args: argparse.Namespace, special: bool) -> Opened:
    from shoal.generate.opened import Wanted, of_folder, of_run

    wanted = Wanted(args.device, args.step, args.tokenizer, args.start, special, args.own_code)
    return of_folder(Path(model), wanted) if run_dir is None else of_run(run_dir, wanted)


def add_key(parser: argparse._ActionsContainer) -> None:
    parser.add_argument("--key-from", metavar="VARIABLE", help="of a URL: the environment variable that holds the key")


def key_of(args: argparse.Namespace) -> str | None:
    """Sent to the URL that was named, and only if it was asked for: a key that lies about is not for everybody."""
    if args.key_from is None:
        return None
    if not (key := os.environ.get(args.key_from)):
        raise UsageError(f"--key-from names the environment variable {args.key_from}, which is not set.")
    return key
