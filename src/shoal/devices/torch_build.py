"""What the installed torch was built for, without importing it: importing takes seconds, and starts nothing anybody
needs to know that. Read from its `version.py`, as its wheels write it."""

from __future__ import annotations

import importlib.util
import re
from functools import cache
from pathlib import Path
from typing import Literal

Build = Literal["cuda", "rocm", "xpu", "cpu"]
_LINE = re.compile(r"^(cuda|hip|xpu|__version__)\b[^=\n]*= *(?:'([^']*)'|\"([^\"]*)\"|None) *$", re.MULTILINE)


@cache
def build() -> Build | None:
    """None where torch is not installed or does not say."""
    said = read(_text())
    if said is None:
        return None
    names: dict[str, Build] = {"hip": "rocm", "cuda": "cuda", "xpu": "xpu"}
    return next((names[key] for key in names if said.get(key)), "cpu")


@cache
def version() -> str:
    return (read(_text()) or {}).get("__version__", "")


def read(text: str | None) -> dict[str, str] | None:
    """The values that are set; None where the text is not such a file."""
    found = _LINE.findall(text or "")
    return {name: single or double for name, single, double in found if single or double} if found else None


def _text() -> str | None:
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        return (Path(spec.origin).parent / "version.py").read_text(errors="replace")
    except OSError:
        return None
