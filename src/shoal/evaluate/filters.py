"""What is made of an answer before it is compared: lm-eval's filters by their names.

Patterns are a stranger's, and one may try for ever: all answers of a task are filtered by one child with limits.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shoal.errors import DataError
from shoal.evaluate.task import AS_IT_IS, Filter
from shoal.generate.limited import Allowance, Refused, limited
from shoal.values import read_large, text, whole

LIMITS = Allowance(cpu_s=60, memory_bytes=4 << 30, answer_bytes=1 << 30)


def _short(said: object) -> str:
    return text(said, 10_000)


# The options of each, and what they may be.
FILTERS: Mapping[str, Mapping[str, Callable[[object], Any]]] = {
    "take_first": {},
    "lowercase": {},
    "uppercase": {},
    "remove_whitespace": {},
    "regex": {"regex_pattern": _short, "group_select": lambda said: whole(said, 1000, -1000), "fallback": _short},
}


def filtered(filters: Sequence[Filter], answers: Sequence[str]) -> dict[str, list[str]]:
    """By the name of each filter, what it makes of every answer."""
    if tuple(filters) == (AS_IT_IS,):
        return {AS_IT_IS.name: list(answers)}
    try:
        made = limited(lambda: json.dumps(_all(filters, answers)).encode(), LIMITS)
    except Refused as e:
        raise DataError(f"filter_list cannot be applied: {e}; correct the task file.") from None
    found: dict[str, list[str]] = read_large(made, 100_000_000)
    return found


def _all(filters: Sequence[Filter], answers: Sequence[str]) -> dict[str, list[str]]:
    """In the child."""
    return {one.name: [_through(one, answer) for answer in answers] for one in filters}


def _through(one: Filter, answer: str) -> str:
    for name, options in one.steps:
        match name:
            case "lowercase":
                answer = answer.lower()
            case "uppercase":
                answer = answer.upper()
            case "remove_whitespace":
                answer = answer.strip()
            case "regex":
                answer = _found(answer, **options)
    return answer


def _found(
    answer: str, regex_pattern: str = r"#### (\-?[0-9\.\,]+)", group_select: int = 0, fallback: str = "[invalid]"
) -> str:
    """Of all that the pattern finds, one; of its groups, the first that is not empty."""
    try:
        found = re.findall(regex_pattern, answer)
    except re.error as e:
        raise Refused(f"the pattern {regex_pattern[:60]!r} is none: {e}") from None
    if not found:
        return fallback
    try:
        one = found[group_select]
    except IndexError:
        raise Refused(f"group_select is {group_select}, and an answer has {len(found)} matches") from None
    if isinstance(one, tuple):
        one = next((part for part in one if part), fallback)
    return str(one).strip()
