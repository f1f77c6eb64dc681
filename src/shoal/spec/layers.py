"""Values with their origins, in layers: a preset or weights below, the run file above, the command line on top."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from shoal.spec.base import absolute, task_files
from shoal.spec.names import Path, lookup


@dataclass(frozen=True)
class Origin:
    """Where a value came from: `label` for `shoal show`, `where` for an error about it."""

    label: str
    where: str


COMMAND_LINE = "command line"
DEFAULT = Origin("default", "the default")


@dataclass(frozen=True)
class Layer:
    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[Path, Origin] = field(default_factory=dict)

    def over(self, below: Layer) -> Layer:
        """This layer on top of another: sections merge, everything else replaces."""
        replaced = {_head(path) for path in self.origins}
        origins = {p: o for p, o in below.origins.items() if not any(_related(p, path) for path in replaced)}
        return Layer(_merge(below.values, self.values), {**origins, **self.origins})

    def without(self, path: Path) -> Layer:
        """This layer with the value at `path` not stated."""
        values = copy.deepcopy(self.values)
        section: Any = values
        for part in path[:-1]:
            section = section.get(part) if isinstance(section, dict) else None
        if isinstance(section, dict):
            section.pop(path[-1], None)
        return Layer(values, {p: o for p, o in self.origins.items() if p != path})

    def origin(self, path: Path) -> Origin | None:
        """The origin of the value at `path`, or of the first value in it."""
        if path in self.origins:
            return self.origins[path]
        return next((o for p, o in self.origins.items() if p[: len(path)] == path), None)


def normal(value: Any, path: Path, spelt: dict[Path, str], folder: str) -> Any:
    """A value in the one form that layers merge: short forms written out, paths absolute, bare text as it was spelt."""
    name = lookup(path) if path else None
    if name is not None and name.is_list:
        # `train: folder` and `train: [a, b]` are short for lists of {path, weight}.
        items = [] if value is None else value if isinstance(value, list) else [value]
        if path in spelt:
            spelt = {(*path, 0): spelt[path]}
        return [normal(item, (*path, i), spelt, folder) for i, item in enumerate(items)]
    if isinstance(value, dict):
        return {key: normal(item, (*path, key), spelt, folder) for key, item in value.items()}
    if name is None:
        return value  # unknown, and about to be refused with its place
    if value is None:
        # `train:` with every line below it commented out is an empty section.
        return {} if name.section and not name.optional else None
    if isinstance(path[-1], int) and not isinstance(value, list):
        return normal({"path": value}, path, {(*path, "path"): spelt.get(path, str(value))}, folder)
    if name.is_texts and isinstance(value, list):
        numbers = [isinstance(item, int | float) and not isinstance(item, bool) for item in value]
        texts = [spelt.get((*path, i), str(v)) if numbers[i] else v for i, v in enumerate(value)]
        return list(task_files(tuple(texts), folder)) if name.is_path and all_texts(texts) else texts
    if name.is_text and isinstance(value, bool | int | float):
        value = spelt.get(path, str(value))
    return absolute(value, folder) if name.is_path and isinstance(value, str) else value


def all_texts(items: list[Any]) -> bool:
    return all(isinstance(item, str) for item in items)


def leaves(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Every value that is not a section or a list of sections, with its path."""
    if isinstance(value, dict) and (value or path == ()):
        for key, item in value.items():
            yield from leaves(item, (*path, key))
    elif isinstance(value, list | tuple) and any(isinstance(item, dict) for item in value):
        for i, item in enumerate(value):
            yield from leaves(item, (*path, i))
    elif value != {}:
        yield path, value


def layer(values: dict[str, Any], origin_of: Callable[[Path], Origin]) -> Layer:
    return Layer(values, {path: origin_of(path) for path, _ in leaves(values)})


def _head(path: Path) -> Path:
    """The path up to its list: a list is replaced whole."""
    return next((path[:i] for i, part in enumerate(path) if isinstance(part, int)), path)


def _related(a: Path, b: Path) -> bool:
    shorter = min(len(a), len(b))
    return a[:shorter] == b[:shorter]


def _merge(below: Any, above: Any) -> Any:
    if isinstance(below, dict) and isinstance(above, dict):
        return {**below, **{key: _merge(below.get(key), item) for key, item in above.items()}}
    return above
