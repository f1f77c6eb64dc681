"""Node names as Slurm folds them: `n[1-3,07],gpu2` are n1, n2, n3, n07 and gpu2."""

from __future__ import annotations

import re
from itertools import product
from math import prod

_NUMBER = re.compile(r"[0-9]{1,18}")
MOST = 100_000  # names; a malformed range must not fill the memory


def expand(folded: str) -> tuple[str, ...]:
    """Empty for what cannot be read, such as a list that was cut off."""
    if folded.count("[") != folded.count("]"):
        return ()
    names: list[str] = []
    for one in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", folded):
        parts = re.split(r"\[([^\]]*)\]", one)  # text, ranges, text, ranges, … text
        choices = [[part] if i % 2 == 0 else _range(part) for i, part in enumerate(parts)]
        if len(names) + prod(map(len, choices)) > MOST:  # before they are made
            return ()
        names += ["".join(chosen) for chosen in product(*choices)]
    return tuple(names)


def _range(text: str) -> list[str]:
    found: list[str] = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        if not dash:
            found.append(first)
        elif _NUMBER.fullmatch(first) and _NUMBER.fullmatch(last) and int(last) - int(first) < MOST - len(found):
            found += [str(n).zfill(len(first)) for n in range(int(first), int(last) + 1)]
    return found
