"""YAML as a run file means it: plain values, with the place of each, and no surprises.

PyYAML reads YAML 1.1, where `off` is false, `1e-4` is text, `010` is eight, a second `steps:` silently wins and `*name`
can build a value larger than memory. A run file is read by the rules of YAML 1.2, where none of that is so; duplicate
keys, tags and aliases are refused. `dump_yaml` writes what these rules read back.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path as File
from typing import TYPE_CHECKING, Any

import yaml

from shoal.errors import SpecError
from shoal.near import closest

if TYPE_CHECKING:
    from shoal.spec.names import Path

LARGEST_BYTES = 1 << 20  # a run file is a page or two; a data set given by mistake is not read into memory

_WORDS: dict[str, bool | None] = {"": None, "~": None, "null": None, "Null": None, "NULL": None}
_WORDS |= {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
# Underscores must group thousands, so that 10_000 is a number and 2026_11_03 is a name.
_INT = re.compile(r"[-+]?(?:[0-9]{1,999}|[0-9]{1,3}(?:_[0-9]{3})+)")
_BASED = re.compile(r"0x[0-9a-fA-F]+|0o[0-7]+")
_FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|(?:[0-9]+|[0-9]{1,3}(?:_[0-9]{3})+)(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")
_NOT_FINITE = re.compile(r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)")


@dataclass(frozen=True)
class Place:
    line: int
    column: int

    def __str__(self) -> str:
        return f"{self.line}:{self.column}"


@dataclass(frozen=True)
class Document:
    """What a text says: its values, where each stands, and how each bare scalar was spelt."""

    values: Any
    places: dict[Path, Place] = field(default_factory=dict)
    spelt: dict[Path, str] = field(default_factory=dict)


def _instead(file: File) -> str:
    beside = [p.name for p in file.parent.glob("*.y*ml")] if file.parent.is_dir() else []
    if near := closest(file.name, beside):
        return f"did you mean {file.with_name(near)}?"
    return f"`shoal init pretrain {file}` writes one to start from."


def read_text(file: File) -> str:
    """The text of a run file, or one sentence about why there is none."""
    if file.is_dir():
        raise SpecError(f"{file} is a folder; give the run file in it, such as {file / 'run.yaml'}.")
    if not file.exists():
        raise SpecError(f"there is no run file {file}; {_instead(file)}")
    if not file.is_file():
        raise SpecError(f"{file} is not a regular file; a run file is a YAML text.")
    if file.stat().st_size > LARGEST_BYTES:
        raise SpecError(f"{file} is {file.stat().st_size:,} bytes, too large for a run file; give the YAML of the run.")
    raw = file.read_bytes()
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as e:
        line = raw.count(b"\n", 0, e.start) + 1
        raise SpecError(f"{file}:{line}: byte 0x{raw[e.start]:02x} is not UTF-8; save the file as UTF-8.") from None


def parse(text: str, where: str) -> Document:
    """Read one YAML document; `where` names it in errors (`run.yaml`, or an override)."""
    try:
        root = yaml.compose(text, Loader=yaml.BaseLoader)
    except yaml.MarkedYAMLError as e:
        raise SpecError(_syntax(e, text, where)) from None
    except yaml.reader.ReaderError as e:
        line = text.count("\n", 0, e.position) + 1
        raise SpecError(
            f"{where}:{line}: the character U+{ord(text[e.position]):04X} is not allowed in YAML; remove it."
        ) from None
    except RecursionError:
        raise SpecError(f"{where} is nested too deeply to be a run file.") from None
    document = Document(None)
    if root is None:
        return document
    return Document(_value(root, (), document, where, set()), document.places, document.spelt)


def scalar(text: str) -> Any:
    """The value of a bare scalar."""
    if text in _WORDS:
        return _WORDS[text]
    if _INT.fullmatch(text):
        return int(text.replace("_", ""))
    if _BASED.fullmatch(text):
        return int(text, 0)
    if _FLOAT.fullmatch(text):
        return float(text.replace("_", ""))
    if _NOT_FINITE.fullmatch(text):
        return float(text.replace(".", "").lower())
    return text


def _value(node: yaml.Node, path: Path, into: Document, where: str, seen: set[int]) -> Any:
    at = _place(node)
    if id(node) in seen:
        raise SpecError(f"{where}:{at}: aliases (*name) are not read in a run file; write the value out.")
    seen.add(id(node))
    into.places.setdefault(path, at)
    if node.tag not in ("tag:yaml.org,2002:str", "tag:yaml.org,2002:seq", "tag:yaml.org,2002:map"):
        raise SpecError(f"{where}:{at}: tags ({node.tag}) are not read in a run file; remove it.")
    if isinstance(node, yaml.ScalarNode):
        if node.style is not None:
            return node.value
        into.spelt[path] = node.value
        return scalar(node.value)
    if isinstance(node, yaml.SequenceNode):
        return [_value(item, (*path, i), into, where, seen) for i, item in enumerate(node.value)]
    return {key: _value(item, (*path, key), into, where, seen) for key, item in _entries(node, path, into, where)}


def _entries(node: yaml.Node, path: Path, into: Document, where: str) -> Iterator[tuple[str, yaml.Node]]:
    """The keys and values of a mapping; the place of a value that has a key is that of the key."""
    first: dict[str, Place] = {}
    for key_node, item in node.value:
        at = _place(key_node)
        if not isinstance(key_node, yaml.ScalarNode):
            raise SpecError(f"{where}:{at}: a key is a plain name, not a list or a section.")
        key = key_node.value
        if key in first:
            raise SpecError(f"{where}:{at}: {key} stands here and already on line {first[key].line}; keep one of them.")
        first[key] = into.places[(*path, key)] = at
        yield key, item


def _place(node: yaml.Node) -> Place:
    return Place(node.start_mark.line + 1, node.start_mark.column + 1)


def _syntax(e: yaml.MarkedYAMLError, text: str, where: str) -> str:
    mark = e.problem_mark or e.context_mark
    at = f"{where}:{mark.line + 1}:{mark.column + 1}" if mark else where
    line = text.splitlines()[mark.line] if mark and mark.line < len(text.splitlines()) else ""
    if "\t" in line[: len(line) - len(line.lstrip())]:
        return f"{at}: a tab indents this line, and YAML allows only spaces; replace it."
    if "single document" in (e.context or ""):
        return f"{at}: a second document starts here (`---`); a run file is one document."
    problem = (e.problem or str(e)).replace("<", "").replace(">", "")
    return f"{at}: this is not YAML ({problem}); check the indentation, colons and quotes near it."


class _Dumper(yaml.SafeDumper):
    """Quotes the text that the rules above would read as a number."""


_Dumper.add_implicit_resolver("!number", re.compile(f"(?:{_FLOAT.pattern}|{_BASED.pattern})$"), list("+-.0123456789"))


def dump_yaml(values: Any) -> str:
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=10_000)
