"""Writes the items of the cloze task out of the book that the repository ships: `python scripts/make_cloze.py`.

The test of the task makes them again and compares, so the file in the package is never changed by hand.
"""

from __future__ import annotations

import json
from pathlib import Path

from shoal.evaluate.generated.cloze import passages

ROOT = Path(__file__).resolve().parent.parent
BOOK = ROOT / "examples" / "text" / "moby-dick.txt"
OUT = ROOT / "src" / "shoal" / "evaluate" / "generated" / "cloze.jsonl"
EACH = 6


def made() -> str:
    """As the file has it."""
    found = passages(BOOK.read_text(encoding="utf-8"), EACH)
    return "".join(json.dumps(item, ensure_ascii=False) + "\n" for item in found)


if __name__ == "__main__":
    OUT.write_text(made(), encoding="utf-8")
    print(f"{OUT.relative_to(ROOT)}: {len(made().splitlines())} items")
