"""Node names as Slurm folds them: `n[1-3,07],gpu2` are n1, n2, n3, n07 and gpu2."""

from __future__ import annotations

import re
from itertools import product
from math import prod

_NUMBER = re.compile(r"[0-9]{1,18}")
MOST = 100_000  # names; a malformed range must not fill the memory
MOST_LETTERS = 255  # of a name, its ranges folded: no system has a longer name of a host

Ranges = list[tuple[int, int, int]]  # first, last, digits


def expand(folded: str) -> tuple[str, ...]:
    """Empty for what cannot be read, such as a list that was cut off. Names are counted before any is made."""
    if folded.count("[") != folded.count("]"):
        return ()
    listed: list[list[Ranges | str]] = []
    count = 0
    for one in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", folded):
        parts = re.split(r"\[([^\]]*)\]", one)  # text, ranges, text, ranges, … text
        choices = [part if i % 2 == 0 else _ranges(part) for i, part in enumerate(parts)]
        count += prod(map(_count, choices))
        if count > MOST or not all(map(_count, choices)) or sum(map(len, parts[::2])) > MOST_LETTERS:
            return ()
        listed.append(choices)
    return tuple("".join(chosen) for choices in listed for chosen in product(*map(_written, choices)))


def _ranges(text: str) -> Ranges:
    """Empty where one of them is none."""
    found: Ranges = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        last = last if dash else first
        if not _NUMBER.fullmatch(first) or not _NUMBER.fullmatch(last) or int(first) > int(last):
            return []
        found.append((int(first), int(last), len(first)))
    return found


def _count(choice: Ranges | str) -> int:
    return 1 if isinstance(choice, str) else sum(last - first + 1 for first, last, _ in choice)


def _written(choice: Ranges | str) -> list[str]:
    if isinstance(choice, str):
        return [choice]
    return [str(n).zfill(digits) for first, last, digits in choice for n in range(first, last + 1)]
