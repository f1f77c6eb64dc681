"""Fields and jinja templates of a task over an item, by lm-eval's rules.

A template is a stranger's program. It runs in jinja's sandbox, and all of this runs in a child with limits of time,
memory and answer (`shoal.evaluate.questions`): nothing here may be called in the process of the user.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from jinja2 import BaseLoader, StrictUndefined
from jinja2 import Template as Compiled
from jinja2.exceptions import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from shoal.evaluate.task import Item, Template
from shoal.generate.limited import Refused

MOST_LITERAL = 1 << 20  # characters of a list that a template spells


@lru_cache(maxsize=1)
def _environment() -> ImmutableSandboxedEnvironment:
    made = ImmutableSandboxedEnvironment(loader=BaseLoader(), undefined=StrictUndefined, keep_trailing_newline=True)
    made.filters["regex_replace"] = lambda text, pattern, by, count=0: re.sub(pattern, by, text, count=count)
    return made


@lru_cache(maxsize=64)
def _compiled(template: str) -> Compiled:
    return _environment().from_string(template)


def rendered(template: str, item: Item) -> str:
    try:
        return _compiled(template).render(**item)
    except TemplateError as e:
        raise Refused(f"the template {template[:60]!r} cannot be filled in: {e.message or type(e).__name__}") from None
    except MemoryError:
        raise
    except Exception as e:  # whatever a stranger's expression runs into: a TypeError, a ValueError
        raise Refused(f"the template {template[:60]!r} cannot be filled in: {type(e).__name__}: {e}") from None


Said = str | int | float


def text_of(template: Template, item: Item, choosing: bool) -> Said:
    """A number (only where the task has choices) says which of the choices is the question."""
    if isinstance(template, int):
        return template
    if template in item:
        return _text_or_number(item[template], template)
    made = rendered(template, item)
    return _number(made) if choosing and made.isdigit() else made


def target_of(template: Template | Sequence[str], item: Item, choosing: bool) -> Said | list[Any]:
    """The answer, or the number of the choice, or several of them."""
    if isinstance(template, int):
        return template
    if not isinstance(template, str):
        return list(template)
    if template in item:
        said = item[template]
        return list(said) if isinstance(said, list) else _text_or_number(said, template)
    made = rendered(template, item)
    if choosing and made.isdigit():
        return _number(made)
    if len(made) >= 2 and made[0] == "[" and made[-1] == "]":
        try:
            return list(_literal(made))
        except Refused:
            return made
    return made


def choices_of(template: str | Sequence[str], item: Item) -> list[str]:
    if not isinstance(template, str):
        return list(template)
    said = item[template] if template in item else _literal(rendered(template, item))
    if not isinstance(said, list) or not said or not all(isinstance(one, str) and one for one in said):
        raise Refused(f"doc_to_choice ({template[:60]!r}) gives no list of texts, but {type(said).__name__}")
    return said


def field_or_text(template: str, item: Mapping[str, Any]) -> str:
    said = item[template] if template in item else rendered(template, item)
    if not isinstance(said, str):
        raise Refused(f"the field {template!r} is {type(said).__name__}, where a text is expected")
    return said


def _text_or_number(said: object, name: str) -> Said:
    if not isinstance(said, str | int | float):
        raise Refused(f"the field {name!r} is {type(said).__name__}, where a text or a number is expected")
    return said


def _number(digits: str) -> int:
    try:
        return int(digits) if len(digits) < 10 else -1
    except ValueError:  # digits of no number, such as ²
        raise Refused(f"{digits[:20]!r} names no choice") from None


def _literal(text: str) -> Any:
    if len(text) > MOST_LITERAL:
        raise Refused(f"a list of {len(text):,} characters is spelled, where {MOST_LITERAL:,} are allowed")
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError, RecursionError):
        raise Refused(f"{text[:60]!r} is no list") from None
