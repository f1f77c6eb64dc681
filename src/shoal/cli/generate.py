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
import functools
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.cli.opening import add_opening, opened_as, run_of
from shoal.cli.sampling_options import add_sampling, refuse_sampling, sampling_of
from shoal.errors import Stopped, UsageError

if TYPE_CHECKING:
    from shoal.data.tokenizer import Tokenizer
    from shoal.generate.many.source import Source
    from shoal.generate.many.work import Render, Told
    from shoal.generate.opened import Opened
    from shoal.journal.rundir import RunDir

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
    parser.add_argument("--special", action="store_true", help="special tokens spelled out in a prompt become ids")
    parser.add_argument("--json", action="store_true", help="machine-readable output, without a progress line")
    add_sampling(parser)
    add_opening(parser)


def run(args: argparse.Namespace) -> int:
    refuse_sampling(args)
    out = _out(args)
    for name, most in (("batch", MOST_BATCH), ("context", 2**31)):
        if (value := getattr(args, name)) is not None and not 1 <= value <= most:
            raise UsageError(f"--{name} is {value}, but it must be from 1 to {most:,}.")

    run_dir = run_of(args.model, args)

    from shoal.generate.many.source import looked_at  # after the checks above: a typing mistake is answered at once

    return _work(args, run_dir, looked_at(Path(args.file)), out)


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


def _work(args: argparse.Namespace, run_dir: RunDir | None, source: Source, out: Path) -> int:
    from shoal.data.progress_line import ProgressLine
    from shoal.generate.many.kept import Kept
    from shoal.generate.many.work import Ask, Work, known_by, look_through, tokenizer_known_by
    from shoal.generate.texts import Speaker
    from shoal.guard.signals import Signals, signal_name

    if out.resolve() == source.path.resolve():
        raise UsageError("--out is the file of prompts: name another.")
    part, parts = (0, 1) if args.part is None else (args.part, args.of)
    lines = source.part(part, parts)
    opened = opened_as(args.model, run_dir, args, args.special)
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


def _render(opened: Opened) -> Render:
    """By the model's template, whose special tokens become their ids."""
    from shoal.data.starts import NO_START
    from shoal.data.tokenizer import JsonTokenizer
    from shoal.generate.chat_template import ChatTemplate, template_of

    @functools.cache  # looked for when the first messages come
    def found() -> tuple[ChatTemplate, Tokenizer, frozenset[int]]:
        tokenizer = opened.tokenizer
        template = None if opened.folder is None else template_of(opened.folder, tokenizer)
        if template is None:
            raise UsageError(f"'messages' need a chat template, and {opened.name} has none; give 'prompt'")
        if isinstance(tokenizer, JsonTokenizer) and not tokenizer.special:
            start = NO_START if tokenizer.start_id is None else tokenizer.start_id
            tokenizer = JsonTokenizer(tokenizer.content, opened.name, tokenizer.eos_id, start, special=True)
        return template, tokenizer, template.stop_ids(tokenizer)

    def render(messages: Sequence[Mapping[str, Any]]) -> tuple[Sequence[int], frozenset[int]]:
        template, tokenizer, stops = found()
        return template.tokens(tokenizer, messages), stops

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
