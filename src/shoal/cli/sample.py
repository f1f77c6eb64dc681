"""Generate text from a run's newest checkpoint, or from a Hugging Face folder.

  shoal sample RUN --prompt "The whale"
  shoal sample --weights FOLDER --prompt "The whale"

RUN is the name of a run in the workspace, or the path of its directory. The same seed gives the same text.
The prompt is the beginning of a document: the start token stands before it, and an empty prompt begins a new one.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from shoal.cli.options import add_workspace, no_script
from shoal.errors import UsageError
from shoal.journal.rundir import find_run, workspace


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", nargs="?", help="a run's name, or the path of its directory")
    parser.add_argument("--weights", metavar="FOLDER", help="a Hugging Face folder instead of a run")
    parser.add_argument(
        "--prompt", default="The", metavar="TEXT", help="what to go on from (default: The); may be empty"
    )
    parser.add_argument("--max-tokens", type=int, default=100, metavar="N", help="at most this many (default: 100)")
    parser.add_argument(
        "--temperature", type=float, default=0.8, metavar="T", help="0 takes the likeliest token (default: 0.8)"
    )
    parser.add_argument("--top-k", type=int, metavar="K", help="draw from the K likeliest tokens only")
    parser.add_argument("--seed", type=int, default=0, help="of the draws (default: 0)")
    parser.add_argument("--step", type=int, metavar="N", help="the checkpoint of this step (default: the newest)")
    parser.add_argument("--tokenizer", metavar="PATH", help="another than that of the run's data, or 'byte'")
    parser.add_argument("--start", metavar="TOKEN", help="another start token than the data's or the folder's; or none")
    parser.add_argument("--special", action="store_true", help="special tokens spelled out in the prompt become ids")
    parser.add_argument(
        "--device", choices=["auto", "cpu", "cuda"], default="auto", help="default: a GPU if there is one"
    )
    parser.add_argument("--json", action="store_true", help="machine-readable output")
    parser.add_argument("--own-code", action="store_true", help="run the code of a model with blocks of its own")
    add_workspace(parser)


def run(args: argparse.Namespace) -> int:
    if (args.run is None) == (args.weights is None):
        raise UsageError("say what to sample from: `shoal sample RUN` or `shoal sample --weights FOLDER`.")
    for name, least in (("max_tokens", 1), ("top_k", 1), ("temperature", 0), ("seed", 0)):
        value = getattr(args, name)
        if value is not None and value < least:
            raise UsageError(f"--{name.replace('_', '-')} is {value}, but {least} is the least it can be.")
    run_dir = None if args.run is None else find_run(args.run, workspace(args.workspace))
    if run_dir is not None:
        no_script(run_dir)

    from shoal.data.decoding import continued  # after the checks above: a typing mistake is answered at once
    from shoal.data.starts import begun
    from shoal.generate.opened import Wanted, of_folder, of_run
    from shoal.generate.request import Sampling

    wanted = Wanted(args.device, args.step, args.tokenizer, args.start, args.special, args.own_code)
    opened = of_folder(Path(args.weights), wanted) if run_dir is None else of_run(run_dir, wanted)
    tokenizer, step = opened.tokenizer, opened.step
    ids = begun(tokenizer.encode(args.prompt), tokenizer.start_id)
    if not ids:
        raise UsageError(
            "there is nothing to go on from: no prompt, and no start token; give a prompt, or name the token to begin "
            "with by --start."
        )
    sampling = Sampling(
        args.max_tokens, args.temperature, args.top_k, seed=args.seed, stop_ids=frozenset({tokenizer.eos_id})
    )
    engine = opened.engine(batch=1)
    engine.submit(ids, sampling)
    new = [event.token for event in engine.run() if event.token is not None]
    if args.json:
        text = continued(tokenizer, ids, new)
        told = {"step": step, "prompt": args.prompt, "prompt_tokens": ids, "text": text, "tokens": new}
        print(json.dumps(told))
    else:
        print(tokenizer.decode([*ids, *new]))  # decoded as one: a word may go across the seam
    return 0
