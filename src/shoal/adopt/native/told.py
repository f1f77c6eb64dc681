"""What a script is told from outside: options of argparse and of dataclasses, and the words it is started with."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import Any

from shoal.adopt.code import argument

_PARSED = ("parse_args", "parse_known_args", *(_OF_CLASSES := ("parse_args_into_dataclasses", "parse_args_and_config")))
_TYPES: dict[str, Any] = {"int": int, "float": float, "str": str, "": str, "Path": str}
_WORDS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


def is_parsed(node: ast.AST) -> bool:
    """Whether a call gives what the command line says."""
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _PARSED


def parser_of_classes(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Attribute) and call.func.attr in _OF_CLASSES


def adds(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Attribute) and call.func.attr == "add_argument" and bool(spellings(call))


def spellings(call: ast.Call) -> list[str]:
    """`-b`, `--batch-size`: the longest first."""
    found = [a.value for a in call.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
    return sorted(found, key=len, reverse=True)


def destination(call: ast.Call) -> str:
    said = argument(call, "dest")
    if isinstance(said, ast.Constant):
        return str(said.value)
    long = [s for s in spellings(call)[::-1] if s.startswith("--")] or spellings(call)
    return long[0].lstrip("-").replace("-", "_")


def said(words: Sequence[str], names: Sequence[str]) -> str | None:
    """The last word that follows one of the names, as `--name word` or `--name=word`."""
    found = None
    for at, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name not in names or not name.startswith("-"):
            continue
        if equals:
            found = value
        else:
            after = words[at + 1] if at + 1 < len(words) else "true"
            found = "true" if after.startswith("--") else after
    return found


def typed(word: str, kind: str) -> Any:
    """None where it is not of that kind."""
    if word == "true" and kind == "":
        return True
    try:
        return _TYPES[kind](word) if kind in _TYPES else None
    except ValueError:
        return None


def as_like(word: str, like: object) -> Any:
    """A word for an option whose default is `like`."""
    if isinstance(like, bool) or (like is None and word.lower() in ("true", "false")):
        return _WORDS.get(word.lower(), word)
    for kind in (int, float):
        try:
            return kind(word) if not isinstance(like, str) else word
        except ValueError:
            continue
    return word


def fields(node: ast.ClassDef) -> list[str]:
    """Of a dataclass, in order."""
    return [s.target.id for s in node.body if isinstance(s, ast.AnnAssign) and isinstance(s.target, ast.Name)]


def of_class(node: ast.ClassDef, name: str) -> ast.expr | None:
    """What its body binds to a name; of `field(default=…)` the default."""
    for statement in node.body:
        targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
        if any(isinstance(t, ast.Name) and t.id == name for t in targets):
            value = getattr(statement, "value", None)
            if isinstance(value, ast.Call) and ast.unparse(value.func).endswith("field"):
                return argument(value, "default")
            return value if isinstance(value, ast.expr) else None
    return None


def default_of(node: ast.AST, name: str) -> ast.expr | None:
    """Of a parameter."""
    spec = getattr(node, "args", None)
    if not isinstance(spec, ast.arguments):
        return None
    positional = [a.arg for a in (*spec.posonlyargs, *spec.args)]
    found = dict(zip(reversed(positional), reversed(spec.defaults), strict=False))
    found |= {a.arg: d for a, d in zip(spec.kwonlyargs, spec.kw_defaults, strict=True) if d is not None}
    return found.get(name)
