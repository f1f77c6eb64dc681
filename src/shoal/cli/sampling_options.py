"""How tokens are picked: the options of every verb that generates, in the same words."""

from __future__ import annotations

import argparse
import math
from typing import TYPE_CHECKING

from shoal.errors import UsageError

if TYPE_CHECKING:
    from shoal.data.tokenizer import Tokenizer
    from shoal.generate.request import Sampling

LEAST: dict[str, float] = {
    "max_tokens": 1,
    "temperature": 0,
    "top_k": 1,
    "top_p": 0,
    "min_p": 0,
    "repetition_penalty": 0,
    "presence_penalty": -math.inf,
    "frequency_penalty": -math.inf,
    "seed": 0,
}
MOST = {"top_p": 1.0, "min_p": 1.0, "seed": 2**63 - 1}


def add_sampling(parser: argparse.ArgumentParser, max_tokens: int | None = 100) -> None:
    group = parser.add_argument_group("how tokens are picked")
    most = "what the context has room for" if max_tokens is None else max_tokens
    group.add_argument(
        "--max-tokens", type=int, default=max_tokens, metavar="N", help=f"at most this many (default: {most})"
    )
    group.add_argument(
        "--temperature", type=float, default=0.8, metavar="T", help="0 takes the likeliest token (default: 0.8)"
    )
    group.add_argument("--top-k", type=int, metavar="K", help="draw from the K likeliest tokens only")
    group.add_argument("--top-p", type=float, default=1.0, metavar="P", help="from the likeliest that make up P of all")
    group.add_argument("--min-p", type=float, default=0.0, metavar="P", help="from those at least P of the likeliest")
    group.add_argument(
        "--repetition-penalty", type=float, default=1.0, metavar="R", help="above 1: less of what stands there already"
    )
    group.add_argument("--presence-penalty", type=float, default=0.0, metavar="R", help="taken from what was answered")
    group.add_argument(
        "--frequency-penalty", type=float, default=0.0, metavar="R", help="the same, as often as it was answered"
    )
    group.add_argument("--seed", type=int, default=0, help="of the draws (default: 0)")
    group.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="ends an answer, and is no part of it; may be again"
    )


def refuse_sampling(args: argparse.Namespace) -> None:
    """What cannot be, said before anything slow begins."""
    for name, least in LEAST.items():
        value, option = getattr(args, name), f"--{name.replace('_', '-')}"
        if value is None:
            continue
        if not value >= least:  # NaN is not
            raise UsageError(f"{option} is {value}, but {least:g} is the least it can be.")
        if not value <= (most := MOST.get(name, math.inf)) or value == math.inf:
            raise UsageError(f"{option} is {value}, but {most:g} is the most it can be.")
    if args.repetition_penalty == 0:
        raise UsageError("--repetition-penalty is 0, but it divides: 1 is none, and more is stronger.")
    if "" in args.stop:
        raise UsageError("--stop is empty: give a text that ends an answer, or leave it out.")


def sampling_of(args: argparse.Namespace, tokenizer: Tokenizer) -> Sampling:
    """Stop strings (`args.stop`) are no part of it: they are text (`shoal.generate.texts`)."""
    from shoal.generate.request import Sampling

    refuse_sampling(args)
    return Sampling(
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        repetition_penalty=args.repetition_penalty,
        presence_penalty=args.presence_penalty,
        frequency_penalty=args.frequency_penalty,
        seed=args.seed,
        stop_ids=frozenset({tokenizer.eos_id}),
    )
