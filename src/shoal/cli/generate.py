"""Work through a file of prompts with a run's newest checkpoint, or with a Hugging Face folder; each answer is written
once.

  shoal generate prompts.txt --model RUN --out answers.jsonl
  shoal generate prompts.jsonl --model FOLDER --out answers --part 3 --of 8

FILE has one prompt a line; a file named .jsonl has an object a line, with "prompt", "messages" or "tokens", and if it
likes "id" and "sampling" ({"max_tokens": 20, "stop": ["."]}). Each answer is a line of --out, in the order of the file.
Killed and started again by the same words, it answers what has no answer yet. With --part and --of it is one of several
that share a file, as the units of `shoal batch`; --out is then a folder, whose parts one after the other are the whole.
The same seed gives the same answers.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.cli.options import add_workspace, no_script
from shoal.cli.sampling_options import add_sampling, refuse_sampling, sampling_of
from shoal.errors import Stopped, UsageError

if TYPE_CHECKING:
    from shoal.generate.many.source import Source
    from shoal.generate.many.work import Render, Told
    from shoal.generate.opened import Opened

MOST_BATCH = 1024


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="prompts, one a line; .jsonl: an object a line")
    parser.add_argument("--model", required=True, metavar="RUN|FOLDER", help="a run, or a Hugging Face folder")
    parser.add_argument("--out", required=True, metavar="FILE|FOLDER", help="where the answers go; of parts: a folder")
    parser.add_argument("--part", type=int, metavar="I", help="this part of the file, counted from 0")
    parser.add_argument("--of", type=int, metavar="N", help="of so many")
    parser.add_argument(
        "--on-error",
        choices=["stop", "skip"],
        default="stop",
        help="what cannot be answered ends the work (default), or is told in its place",
    )
    parser.add_argument("--batch", type=int, metavar="N", help="answers at a time (default: 16; on a GPU 64)")
    parser.add_argument("--context", type=int, metavar="N", help="tokens of a prompt and its answer (default: all)")
    parser.add_argument("--logprobs", action="store_true", help="tell each token's log-probability too")
    parser.add_argument("--exact", action="store_true", help="the trainer's own bits, whatever is computed beside")
    parser.add_argument("--step", type=int, metavar="N", help="the checkpoint of this step (default: the newest)")
    parser.add_argument("--tokenizer", metavar="PATH", help="another than that of the run's data, or 'byte'")
    parser.add_argument("--start", metavar="TOKEN", help="another start token than the data's or the folder's; or none")
    parser.add_argument("--special", action="store_true", help="special tokens spelled out in a prompt become ids")
    parser.add_argument(
        "--device", choices=["auto", "cpu", "cuda"], default="auto", help="default: a GPU if there is one"
    )
    parser.add_argument("--own-code", action="store_true", help="run the code of a model with blocks of its own")
    parser.add_argument("--json", action="store_true", help="machine-readable output, without a progress line")
    add_workspace(parser)
    add_sampling(parser)


def run(args: argparse.Namespace) -> int:
    refuse_sampling(args)
    out = _out(args)
    for name, most in (("batch", MOST_BATCH), ("context", 2**31)):
        if (value := getattr(args, name)) is not None and not 1 <= value <= most:
            raise UsageError(f"--{name} is {value}, but it must be from 1 to {most:,}.")

    from shoal.generate.many.source import looked_at  # after the checks above: a typing mistake is answered at once

    return _work(args, looked_at(Path(args.file)), out)


def _out(args: argparse.Namespace) -> Path:
    """The file of this part."""
    out = Path(args.out)
    if (args.part is None) != (args.of is None):
        raise UsageError("--part and --of belong together: `--part 0 --of 8` is the first of eight.")
    if args.part is None:
        if out.is_dir() or args.out.endswith(os.sep):
            return out / "answers.jsonl"
        return out
    if not 0 <= args.part < args.of:
        raise UsageError(f"--part is {args.part}, but the parts of --of {args.of} are 0 to {args.of - 1}.")
    if out.is_file():
        raise UsageError(f"--out {out} is a file, but parts go to a folder: name one.")
    return out / f"part-{args.part:05d}.jsonl"


def _work(args: argparse.Namespace, source: Source, out: Path) -> int:
    from shoal.data.progress_line import ProgressLine
    from shoal.generate.many.kept import Kept
    from shoal.generate.many.work import Ask, Work, known_by, look_through, tokenizer_known_by
    from shoal.generate.texts import Speaker
    from shoal.guard.signals import Signals, signal_name

    if out.resolve() == source.path.resolve():
        raise UsageError("--out is the file of prompts: name another.")
    part, parts = (0, 1) if args.part is None else (args.part, args.of)
    lines = source.part(part, parts)
    opened = _opened(args)
    sampling = sampling_of(args, opened.tokenizer)
    ask = Ask(sampling, tuple(args.stop), args.seed, args.on_error == "skip", args.logprobs)
    begun: dict[str, Any] = {
        "format": 1,
        "input": source.digest,
        "lines": source.lines,
        "part": f"{part} of {parts}",
        "model": opened.version,
        "weights": known_by(opened.model),
        "tokenizer": tokenizer_known_by(opened.tokenizer),
        "stop": args.stop,
        "context": args.context,
        "exact": args.exact,
        "logprobs": args.logprobs,
        **{name: _plain(value) for name, value in sampling.__dict__.items()},
    }
    kept = Kept(out, begun, lines)
    if kept.fresh and not kept.finished and not ask.skip:
        look_through(source, lines, ask)
    with Signals() as signals, kept:
        if kept.finished:
            return _said(args, out, source, None)
        found = kept.done
        if found and not args.json:
            print(f"{found:,} of {len(lines):,} lines have their answers in {out}; it goes on with the others.")
        batch = args.batch or (64 if next(opened.model.parameters()).is_cuda else 16)
        engine = opened.engine(batch=batch, context=args.context, exact=args.exact)
        work = Work(source, kept, lines, ask, Speaker(engine, opened.tokenizer), batch, _render(opened))
        with ProgressLine("generate", len(lines), found, quiet=args.json) as line:
            if not work.run(lambda: signals.told_to_stop, lambda done, tokens: line.add(done, tokens=tokens)):
                which, done = signal_name(signals.stops[0]), f"{kept.done:,} of {len(lines):,}"
                raise Stopped(f"told to stop ({which}); {done} lines are answered, and the same words go on.")
        kept.finish()
    return _said(args, out, source, work.told)


def _opened(args: argparse.Namespace) -> Opened:
    from shoal.generate.opened import Wanted, of_folder, of_run
    from shoal.journal.rundir import find_run, workspace

    wanted = Wanted(args.device, args.step, args.tokenizer, args.start, args.special, args.own_code)
    folder = Path(args.model)
    if (folder / "config.json").is_file():
        if args.step is not None:
            raise UsageError(f"--step names a checkpoint of a run, but {folder} is a folder of one model.")
        return of_folder(folder, wanted)
    run_dir = find_run(args.model, workspace(args.workspace))
    no_script(run_dir)
    return of_run(run_dir, wanted)


def _render(opened: Opened) -> Render:
    def render(messages: Sequence[Mapping[str, str]]) -> Sequence[int]:
        raise UsageError("'messages' need the model's chat template, which is not read here yet; give 'prompt'.")

    return render


def _said(args: argparse.Namespace, out: Path, source: Source, told: Told | None) -> int:
    if args.json:
        counts = {} if told is None else {**told.__dict__}
        print(json.dumps({"out": str(out), "input": source.digest, "already": told is None, **counts}))
    elif told is None:
        print(f"{out} has all its answers already.")
    else:
        ends = ", ".join(f"{count:,} by {end}" for end, count in sorted(told.ends.items()))
        print(f"{told.answered:,} answered ({told.tokens:,} tokens; ended {ends or 'none'}): {out}")
        if told.refused:
            print(f"{told.refused:,} could not be answered: `grep '\"error\"' {out}` tells which, and why.")
    return 0


def _plain(value: object) -> object:
    return sorted(value) if isinstance(value, frozenset) else value
