"""The runs of a sweep: every combination of the values given, or so many drawn at random, as overrides of a run file.

`train.optimizer.lr=1e-3,3e-4` lists values; `train.optimizer.lr=1e-4..1e-2:log` is a range to draw from.
"""

from __future__ import annotations

import itertools
import math
import random
import re
from collections.abc import Callable, Sequence

from shoal.errors import UsageError

Point = tuple[str, ...]  # overrides
Draw = Callable[[random.Random], str]
MOST = 10_000  # runs of one sweep: more is a slip of the hand
_RANGE = re.compile(r"(?P<low>[^.:,]+(?:\.\d[^.:,]*)?)\.\.(?P<high>[^:,]+)(?P<log>:log)?")
_OUTSIDE = re.compile(r",(?![^\[{(]*[\]})])")  # a comma that is not within brackets


def grid(lists: Sequence[str]) -> list[Point]:
    """Every combination; the last list changes fastest."""
    named = [(key, _listed(value)) for key, value in map(_parted, lists)]
    _once([key for key, _ in named])
    if math.prod(len(values) for _, values in named) > MOST:
        raise UsageError(f"--grid: that are more than {MOST:,} runs; list fewer values, or draw some with --random N.")
    return [
        tuple(f"{key}={value}" for (key, _), value in zip(named, combination, strict=True))
        for combination in itertools.product(*(values for _, values in named))
    ]


def drawn(lists: Sequence[str], ranges: Sequence[str], count: int, seed: int) -> list[Point]:
    """So many different ones, the same for the same seed."""
    if not 0 < count <= MOST:
        raise UsageError(f"--random {count}: give a number from 1 to {MOST:,}.")
    named: list[tuple[str, Draw]] = [(key, _choice(_listed(value))) for key, value in map(_parted, lists)]
    named += [(key, _range(key, value)) for key, value in map(_parted, ranges)]
    _once([key for key, _ in named])
    rng = random.Random(seed)
    found: dict[Point, None] = {}
    for _ in range(100 * count):
        if len(found) == count:
            break
        found[tuple(f"{key}={draw(rng)}" for key, draw in named)] = None
    if len(found) < count:
        raise UsageError(
            f"--random {count}: there are only {len(found)} different ones; widen a range, or ask for less."
        )
    return list(found)


def _parted(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key or not value:
        raise UsageError(f"'{text}' is not NAME=VALUES, such as train.optimizer.lr=1e-3,3e-4.")
    return key, value


def _listed(text: str) -> list[str]:
    return [value.strip() for value in _OUTSIDE.split(text)]


def _once(keys: list[str]) -> None:
    if twice := next((key for key in keys if keys.count(key) > 1), None):
        raise UsageError(f"{twice} is given twice; give all its values at once.")
    if not keys:
        raise UsageError("say what to vary: `--grid NAME=A,B`, or `--random N --range NAME=LOW..HIGH`.")


def _choice(values: list[str]) -> Draw:
    return lambda rng: rng.choice(values)


def _range(key: str, text: str) -> Draw:
    found = _RANGE.fullmatch(text)
    try:
        low, high = (float(found[side]) for side in ("low", "high")) if found else (0.0, 0.0)
    except ValueError:
        found, low, high = None, 0.0, 0.0
    if not found or not low < high or (found["log"] and low <= 0):
        raise UsageError(
            f"--range {key}={text}: give LOW..HIGH or LOW..HIGH:log, such as 1e-4..1e-2:log, the lower first, and "
            "above 0 for :log."
        )
    whole = all(re.fullmatch(r"-?\d+", found[side].strip()) for side in ("low", "high"))
    log = bool(found["log"])

    def draw(rng: random.Random) -> str:
        at = math.exp(rng.uniform(math.log(low), math.log(high))) if log else rng.uniform(low, high)
        if not whole:
            return f"{at:.6g}"
        return str(round(at) if log else rng.randint(int(low), int(high)))

    return draw
