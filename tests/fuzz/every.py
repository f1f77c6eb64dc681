"""All generators: importing them registers them."""

from __future__ import annotations

import importlib
from pathlib import Path


def load() -> None:
    for file in sorted(Path(__file__).parent.glob("of_*.py")):
        importlib.import_module(f"tests.fuzz.{file.stem}")
