"""Writes docs/reference/api.md from the package itself: `python -m shoal.api_page docs/reference`."""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path
from typing import Any

from pydantic import BaseModel

import shoal

FILE = "api.md"
HEAD = (
    "# Python API",
    "`import shoal` gives what this page lists, and loads each name when it is first used. "
    "[Own code](../guide/own-code.md) shows how they go together.",
    "These names are stable: one that has to go is kept for at least two minor versions, with a warning that names "
    "what to use instead, and a line in CHANGELOG.md ([what stays readable](../guide/compatibility.md)). Everything "
    "else in the package is Shoal's own and may change without a word.",
    "*Written by `python -m shoal.api_page docs/reference`; a test holds it up to date.*\n",
)
# Beside what a class itself says: methods of `nn.Module` and the like are not ours to promise.
_OURS = {"Decoder": ("forward", "init_weights"), "Block": ("forward", "starts"), "Optimizers": ("step", "tensors")}


def page() -> str:
    parts = ["\n\n".join(HEAD)]
    for name in shoal.NAMES:
        thing = getattr(shoal, name)
        parts.append(_of_class(name, thing) if inspect.isclass(thing) else _of_function(f"shoal.{name}", thing, "## "))
    return "\n".join(parts).rstrip() + "\n"


def _of_function(name: str, thing: Any, mark: str) -> str:
    return f"{mark}`{name}{_signature(thing)}`\n\n{_text(thing)}\n"


def _of_class(name: str, thing: type[Any]) -> str:
    parts = [f"## `shoal.{name}`\n\n{_text(thing)}\n"]
    fields = [] if issubclass(thing, BaseModel) else list(inspect.get_annotations(thing))
    parts += [f"- fields: {', '.join(f'`{field}`' for field in fields)}"] if fields and name not in _OURS else []
    for key, member in vars(thing).items():
        wanted = _OURS.get(name)
        if key.startswith("_") or (wanted is not None and key not in wanted):
            continue
        if isinstance(member, property):
            parts.append(f"- `{key}`{_line(member.fget)}")
        elif inspect.isfunction(member) and (member.__doc__ or wanted):
            parts.append(f"- `{key}{_signature(member)}`{_line(member)}")
    return "\n".join(parts) + "\n"


def _signature(thing: Any) -> str:
    text = str(inspect.signature(inspect.unwrap(thing)))
    text = re.sub(r"\(self(, )?", "(", text).replace("collections.abc.", "")
    return text.replace("'", "")


def _text(thing: Any) -> str:
    """The docstring, its examples as code."""
    lines, code, out = inspect.getdoc(thing) or "", False, list[str]()
    for line in lines.splitlines():
        indented = line.startswith("    ")
        if indented and not code:
            out.append("```python")
        elif code and not indented and line:
            while out[-1] == "":
                out.pop()
            out += ["```", ""]
        code = indented or (code and not line)
        out.append(line.removeprefix("    ") if code else line)
    return "\n".join([*out, *(["```"] if code else [])])


def _line(thing: Any) -> str:
    text = " ".join((inspect.getdoc(thing) or "").split())
    return f": {text}" if text else ""


if __name__ == "__main__":
    (Path(sys.argv[1]) / FILE).write_text(page())
    print(Path(sys.argv[1]) / FILE)
