"""A regular expression as a rule of a grammar: the whole text fits it, as with `re.fullmatch`.

xgrammar reads expressions itself, but it leaves out what looks ahead, and within JSON it joins states that differ: of
`[0-9]{1,3}(x[0-9]+)?` it makes numbers of any length (0.2.8; docs/decisions/091-forms-of-answers.md). A rule of plain
parts it keeps to. Classes such as \\w mean ASCII letters, and within JSON characters that need an escape come only
where they are named.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from re import _constants as ops  # type: ignore[attr-defined]  # where Python keeps what it reads of an expression
from re import _parser as reading  # type: ignore[attr-defined]
from typing import Any

from shoal.values import BadValue, shown

MOST_CHARS = 4096
MOST_TIMES = 100_000
Span = tuple[int, int]
_LAST = 0x10FFFF
_SURROGATES = (0xD800, 0xDFFF)
_ESCAPED = {ord('"'): r'"\\\""', ord("\\"): r'"\\\\"'}  # within JSON
_WORD = [(48, 57), (65, 90), (95, 95), (97, 122)]
_DIGIT, _BLANK = [(48, 57)], [(9, 13), (32, 32)]
_ASCII = [(0, 127)]


def as_rule(pattern: str, within_json: bool) -> str:
    """What stands on the right side of a rule. BadValue: it has what no such rule can say."""
    if len(pattern) > MOST_CHARS:
        raise BadValue(f"it has more than {MOST_CHARS:,} characters")
    try:
        read = reading.parse(pattern)
    except (re.error, OverflowError, RecursionError, ValueError) as e:
        raise BadValue(f"'{shown(pattern)}' is no regular expression ({shown(str(e))})") from None
    if read.state.flags & ~re.UNICODE:
        raise BadValue(f"it has flags, as in '{shown(pattern[:12])}'")
    try:
        return _Writer(within_json).sequence(list(read), True, True)
    except RecursionError:
        raise BadValue("it is nested too deeply") from None


class _Writer:
    def __init__(self, within_json: bool) -> None:
        self._json = within_json
        self._all = _without([(32 if within_json else 0, _LAST)], [_SURROGATES])

    def sequence(self, read: Sequence[tuple[Any, Any]], first: bool, last: bool) -> str:
        """`first` and `last`: whether it stands at the beginning and at the end of the whole."""
        parts = []
        while read and read[0] in ((ops.AT, ops.AT_BEGINNING), (ops.AT, ops.AT_BEGINNING_STRING)) and first:
            read = read[1:]
        while read and read[-1] in ((ops.AT, ops.AT_END), (ops.AT, ops.AT_END_STRING)) and last:
            read = read[:-1]
        for i, (op, what) in enumerate(read):
            parts.append(self._part(op, what, first and i == 0, last and i == len(read) - 1))
        return "(" + " ".join(parts or ['""']) + ")"

    def _part(self, op: Any, what: Any, first: bool, last: bool) -> str:
        if op is ops.LITERAL:
            return self._named([(what, what)])
        if op is ops.NOT_LITERAL:
            return self._meant(_without(self._all, [(what, what)]))
        if op is ops.ANY:
            return self._meant(_without(self._all, [(10, 10)]))
        if op is ops.IN:
            return self._set(what)
        if op is ops.BRANCH:
            return "(" + " | ".join(self.sequence(list(one), first, last) for one in what[1]) + ")"
        if op is ops.SUBPATTERN and not what[1] and not what[2]:
            return self.sequence(list(what[3]), first, last)
        if op in (ops.MAX_REPEAT, ops.MIN_REPEAT):
            least, most, inner = what
            if least > MOST_TIMES or (most is not ops.MAXREPEAT and most > MOST_TIMES):
                raise BadValue(f"it has more than {MOST_TIMES:,} times the same")
            times = f"{{{least},{'' if most is ops.MAXREPEAT else most}}}"
            return f"({self.sequence(list(inner), False, False)}{times})"
        names = {ops.AT: "a mark of a place (^, $, \\b) in the middle", ops.GROUPREF: "a group that comes again"}
        raise BadValue(f"it has {names.get(op, 'what looks ahead or behind, or never goes back')}")

    def _set(self, members: Sequence[tuple[Any, Any]]) -> str:
        negated = bool(members) and members[0][0] is ops.NEGATE
        named: list[Span] = []
        whole = self._all
        for op, what in members[negated:]:
            if op is ops.CATEGORY:
                named += self._category(what)
                whole = _within(whole, _ASCII)  # what else is a letter or a digit, engines see differently
            else:
                named += [(what, what)] if op is ops.LITERAL else [what]
        return self._meant(_without(whole, named)) if negated else self._named(named)

    def _category(self, which: Any) -> list[Span]:
        for plain, other, spans in (
            (ops.CATEGORY_DIGIT, ops.CATEGORY_NOT_DIGIT, _DIGIT),
            (ops.CATEGORY_WORD, ops.CATEGORY_NOT_WORD, _WORD),
            (ops.CATEGORY_SPACE, ops.CATEGORY_NOT_SPACE, _BLANK),
        ):
            if which is plain:
                return _within(spans, self._all)
            if which is other:
                return _without(_within(_without(self._all, spans), _ASCII), self._quotes())
        raise BadValue("it has a class of characters that is not known")

    def _quotes(self) -> list[Span]:
        return [(code, code) for code in _ESCAPED] if self._json else []

    def _meant(self, spans: list[Span]) -> str:
        """Of many characters that nobody named those that need no escape."""
        return _class(_without(spans, self._quotes()))

    def _named(self, spans: list[Span]) -> str:
        if not self._json:
            return _class(_within(spans, self._all))
        single = [code for code in _ESCAPED if any(low <= code <= high for low, high in spans)]
        plain = _without(_within(spans, self._all), self._quotes())
        ways = [*([_class(plain)] if plain else []), *(_ESCAPED[code] for code in single)]
        if not ways:
            raise BadValue("it has a control character, which JSON writes in several ways")
        return f"({' | '.join(ways)})" if len(ways) > 1 else ways[0]


def _without(spans: Iterable[Span], out: Iterable[Span]) -> list[Span]:
    left = list(spans)
    for low, high in out:
        cut = [piece for a, b in left for piece in ((a, min(b, low - 1)), (max(a, high + 1), b))]
        left = [(a, b) for a, b in cut if a <= b]
    return list(dict.fromkeys(left))


def _within(spans: Iterable[Span], bounds: Sequence[Span]) -> list[Span]:
    cut = [(max(a, low), min(b, high)) for a, b in spans for low, high in bounds]
    return [(a, b) for a, b in cut if a <= b]


def _class(spans: list[Span]) -> str:
    if not spans:
        raise BadValue("it has a set without a character")
    return "[" + "".join(_letter(a) if a == b else f"{_letter(a)}-{_letter(b)}" for a, b in spans) + "]"


def _letter(code: int) -> str:
    return chr(code) if chr(code).isascii() and chr(code).isalnum() else f"\\U{code:08x}"
