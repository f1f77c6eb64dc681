"""Generate text from a run's newest checkpoint, or from a Hugging Face folder.

  shoal sample RUN --prompt "The whale"
  shoal sample FOLDER --prompts prompts.txt --out answers.jsonl
  shoal sample RUN --prompt "A person: " --schema person.json

RUN is the name of a run in the workspace, or the path of its directory; FOLDER is one with a config.json. The same seed
gives the same text. The prompt is the beginning of a document: the start token stands before it, and an empty prompt
begins a new one. Why an answer ended is said on standard error, and in --json as "finish".
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from shoal.cli.opening import add_opening, opened_as, run_of
from shoal.cli.sampling_options import add_sampling, refuse_sampling, sampling_of
from shoal.errors import DataError, UsageError
from shoal.plain_file import read_plain
from shoal.readable import harmless
from shoal.values import BadValue, fields_of, inside, read_json, text

if TYPE_CHECKING:
    from shoal.generate.answers import Answer
    from shoal.generate.grammar import Form, Forms
    from shoal.generate.opened import Opened

MOST_FILE_BYTES = 64 << 20
MOST_PROMPT_CHARS = 1 << 24
MOST_ANSWERS = 100_000
BATCH = 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN|FOLDER", nargs="?", help="a run, or a Hugging Face folder")
    parser.add_argument("--weights", metavar="FOLDER", help="the same as FOLDER")
    parser.add_argument(
        "--prompt",
        action="append",
        metavar="TEXT",
        help="what to go on from (default: The); may be empty; may be again",
    )
    parser.add_argument("--prompts", metavar="FILE", help='a prompt a line; .jsonl: {"prompt": …} a line')
    parser.add_argument("--n", type=int, default=1, metavar="N", help="answers to each prompt, by seeds that follow")
    parser.add_argument("--special", action="store_true", help="special tokens spelled out in the prompt become ids")
    parser.add_argument("--out", metavar="FILE", help="answers as JSONL, in the order of the prompts")
    parser.add_argument("--json", action="store_true", help="machine-readable output; of several answers a line each")
    parser.add_argument(
        "--logprobs",
        type=int,
        nargs="?",
        const=0,
        metavar="K",
        help="tell each token's log-probability, and the K likeliest beside it (with --json or --out)",
    )
    form = parser.add_argument_group("the form of an answer (one of them; the answer alone is printed)")
    form.add_argument("--schema", metavar="FILE", help="a JSON schema")
    form.add_argument("--any-json", action="store_true", help="any JSON")
    form.add_argument("--regex", metavar="PATTERN", help="a regular expression that the whole answer fits")
    form.add_argument("--grammar", metavar="FILE", help="a grammar in EBNF, beginning with root")
    add_sampling(parser)
    add_opening(parser)


def run(args: argparse.Namespace) -> int:
    if (args.run is None) == (args.weights is None):
        raise UsageError("say what to sample from: `shoal sample RUN` or `shoal sample FOLDER`.")
    refuse_sampling(args)
    if not 1 <= args.n <= MOST_ANSWERS:
        raise UsageError(f"--n is {args.n}, but it must be from 1 to {MOST_ANSWERS:,}.")
    if args.logprobs is not None and not (args.json or args.out):
        raise UsageError("--logprobs are numbers, told in --json or --out: give one of them.")
    prompts = _prompts(args)
    if len(prompts) * args.n > MOST_ANSWERS:
        raise UsageError(
            f"{len(prompts):,} prompts with {args.n:,} answers each are more than {MOST_ANSWERS:,}; `shoal generate` "
            "works through files of any length."
        )
    form = _form(args)
    if args.weights is not None and not (Path(args.weights) / "config.json").is_file():
        raise DataError(f"{args.weights}/config.json is not there: name a Hugging Face folder.")
    model = args.weights or args.run
    opened = opened_as(model, run_of(model, args), args, args.special)
    with contextlib.ExitStack() as stack:
        out = stack.enter_context(_written(Path(args.out))) if args.out else None
        failed = _answer(args, opened, prompts, form, out)
    if failed:
        raise DataError(f"an answer ended early: {failed}")
    return 0


def _answer(
    args: argparse.Namespace, opened: Opened, prompts: Sequence[str], form: Form | None, out: TextIO | None
) -> str:
    """All of them; the error of the first that had one."""
    from shoal.data.starts import begun
    from shoal.generate.answers import Answer
    from shoal.generate.grammar import Forms
    from shoal.generate.texts import Speaker

    tokenizer = opened.tokenizer
    sampling = replace(sampling_of(args, tokenizer), logprobs=args.logprobs or 0)
    forms = None if form is None else Forms(tokenizer, sampling.stop_ids)
    engine = opened.engine(batch=min(BATCH, len(prompts) * args.n), exact=args.exact)
    speaker = Speaker(engine, tokenizer)
    show = _Show(args, opened, engine.context, forms, form, out, len(prompts) * args.n)
    for prompt in prompts:
        ids = begun(tokenizer.encode(prompt), tokenizer.start_id)
        if not ids:
            raise UsageError(
                "there is nothing to go on from: no prompt, and no start token; give a prompt, or name the token to "
                "begin with by --start."
            )
        for i in range(args.n):
            seeded = replace(sampling, seed=(args.seed + i) % 2**63)
            mask = None if forms is None or form is None else forms.mask(form)
            show.answers[speaker.ask(ids, seeded, args.stop, mask)] = Answer(prompt, ids)
    for piece in speaker.run():
        show.answers[piece.request].add(piece)
        show.more(piece.request)
    return next((answer.error for answer in show.answers.values() if answer.error), "")


class _Show:
    """Answers in the order of their prompts: the first that is not at its end is printed while it comes."""

    def __init__(
        self,
        args: argparse.Namespace,
        opened: Opened,
        context: int,
        forms: Forms | None,
        form: Form | None,
        out: TextIO | None,
        count: int,
    ) -> None:
        self.answers: dict[int, Answer] = {}
        self._args, self._opened, self._context, self._count = args, opened, context, count
        self._forms, self._form, self._out = forms, form, out
        self._next, self._printed = 0, 0
        self._clean = sys.stdout.isatty()

    def more(self, number: int) -> None:
        answer = self.answers[number]
        if answer.finish is not None and self._forms is not None and self._form is not None:
            answer.valid = self._forms.holds(self._form, answer.text)
        if number != self._next:
            return
        while (answer := self.answers.get(self._next)) is not None:  # type: ignore[assignment]  # the next may be none
            if self._out is None and not self._args.json:
                self._stream(answer)
            if answer.finish is None:
                return
            self._end(answer)
            self._next, self._printed = self._next + 1, 0

    def _stream(self, answer: Answer) -> None:
        if self._printed == 0 and not self._form:
            if self._count > 1:
                self._print(f"{'' if self._next == 0 else chr(10)}--- {self._which()} ---\n")
            self._print(self._opened.tokenizer.decode(answer.prompt_tokens))
        self._print(answer.text[max(self._printed - 1, 0) :])
        self._printed = len(answer.text) + 1

    def _end(self, answer: Answer) -> None:
        made = {"step": self._opened.step, **answer.record(self._args.logprobs is not None)}
        if self._out is not None:
            print(json.dumps(made), file=self._out)
        if self._args.json:
            print(json.dumps(made), flush=True)
            return
        if self._out is None:
            self._print("\n")
        which = f"{self._which()} " if self._count > 1 else "the answer "
        form = "" if answer.valid is not False else "; it is no whole document of the form that was asked for"
        print(f"shoal: {which}ended {harmless(answer.why(self._context))}{form}.", file=sys.stderr)

    def _which(self) -> str:
        prompt, i = divmod(self._next, self._args.n)
        return f"prompt {prompt + 1}" + (f", answer {i + 1}" if self._args.n > 1 else "")

    def _print(self, said: str) -> None:
        print(harmless(said) if self._clean else said, end="", flush=True)


def _prompts(args: argparse.Namespace) -> list[str]:
    prompts = list(args.prompt or ())
    if args.prompts is not None:
        try:
            prompts += _of_file(args.prompts)
        except BadValue as e:
            raise DataError(f"{args.prompts} holds something else than prompts ({e}); mend that line.") from None
        except OSError as e:
            raise DataError(f"{args.prompts} cannot be read ({e.strerror or e}).") from None
        if not prompts:
            raise DataError(f"{args.prompts} holds no prompt.")
    return prompts or ["The"]


def _of_file(name: str) -> list[str]:
    data = read_plain(name, MOST_FILE_BYTES)
    try:
        lines = data.decode("utf-8-sig").splitlines() if not name.endswith(".jsonl") else data.decode().split("\n")
    except UnicodeDecodeError as e:
        raise BadValue(f"it is not UTF-8 text (byte {e.start})") from None
    if not name.endswith(".jsonl"):
        return [line for line in lines if line.strip()]
    prompts = []
    for i, line in enumerate(lines, 1):
        if line.strip():
            with inside(f"line {i}"):
                prompts.append(text(fields_of(read_json(line.encode())).get("prompt"), MOST_PROMPT_CHARS))
    return prompts


def _form(args: argparse.Namespace) -> Form | None:
    from shoal.generate.form import GRAMMAR, JSON, MOST_BYTES, REGEX, SCHEMA, Form

    asked = [
        (kind, value)
        for kind, value in (
            (SCHEMA, args.schema),
            (JSON, "" if args.any_json else None),
            (REGEX, args.regex),
            (GRAMMAR, args.grammar),
        )
        if value is not None
    ]
    if len(asked) > 1:
        raise UsageError("an answer has one form: give one of --schema, --any-json, --regex and --grammar.")
    if not asked:
        return None
    kind, value = asked[0]
    if kind in (SCHEMA, GRAMMAR):
        try:
            value = read_plain(value, MOST_BYTES).decode()
        except (OSError, UnicodeDecodeError) as e:
            why = e.strerror or e if isinstance(e, OSError) else "it is no UTF-8 text"
            raise DataError(f"--{kind} {value} cannot be read ({why}).") from None
    return Form(kind, value)


@contextlib.contextmanager
def _written(path: Path) -> Iterator[TextIO]:
    """Whole or not at all."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with open(part, "w", encoding="utf-8") as file:
            yield file
        os.replace(part, path)
    except OSError as e:
        raise DataError(f"--out {path} cannot be written ({e.strerror or e}).") from None
    finally:
        part.unlink(missing_ok=True)
