"""Generate text from a run's newest checkpoint, or from a Hugging Face folder.

  shoal sample RUN --prompt "The whale"
  shoal sample --weights FOLDER --prompt "The whale"

RUN is the name of a run in the workspace, or the path of its directory. The same seed gives the same text.
The prompt is the beginning of a document: the start token stands before it, and an empty prompt begins a new one.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.cli.options import add_workspace, no_script
from shoal.errors import UsageError
from shoal.journal.rundir import RunDir, find_run, workspace

if TYPE_CHECKING:
    import torch

    from shoal.data.tokenizer import Tokenizer
    from shoal.model.decoder import Block, Decoder
    from shoal.own.code import Code
    from shoal.spec.run import Run
    from shoal.spec.shape import Shape


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

    import torch  # after the checks above: a typing mistake is answered at once

    from shoal.data.decoding import continued
    from shoal.data.starts import begun
    from shoal.model.generate import generate

    device = torch.device("cuda" if args.device != "cpu" and torch.cuda.is_available() else "cpu")
    if args.device == "cuda" and device.type == "cpu":
        raise UsageError("--device is cuda, but torch sees no GPU here; leave it out.")
    if run_dir is None:
        model, tokenizer, step = *_of_folder(Path(args.weights), args), None
    else:
        model, tokenizer, step = _of_run(run_dir, args)
    ids = begun(tokenizer.encode(args.prompt), tokenizer.start_id)
    if not ids:
        raise UsageError(
            "there is nothing to go on from: no prompt, and no start token; give a prompt, or name the token to begin "
            "with by --start."
        )
    drawn = {"temperature": args.temperature, "top_k": args.top_k, "seed": args.seed}
    bounds = {"eos_id": tokenizer.eos_id, "vocab_size": tokenizer.vocab_size}
    new = generate(model.to(device), ids, args.max_tokens, **drawn, **bounds)
    if args.json:
        text = continued(tokenizer, ids, new)
        told = {"step": step, "prompt": args.prompt, "prompt_tokens": ids, "text": text, "tokens": new}
        print(json.dumps(told))
    else:
        print(tokenizer.decode([*ids, *new]))  # decoded as one: a word may go across the seam
    return 0


def _of_run(run_dir: RunDir, args: argparse.Namespace) -> tuple[Decoder, Tokenizer, int]:
    from shoal.checkpoint.foreign.export import tokenizer_of_data
    from shoal.data.tokenizer import load_tokenizer
    from shoal.decide.load import load
    from shoal.spec.shape import shape_of

    spec = load(run_dir.spec_file).run
    if args.tokenizer:
        chosen = load_tokenizer(args.tokenizer, start=args.start, special=args.special)
    else:
        chosen = tokenizer_of_data(spec, args.start, args.special)
    code = _own_code(spec, run_dir, args.own_code)
    found, tensors = _weights(run_dir, args.step)
    model = _made(spec, shape_of(spec.model, chosen.vocab_size), code, tensors)
    return model, chosen, found


def _weights(run_dir: RunDir, step: int | None) -> tuple[int, dict[str, torch.Tensor]]:
    """The newest good checkpoint's weights (or those of a step). Damage shows only when they are read."""
    from shoal.checkpoint import open_checkpoint, published, read_full
    from shoal.checkpoint.find import newest_readable

    if step is not None:
        named = [one.name for one in published(run_dir.checkpoints) if one.name.step == step and one.on_history]
        if not named:
            raise UsageError(
                f"run '{run_dir.name}' has no checkpoint of step {step}; `shoal checkpoint ls` lists them."
            )
        return step, read_full(open_checkpoint(run_dir.checkpoints, named[0]))
    found, tensors = newest_readable(
        run_dir.checkpoints, read_full, lambda words: print(f"shoal: passed over {words}", file=sys.stderr)
    )
    return found.step, tensors


def _of_folder(folder: Path, args: argparse.Namespace) -> tuple[Decoder, Tokenizer]:
    from shoal.data.tokenizer import load_tokenizer
    from shoal.model.hf import load_shape, load_weights

    model = _on_meta(load_shape(folder)).to_empty(device="cpu")
    load_weights(model, folder)
    return model, load_tokenizer(args.tokenizer or folder, start=args.start, special=args.special)


def _own_code(spec: Run, run_dir: RunDir, own_code: bool) -> Code:
    """Of a model that is somebody's own: the run's copy of its code, which runs only if asked to."""
    from shoal.own.code import NONE
    from shoal.own.code import load as load_code

    if spec.own.computes is None:
        return NONE
    if not own_code:
        raise UsageError(
            f"the model of run '{run_dir.name}' is own code ({spec.own.computes}): read {run_dir.code}, and give "
            "--own-code to run it."
        )
    return load_code(spec, run_dir.code)


def _made(spec: Run, shape: Shape, code: Code, tensors: dict[str, torch.Tensor]) -> Decoder:
    if spec.foreign is None:
        model = _on_meta(shape, code.block)
        model.load_state_dict(tensors, assign=True)
        return model
    from shoal.model.foreign import made

    own = made(spec, shape, code)
    own.fill(tensors)
    return own.eval()


def _on_meta(shape: Shape, block: type[Block] | None = None) -> Decoder:
    import torch

    from shoal.model.decoder import Block, Decoder

    with torch.device("meta"):
        return Decoder(shape, block=block or Block)
