"""docs/reference/environment.md names every variable that Shoal reads, and no other."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VARIABLE = re.compile(r"\bSHOAL_[A-Z_]+\b")


def test_every_variable_is_described_and_no_other() -> None:
    read = {name for file in (ROOT / "src").rglob("*.py") for name in VARIABLE.findall(file.read_text())}
    told = set(VARIABLE.findall((ROOT / "docs/reference/environment.md").read_text()))
    assert read - told == set(), "these are read, and nobody says what they do"
    assert told - read == set(), "these are described, and nobody reads them"
