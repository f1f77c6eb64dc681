"""Turns what is wrong with a run file into sentences: the place, the name, what was given, what is allowed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from pydantic import ValidationError

from shoal.spec.describe import allowed, given
from shoal.spec.elsewhere import answered_value
from shoal.spec.names import Path, dotted, hint, known_part, lookup

Where = Callable[[Path], str]


def sentences(error: ValidationError, values: dict[str, Any], where: Where, missing: Iterable[Path] = ()) -> list[str]:
    """One sentence a wrong name; `where` gives the place of a path. `missing`: what a rule, and no type, asks for."""
    unknown: dict[Path, str] = {}
    said = {path: f"{where(path)}: {is_missing(path)}" for path in missing}

    for problem in error.errors(include_url=False, include_context=False, include_input=False):
        loc = tuple(problem["loc"])
        if problem["type"] == "extra_forbidden":
            unknown[loc] = f"{where(loc)}: {dotted(loc)} is not a name of the run file; {ended(hint(loc))}"
        elif problem["type"] == "missing":
            said[loc] = f"{where(loc)}: {is_missing(loc)}"
        else:
            path = known_part(loc)
            value = _at(values, path)
            said[path] = f"{where(path)}: {is_wrong(path, value)}"
    # A misspelt name is also a missing one, and a list with a wrong item a wrong list; the first sentence says it all.
    meant = {path for path in said if any(text.endswith(f"mean {dotted(path)}?") for text in unknown.values())}
    wider = {path for path in said for other in (*said, *unknown) if path != other and other[: len(path)] == path}
    return [*unknown.values(), *(text for path, text in said.items() if path not in meant | wider)]


def is_missing(path: Path) -> str:
    return f"{dotted(path)} is missing; {_missing(path)}"


def is_wrong(path: Path, value: Any) -> str:
    instead = answered_value(dotted(path), value) or f"but must be {_must_be(path)}"
    return f"{dotted(path)} is {given(value)}, {instead}."


def _missing(path: Path) -> str:
    name = lookup(path)
    if name is None:
        return "add it."
    if name.section and not name.is_list:
        return f"add a section `{path[-1]}:` with {_needed(name.section)}."
    about = str(name.field.description).split(".")[0].split(";")[0]
    return f"add `{path[-1]}:` with {allowed(name.field)} ({about[0].lower()}{about[1:]})."


def _needed(section: Any) -> str:
    needed = [key for key, field in section.model_fields.items() if field.is_required()]
    needed = needed or list(section.model_fields)[:1]
    return " and ".join(f"`{key}:`" for key in needed)


def _must_be(path: Path) -> str:
    name = lookup(path)
    return allowed(name.field) if name else "a section"


def _at(values: Any, path: Path) -> Any:
    for part in path:
        try:
            values = values[part]
        except (KeyError, IndexError, TypeError):
            return None
    return values


def ended(text: str) -> str:
    return text if text.endswith("?") else text + "."
