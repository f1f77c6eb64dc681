"""docs/reference/journal.md names every record that the code writes, and no other."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

import shoal

SOURCE = Path(shoal.__file__).parent
PAGE = Path(__file__).parents[2] / "docs" / "reference" / "journal.md"
WRITERS = (
    *(
        "batch",
        "data",
        "evaluate",
        "guard",
        "islands",
        "journal",
        "net",
        "parallel",
        "script",
        "stages",
        "swarm",
        "track",
        "train",
    ),
)
WRITE = {"append", "note", "_note", "tell", "_tell"}  # the first argument is the kind, keywords are fields


def written() -> dict[str, set[str]]:
    """Kind → the fields that are named where it is written (others come in a dictionary)."""
    found = defaultdict(set)
    for path in (path for part in WRITERS for path in (SOURCE / part).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Call(
                    func=ast.Attribute(attr=name) | ast.Name(id=name),
                    args=[ast.Constant() | ast.IfExp() as first],
                    keywords=[_, *_],
                ) if name in WRITE:
                    kinds = [first.body, first.orelse] if isinstance(first, ast.IfExp) else [first]
                    for kind in kinds:
                        if isinstance(kind, ast.Constant) and isinstance(kind.value, str):
                            found[kind.value] |= {keyword.arg for keyword in node.keywords if keyword.arg}
    return found


def documented() -> dict[str, str]:
    return dict(re.findall(r"^\| `([\w-]+)` \| [^|]+ \| (.*) \|$", PAGE.read_text(), re.M))


def test_every_kind_of_record_is_on_the_page_and_no_other() -> None:
    assert sorted(written()) == sorted(documented())


def test_every_field_is_in_the_row_of_its_kind() -> None:
    rows, page = documented(), PAGE.read_text()
    rows = {kind: re.sub(r"the fields of `([\w-]+)`", lambda same: rows[same[1]], row) for kind, row in rows.items()}
    missing = [
        f"{kind}.{field}"
        for kind, fields in written().items()
        for field in fields
        if f"`{field}`" not in (page if "see below" in rows[kind] else rows[kind])
    ]
    assert not missing
