"""`shoal data look RUN.yaml | DIR`: windows as the model sees them, for people or as JSON."""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import TYPE_CHECKING

from shoal.errors import UsageError

if TYPE_CHECKING:
    from shoal.data.look import Seen, Token, View

PACKING = ("pairs", "best-fit", "chop")
EDGE = 3  # tokens that are shown on each side of a place where something changes
_GREEN, _YELLOW, _GREY, _BOLD, _PLAIN = "\x1b[32m", "\x1b[33m", "\x1b[90m", "\x1b[1m", "\x1b[0m"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", metavar="RUN.yaml|DIR", help="a run file, or a prepared data set (also s3://…)")
    parser.add_argument("values", nargs="*", metavar="NAME=VALUE", help="values laid over the run file")
    parser.add_argument("--step", type=int, metavar="N", help="of a run: what step N is fed, from 0 (default: 0)")
    parser.add_argument("--rank", type=int, metavar="R", help="of a run: the data-parallel rank (default: 0)")
    parser.add_argument("--ranks", type=int, metavar="W", help="of a run: as if it had so many (default: its mesh's)")
    parser.add_argument("--micro-batch", type=int, metavar="M", help="of a run: which of the step's (default: 0)")
    parser.add_argument("--seq-len", type=int, metavar="L", help="of a data set: tokens in a window (default: 512)")
    parser.add_argument("--packing", choices=PACKING, help="of a data set: data.packing of a run (default: pairs)")
    parser.add_argument("--window", type=int, default=0, metavar="W", help="the first that is shown (default: 0)")
    parser.add_argument("--windows", type=int, default=1, metavar="N", help="how many are shown (default: 1)")
    parser.add_argument("--all", action="store_true", help="every token, not only those around borders and masks")
    parser.add_argument("--json", action="store_true", help="print as JSON, every token")


def run(args: argparse.Namespace) -> int:
    view = _view(args)
    if args.json:
        print(json.dumps({"what": args.what, **view.fields, "windows": [one.as_json() for one in view.seen]}))
    else:
        print(as_text(args.what, view, args.all, in_colour()))
    return 0


def _view(args: argparse.Namespace) -> View:
    from shoal.data.look import Asked, look_at_data, look_at_run
    from shoal.spec.run import Data, Source

    of_a_run = {"--step": args.step, "--rank": args.rank, "--ranks": args.ranks, "--micro-batch": args.micro_batch}
    if args.windows < 1 or (args.ranks is not None and args.ranks < 1) or (args.seq_len or 1) < 1:
        raise UsageError("--windows, --ranks and --seq-len are 1 or more.")
    if not args.what.endswith((".yaml", ".yml")):
        if given := [name for name, value in of_a_run.items() if value is not None] or args.values[:1]:
            raise UsageError(f"{given[0]} is for a run file, and {args.what} is taken for a data set.")
        given = {"seq_len": args.seq_len, "packing": args.packing}
        data = Data(
            train=(Source(path=args.what),), **{key: value for key, value in given.items() if value is not None}
        )
        return look_at_data(args.what, data, Asked(window=args.window, count=args.windows))
    for name, value in (("seq_len", args.seq_len), ("packing", args.packing)):
        if value is not None:
            raise UsageError(f"--{name.replace('_', '-')} is for a data set; of a run file say data.{name}={value}.")
    from shoal.decide.load import load
    from shoal.journal.rundir import workspace

    asked = Asked(args.step or 0, args.rank or 0, args.ranks, args.micro_batch or 0, args.window, args.windows)
    run = load(args.what, args.values).run
    if run.foreign_work is not None:
        raise UsageError(f"{args.what} is of {run.foreign_work}: what data it reads, only that knows.")
    return look_at_run(run, workspace(), asked)


def in_colour() -> bool:
    """On a terminal, unless its user has said otherwise (https://no-color.org)."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def as_text(what: str, view: View, everything: bool, colour: bool) -> str:
    paint = _Paint(colour)
    learnt, not_learnt = paint(_GREEN, "learnt"), paint(_YELLOW, "input only")
    lines = [f"{what}: {view.words}", f"{learnt}: the target of the place before it; {not_learnt}: no target"]
    for seen in view.seen:
        lines += ["", *_window(seen, everything, paint)]
    return "\n".join(lines)


class _Paint:
    def __init__(self, colour: bool) -> None:
        self._colour = colour

    def __call__(self, colour: str, text: str) -> str:
        return f"{colour}{text}{_PLAIN}" if self._colour else text


def _window(seen: Seen, everything: bool, paint: _Paint) -> list[str]:
    tokens, read = seen.tokens, seen.inputs
    numbers = sorted({t.document for t in read if t.document is not None})
    documents = f"{len(numbers)} document{'s' * (len(numbers) != 1)}"
    padding = sum(t.document is None for t in read)
    head = f"{seen.source}: window {seen.window:,} of {seen.windows:,}, {len(read):,} tokens, {documents}, "
    head += f"{sum(t.learnt for t in tokens):,} targets" + (f", {padding:,} padding" if padding else "")
    lines = [paint(_BOLD, head), *(f"  {line}" for line in _answers(seen))]
    lines.append(f"  {'place':>7} {'document':>8} {'position':>8} {'id':>8}  token")
    shown, before = _shown(tokens, everything), -1
    for i in shown:
        if i > before + 1:
            lines.append(paint(_GREY, f"  {'…':>7} {i - before - 1:,} more like these"))
        lines.append(_line(tokens[i], paint))
        before = i
    return lines


def _answers(seen: Seen) -> list[str]:
    """What people look for: whether the beginnings and the ends of documents are learnt, and what is masked."""
    begins = [i for i, t in enumerate(seen.inputs) if t.document is not None and _begins(seen.inputs, i)]
    firsts = [seen.inputs[i] for i in begins]
    seconds = [t for i in begins for t in _after(seen.inputs, i)]
    ends = [t for t in seen.tokens if t.id == seen.end_id and (t.place is None or t.document is not None)]
    ends = [t for t in ends if not t.starts]
    masked = sum(t.why_not == "masked" for t in seen.tokens)
    lines = [f"first tokens of documents: {_share(firsts)}; the tokens after them: {_share(seconds)}"]
    if seen.start_id is not None:
        starts = [t for t in firsts if t.starts]
        name = f"start tokens (id {seen.start_id}{f' {quoted(starts[0].text)}' if starts else ''})"
        texts = [t for i in begins if seen.inputs[i].starts for t in _after(seen.inputs, i)]
        seen_of = f"{len(starts):,}, inputs only; the first tokens of their texts: {_share(texts)}"
        lines = [f"{name}: {seen_of if starts else 'none here'}"]
    name = f"end tokens (id {seen.end_id} {quoted(ends[0].text)})" if ends else f"end tokens (id {seen.end_id})"
    return [*lines, f"{name}: {_share(ends) if ends else 'none here'}", f"masked in the data: {masked:,}"]


def _after(tokens: list[Token], i: int) -> list[Token]:
    """The token behind one, if it is of the same document."""
    return [t for t in tokens[i + 1 : i + 2] if t.document == tokens[i].document]


def _begins(tokens: list[Token], i: int) -> bool:
    return i == 0 or tokens[i].document != tokens[i - 1].document


def _share(tokens: list[Token]) -> str:
    return f"{sum(t.learnt for t in tokens):,} of {len(tokens):,} learnt"


def _shown(tokens: list[Token], everything: bool) -> list[int]:
    """Places around which something changes: another document, or from learnt to not learnt."""
    if everything:
        return list(range(len(tokens)))
    kinds = [(t.document, t.learnt) for t in tokens]
    changes = [0, *(i for i in range(1, len(kinds)) if kinds[i] != kinds[i - 1]), len(kinds)]
    near = {j for i in changes for j in range(i - EDGE, i + EDGE)}
    return sorted(j for j in near if 0 <= j < len(tokens))


def _line(token: Token, paint: _Paint) -> str:
    def column(value: int | None) -> str:
        return f"{'-' if value is None else value:>8}"

    place = f"{'next' if token.place is None else token.place:>7}"
    colour = _GREEN if token.learnt else _GREY if token.why_not == "padding" else _YELLOW
    said = "learnt" if token.learnt else f"input only: {token.why_not}"
    text = f"{column(token.id)}  {quoted(token.text):<16} {said}"
    return f"  {place} {column(token.document)} {column(token.position)} {paint(colour, text)}"


def quoted(text: str) -> str:
    """In quotes, with nothing in it that a terminal would act on: text of others may hold its commands."""
    safe = (c if c.isprintable() and c != "\\" else c.encode("unicode_escape", "surrogatepass").decode() for c in text)
    return "'" + "".join(safe) + "'"
