"""Whether a tokenizer's regular expression could ever take two neighbouring characters into one match.

Enough of the syntax is read for the expressions that cut text into words: alternatives of short runs of characters and
classes. Whatever else an expression has, `read` gives None, and nothing is claimed about it.
"""

from __future__ import annotations

import itertools
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

Test = Callable[[str], bool | None]  # of one character; None: not known
_MOST_ALTERNATIVES = 512
_MANY = 1 << 30


class _Unread(Exception):
    """Syntax that is not known here."""


@dataclass(frozen=True)
class Atom:
    """One class of characters and how often it comes."""

    source: str
    test: Test
    least: int = 1
    most: int = 1


@dataclass(frozen=True)
class Alternative:
    atoms: tuple[Atom, ...]
    looks_ahead: bool = False

    @property
    def run(self) -> tuple[tuple[str, int, int], ...]:
        return tuple((atom.source, atom.least, atom.most) for atom in self.atoms)

    def may_hold(self, c: str) -> bool:
        return any(atom.test(c) is not False for atom in self.atoms)

    def may_join(self, x: str, y: str) -> bool:
        """Whether some match could have x directly before y."""
        for i, atom in enumerate(self.atoms):
            if atom.test(x) is False:
                continue
            if atom.most > 1 and atom.test(y) is not False:
                return True
            for after in self.atoms[i + 1 :]:
                if after.test(y) is not False:
                    return True
                if after.least > 0:
                    break
        return False

    def takes(self, c: str) -> bool:
        """Whether it matches c by itself, whatever follows."""
        needed = [atom for atom in self.atoms if atom.least > 0]
        return not self.looks_ahead and len(needed) == 1 and needed[0].least == 1 and needed[0].test(c) is True


@dataclass(frozen=True)
class Pattern:
    alternatives: tuple[Alternative, ...]

    def apart(self, before: str, x: str, y: str) -> bool:
        """Whether no match has x and y, and none up to x depends on y. `before` stands before x, or is empty."""
        if any(one.may_join(x, y) for one in self.alternatives):
            return False
        return all(
            not one.looks_ahead or not one.may_hold(x) or self._falls_back(i, before)
            for i, one in enumerate(self.alternatives)
        )

    def takes(self, c: str) -> bool:
        return any(one.takes(c) for one in self.alternatives)

    def _falls_back(self, i: int, before: str) -> bool:
        """`\\s+(?!\\S)|\\s+`: where the first does not match, the second takes the same single character."""
        one, *others = self.alternatives[i : i + 2]
        return (
            len(one.atoms) == 1
            and [other.run for other in others if not other.looks_ahead] == [one.run]
            and before != ""
            and one.atoms[0].test(before) is False
        )


@lru_cache(256)
def read(pattern: str) -> Pattern | None:
    try:
        found, end = _alternatives(pattern, 0, fold=False)
        return Pattern(tuple(found)) if end == len(pattern) else None
    except (_Unread, IndexError, ValueError):
        return None


def _alternatives(p: str, i: int, fold: bool) -> tuple[list[Alternative], int]:
    """Up to the end of the pattern or of the group."""
    done: list[Alternative] = []
    now = [Alternative(())]
    while i < len(p) and p[i] != ")":
        if p[i] == "|":
            done += now
            now, i = [Alternative(())], i + 1
            continue
        if any(one.looks_ahead for one in now):
            raise _Unread  # only at the end
        if p.startswith(("(?!", "(?="), i):
            atom, i = _atom(p, i + 3, fold)
            if p[i] != ")" or atom.most != 1:
                raise _Unread
            now, i = [Alternative(one.atoms, looks_ahead=True) for one in now], i + 1
            continue
        if p[i] == "(":
            inner, i, optional = _group(p, i, fold)
            if optional:
                inner.append(Alternative(()))
            now = [Alternative(one.atoms + two.atoms, two.looks_ahead) for one, two in itertools.product(now, inner)]
        else:
            atom, i = _atom(p, i, fold)
            least, most, i = _times(p, i)
            now = [Alternative((*one.atoms, Atom(atom.source, atom.test, least, most))) for one in now]
        if len(done) + len(now) > _MOST_ALTERNATIVES:
            raise _Unread
    return done + now, i


def _group(p: str, i: int, fold: bool) -> tuple[list[Alternative], int, bool]:
    opening = next(one for one in ("(?i:", "(?:", "(") if p.startswith(one, i))
    if opening == "(" and p[i + 1] == "?":
        raise _Unread
    inner, i = _alternatives(p, i + len(opening), fold or opening == "(?i:")
    if p[i] != ")":
        raise _Unread
    least, most, i = _times(p, i + 1)
    if most != 1:
        raise _Unread
    return inner, i, least == 0


def _times(p: str, i: int) -> tuple[int, int, int]:
    times, i = (1, 1), i
    mark = p[i : i + 1]
    if mark in ("?", "*", "+") and mark:
        times, i = {"?": (0, 1), "*": (0, _MANY), "+": (1, _MANY)}[mark], i + 1
    elif mark == "{":
        end = p.index("}", i)
        low, comma, high = p[i + 1 : end].partition(",")
        times, i = (int(low or 0), int(high) if high else _MANY if comma else int(low)), end + 1
    else:
        return *times, i
    if p[i : i + 1] == "?":
        raise _Unread  # as few as possible: where a match ends depends on what follows
    return *times, i + (p[i : i + 1] == "+")


def _atom(p: str, i: int, fold: bool) -> tuple[Atom, int]:
    if p[i] == "[":
        return _class(p, i, fold)
    if p[i] == "\\":
        test, end = _escape(p, i)
        return Atom(p[i:end], test), end
    if p[i] in "^$.*+?{":
        raise _Unread
    return Atom(p[i], _literal(p[i], fold)), i + 1


def _class(p: str, i: int, fold: bool) -> tuple[Atom, int]:
    begin, i = i, i + 1
    negated = p[i] == "^"
    i += negated
    tests: list[Test] = []
    while p[i] != "]" or not tests:
        if p[i] == "[" or p.startswith("&&", i):
            raise _Unread
        single: str | None = None
        if p[i] == "\\":
            test, end = _escape(p, i)
            single = _SINGLE.get(p[i + 1], p[i + 1] if not p[i + 1].isalnum() else None)
        else:
            single, test, end = p[i], _literal(p[i], fold), i + 1
        if p[end] == "-" and p[end + 1] != "]":
            if single is None or p[end + 1] in "\\[" or fold:
                raise _Unread
            test, end = _range(single, p[end + 1]), end + 2
        tests.append(test)
        i = end
    return Atom(p[begin : i + 1], _any(tests, negated)), i + 1


_SINGLE = {"r": "\r", "n": "\n", "t": "\t", "f": "\f", "v": "\v"}


def _escape(p: str, i: int) -> tuple[Test, int]:
    c = p[i + 1]
    if c in "pP":
        if p[i + 2] != "{":
            raise _Unread
        end = p.index("}", i)
        return _property(p[i + 3 : end], c == "P"), end + 1
    if c in _SINGLE:
        return _literal(_SINGLE[c], fold=False), i + 2
    if c.lower() in _KINDS:
        kind = _KINDS[c.lower()]
        return (kind if c.islower() else _any([kind], negated=True)), i + 2
    if c.isalnum():
        raise _Unread
    return _literal(c, fold=False), i + 2


def _literal(wanted: str, fold: bool) -> Test:
    if not fold:
        return lambda c: c == wanted
    return lambda c: c.casefold() == wanted.casefold() or c.lower() == wanted.lower()


def _range(first: str, last: str) -> Test:
    return lambda c: first <= c <= last


def _property(name: str, negated: bool) -> Test:
    negated ^= name.startswith("^")
    name = name.lstrip("^")
    if len(name) > 2 or name[:1] not in "LMNPSZC" or not name:
        return lambda c: None  # a script: not known

    def test(c: str) -> bool | None:
        category = unicodedata.category(c)
        return None if category == "Cn" else category.startswith(name) != negated

    return test


def _any(tests: list[Test], negated: bool) -> Test:
    def test(c: str) -> bool | None:
        answers = [one(c) for one in tests]
        found = True if True in answers else None if None in answers else False
        return found if found is None else found != negated

    return test


def _space(c: str) -> bool | None:
    return None if c in "\x1c\x1d\x1e\x1f\u180e\u200b" else c.isspace()


def _digit(c: str) -> bool | None:
    return unicodedata.category(c) == "Nd"


def _word(c: str) -> bool | None:
    if c.isascii():
        return c.isalnum() or c == "_"
    return True if unicodedata.category(c) in ("Lu", "Ll", "Lt", "Lo", "Nd") else None


_KINDS: dict[str, Test] = {"s": _space, "d": _digit, "w": _word}
