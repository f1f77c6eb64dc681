"""Values on the command line: `train.steps=100`, `--train.steps 100`, `data.train.0.weight=2`, `data.train=[a, b]`."""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Sequence
from typing import Any

from shoal.errors import SpecError, UsageError
from shoal.masking import mask
from shoal.spec.describe import allowed
from shoal.spec.layers import COMMAND_LINE, Layer, Origin, layer, leaves, normal
from shoal.spec.length import WAYS
from shoal.spec.names import Name, Path, dotted, hint, lookup
from shoal.spec.problems import ended
from shoal.spec.yaml_text import parse, scalar

MOST_SHOWN = 200  # characters of an override in what is said of it
_ASSIGNMENT = re.compile(r"[A-Za-z_][\w-]*(\.[\w-]+)*=", re.ASCII)
_OPTION = re.compile(r"--([A-Za-z_][\w-]*(?:\.[\w-]+)+|name|seed)(=.*)?", re.ASCII | re.DOTALL)


def split_overrides(argv: Sequence[str], own: Sequence[str] = ()) -> tuple[list[str], list[str]]:
    """Part the arguments of a verb into its own and the overrides, these as `a.b=value`. `--` ends the search.
    `own` are options, with a value each, that mean something else to this verb (`seed`)."""
    rest: list[str] = []
    found: list[str] = []
    waiting = iter(argv)
    for argument in waiting:
        if argument == "--":
            return [*rest, argument, *waiting], found
        option = _OPTION.fullmatch(argument)
        if argument.startswith("--") and argument[2:] in own:
            rest += [argument, *itertools.islice(waiting, 1)]
        elif option and option[1] in own:
            rest.append(argument)
        elif option and option[2]:
            found.append(option[1] + option[2])
        elif option:
            value = next(waiting, None)
            if value is None or value.startswith("--"):
                said = _shown(argument)
                raise UsageError(f"`{said}` on the command line needs a value, as in `{said} VALUE`.")
            found.append(f"{option[1]}={value}")
        elif _ASSIGNMENT.match(argument):
            found.append(argument)
        else:
            rest.append(argument)
    return rest, found


def apply(overrides: Sequence[str], below: Layer, folder: str) -> Layer:
    """`below` with the overrides laid on it, in their order; relative paths are from `folder`."""
    problems: list[str] = []
    for text in overrides:
        try:
            below = _apply_one(text, below, folder)
        except SpecError as e:
            problems.append(str(e))
    if problems:
        raise SpecError("\n".join(problems))
    return below


def _shown(argument: str) -> str:
    said = mask(argument)  # errors end up in logs, secrets must not
    return said if len(said) <= MOST_SHOWN else f"{said[:MOST_SHOWN]}…"


def _apply_one(text: str, below: Layer, folder: str) -> Layer:
    where = f"`{_shown(text)}` on the command line"
    left, equals, right = text.partition("=")
    if not equals or not left:
        raise SpecError(f"{where}: an override is NAME=VALUE, such as train.steps=100.")
    path = tuple(int(part) if part.isdecimal() else part for part in left.split("."))
    name = _name(path, where)
    value = normal(_value(right, where), path, {path: right}, folder)
    if name.section and not name.is_list and not isinstance(value, dict) and not (value is None and name.optional):
        raise SpecError(
            f"{where}: {left} is {allowed(name.field)}; set one of them, as in {left}.{_first(name)}=VALUE."
        )
    origin = Origin(COMMAND_LINE, where)
    at = next((i for i, part in enumerate(path) if isinstance(part, int)), None)
    if at is not None:
        # To a layer a list is one value, so one changed item is the whole list anew, the others with their origins.
        items = _with_item(below, path, at, value, where)
        head = path[:at]
        above = layer(_nested(head, items), lambda p: below.origins.get(p, origin))
        changed = {p: origin for p, _ in leaves(value, path)}
        return Layer(above.values, {**above.origins, **changed}).over(below)
    above = layer(_nested(path, value), lambda _: origin)
    return above.over(_one_length(above, below))


def _one_length(above: Layer, below: Layer) -> Layer:
    """`train.steps=10` over a file with `epochs:` replaces these. Two of them on the command line contradict."""
    said = {path: value for path, value in leaves(above.values) if path in WAYS}
    if any(value not in (None, "auto") for value in said.values()):
        for path in WAYS:
            origin = below.origins.get(path)
            if path not in said and origin is not None and origin.label != COMMAND_LINE:
                below = below.without(path)
    return below


def _name(path: Path, where: str) -> Name:
    for length in range(1, len(path) + 1):
        name = lookup(path[:length])
        if name is None:
            inside = lookup(path[: length - 1])
            if inside is not None and inside.section is None:
                raise SpecError(f"{where}: {inside.dotted} is one value, so nothing can be set inside it.")
            if inside is not None and inside.is_list:
                raise SpecError(f"{where}: {inside.dotted} is a list; name an item, as in {inside.dotted}.0.weight.")
            wrong = path[:length]
            raise SpecError(
                f"{where}: {dotted(wrong)[:MOST_SHOWN]} is not a name of the run file; {ended(hint(wrong))}"
            )
    return name  # type: ignore[return-value]  # a path is never empty, so the loop ran


def _value(text: str, where: str) -> Any:
    """A bare scalar as it stands (a `#` or `: ` in it means nothing); lists, sections and quoted text as YAML."""
    text = text.strip()
    if text[:1] not in ("[", "{", '"', "'"):
        return scalar(text)
    try:
        return parse(text, "value").values

    except SpecError:
        problem = "the value is no list, section or quoted text; check its brackets and quotes"
        raise SpecError(f"{where}: {problem}.") from None


def _with_item(below: Layer, path: Path, at: int, value: Any, where: str) -> list[Any]:
    items: Any = below.values
    for part in path[:at]:
        items = items.get(part) if isinstance(items, dict) else None
    index = path[at]
    count = len(items) if isinstance(items, list) else 0
    if not isinstance(index, int) or index >= count or not isinstance(items[index], dict):
        raise SpecError(f"{where}: {dotted(path[:at])} has {count} item{'s' * (count != 1)}, and items count from 0.")
    items = copy.deepcopy(items)
    if at == len(path) - 1:
        items[index] = value
    else:
        items[index][path[at + 1]] = value
    return list(items)


def _nested(path: Path, value: Any) -> dict[str, Any]:
    for part in reversed(path):
        value = {part: value}
    return dict(value)


def _first(name: Name) -> str:
    return next(iter(name.section.model_fields)) if name.section else ""
