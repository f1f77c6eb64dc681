"""The name that a person meant: the one that is close in spelling, or none. A leaf: it imports nothing of ours.

`difflib`'s ratio took `retries` for `metrics` and `serve` for `sweep`: it counts letters in common, wherever they are.
Here it is slips of the hand that count: a letter too many, too few, another, or two swapped.
"""

from __future__ import annotations

from collections.abc import Iterable

_SHORTEST = 3  # of names of two letters (tp, pp, lr) every other is one slip away
_FEWER, _MORE = 8, 12  # from so many letters on, two slips and three


def closest(word: str, known: Iterable[str]) -> str | None:
    """The one of `known` that `word` is a slip of; None where none is close."""
    found = [(slips, name) for name in known if (slips := _slips(_plain(word), _plain(name))) is not None]
    return min(found, key=lambda pair: pair[0])[1] if found else None


def _plain(name: str) -> str:
    """As it is heard: seqLen, seq-len and SEQ_LEN are seq_len."""
    return "".join(c for c in name.lower() if c.isalnum())


def _slips(word: str, name: str) -> int | None:
    """How many slips make one of the other; None where they are too many for words so short."""
    if word == name:
        return 0
    short, long = sorted((word, name), key=len)
    if len(short) < _SHORTEST:
        return 1 if short and long == short + short[-1] else None  # a key pressed twice
    if len(short) > _SHORTEST and 2 * len(short) > len(long) and long.startswith(short):
        return 1  # optim, sched, training
    most = 1 + (word[0] == name[0]) * ((len(short) >= _FEWER) + (len(short) >= _MORE))
    if len(long) - len(short) > most:
        return None
    slips = _distance(word, name)
    return slips if slips <= most else None


def _distance(a: str, b: str) -> int:
    """Letters put in, left out, changed, or swapped with the next one (Damerau 1964)."""
    before: list[int] = []
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        older, before, row = before, row, [i]
        for j, y in enumerate(b, 1):
            row.append(min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (x != y)))
            if i > 1 and j > 1 and x == b[j - 2] and a[i - 2] == y:
                row[j] = min(row[j], older[j - 2] + 1)
    return row[-1]
