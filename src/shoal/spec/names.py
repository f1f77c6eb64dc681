"""Every name a run file may hold, read off the typed sections, and the nearest right one for a wrong one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, get_args, get_origin

from pydantic.fields import FieldInfo

from shoal.near import closest
from shoal.spec.base import Folder, Strict
from shoal.spec.elsewhere import CALLED, answered
from shoal.spec.run import Run

Path = tuple[str | int, ...]


@dataclass(frozen=True)
class Name:
    """One name: a value, a section, or a list of sections."""

    path: Path  # an item of a list is "*"
    field: FieldInfo
    section: type[Strict] | None  # the section it opens, or the kind of its items
    is_list: bool
    optional: bool

    @property
    def dotted(self) -> str:
        return dotted(self.path)

    @property
    def is_text(self) -> bool:
        """True when only text is right, so that a bare `2026` can be meant as text alone."""
        return set(_kinds(self.field.annotation)) - {type(None)} == {str}

    @property
    def is_texts(self) -> bool:
        """A list in which only text is right: a bare `007` in it is text as well."""
        kinds = [kind for kind in _kinds(self.field.annotation) if get_origin(kind) is tuple]
        return any(set(_kinds(part)) == {str} for kind in kinds for part in get_args(kind)[:1])

    @property
    def is_path(self) -> bool:
        return any(isinstance(mark, Folder) for mark in marks(self.field))


def dotted(path: Path) -> str:
    return ".".join(str(part) for part in path)


def lookup(path: Path) -> Name | None:
    return _all().get(tuple("*" if isinstance(part, int) else part for part in path))


def names() -> list[Name]:
    """All of them, in the order of the sections."""
    return list(_all().values())


def within(path: Path) -> list[str]:
    """The names that may stand in the section (or list item) at `path`; `()` is the file itself."""
    section = Run if path == () else getattr(lookup(path), "section", None)
    return list(section.model_fields) if section else []


def known_part(path: Path) -> Path:
    """The longest leading part of `path` that is a name; pydantic appends the kinds it tried."""
    for length in range(len(path), 0, -1):
        if lookup(path[:length]):
            return path[:length]
    return ()


def hint(path: Path) -> str:
    """What to do about the unknown name at `path`: where it belongs, what Shoal calls it, that Shoal lacks it, or which
    name it is a slip of. A far-fetched guess is worse than none."""
    *parent, key = path
    wrong = str(key)
    if lookup(tuple(wrong.split("."))) and "." in wrong:
        section, _, last = wrong.rpartition(".")
        return f"write `{last}:` inside the section `{section}:`"
    spelt = wrong.lower().replace("-", "_")
    if spelt in within(tuple(parent)):
        return f"did you mean {dotted((*parent, spelt))}?"
    if spelt in CALLED:
        return f"Shoal calls it {CALLED[spelt]}"
    if said := answered(spelt):
        return said
    near = closest(wrong, within(tuple(parent)))
    elsewhere = [n.dotted for n in names() if n.path[-1] == spelt and "*" not in n.path]
    usual = [
        name for name in elsewhere if not name.startswith(("own.", "script.", "batch."))
    ]  # the others are rarely meant
    if near and not usual and not parent:
        return f"did you mean {near}?"
    elsewhere = usual or elsewhere
    if len(elsewhere) == 1:
        section = elsewhere[0].rpartition(".")[0]
        return f"{wrong} belongs under {section}" if section else f"{wrong} belongs at the top of the file"
    if near:
        return f"did you mean {dotted((*parent, near))}?"
    if elsewhere:
        return "did you mean " + " or ".join(elsewhere[:4]) + "?"
    if far := closest(wrong, [str(n.path[-1]) for n in names()]):
        return f"did you mean {next(n.dotted for n in names() if n.path[-1] == far)}?"
    if foreign := closest(wrong, CALLED):
        return f"Shoal calls it {CALLED[foreign]}"
    return f"the names there are {', '.join(within(tuple(parent)))}"


def meant(word: str) -> str | None:
    """The one name of a value that a bare word can only stand for: `steps`, `learning-rate`, `train.steps`."""
    spelt = word.lower().replace("-", "_")
    whole = lookup(tuple(spelt.split(".")))
    if whole is not None:
        return spelt
    called = CALLED.get(spelt)
    if called is not None:
        return called if lookup(tuple(called.split("."))) else None
    found = [n.dotted for n in names() if n.path[-1] == spelt and n.section is None and "*" not in n.path]
    return found[0] if len(found) == 1 else None


def marks(field: FieldInfo) -> Iterator[Any]:
    """The marks on a field, also those on a part of its type (`LocalPath | None`)."""
    yield from field.metadata
    yield from _marks_within(field.annotation)


def _marks_within(annotation: Any) -> Iterator[Any]:
    if get_origin(annotation) is Annotated:
        yield from annotation.__metadata__
    for part in get_args(annotation):
        yield from _marks_within(part)


def _kinds(annotation: Any) -> Iterator[Any]:
    """The plain types that an annotation lets through: `Annotated[str, …] | None` gives str and NoneType."""
    if get_origin(annotation) is Annotated:
        yield from _kinds(get_args(annotation)[0])
    elif get_origin(annotation) is None or get_origin(annotation) is tuple:
        yield annotation
    else:
        for part in get_args(annotation):
            yield from _kinds(part)


@cache
def _all() -> dict[Path, Name]:
    return {name.path: name for name in _walk(Run, ())}


def _walk(section: type[Strict], path: Path) -> Iterator[Name]:
    for key, field in section.model_fields.items():
        kinds = list(_kinds(field.annotation))
        lists = [k for k in kinds if get_origin(k) is tuple]
        items = [k for k in get_args(lists[0]) if isinstance(k, type) and issubclass(k, Strict)] if lists else []
        inner = items or [k for k in kinds if isinstance(k, type) and issubclass(k, Strict)]
        name = Name(
            path=(*path, key),
            field=field,
            section=inner[0] if inner else None,
            is_list=bool(items),
            optional=type(None) in kinds,
        )
        yield name
        if items:
            # The item itself is a name too: errors about one item are about that place.
            yield Name(path=(*name.path, "*"), field=field, section=inner[0], is_list=False, optional=False)
        if inner:
            yield from _walk(inner[0], (*name.path, "*") if items else name.path)
