"""Every class of failure has a page that says what you see, what Shoal did and what you do, and the table has them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from shoal.guard.symptoms import CAUSES

RUNBOOKS = Path(__file__).resolve().parents[2] / "docs" / "runbooks"
PAGES = sorted(path.stem for path in RUNBOOKS.glob("*.md") if path.stem != "README")


@pytest.mark.parametrize("cause", sorted(CAUSES))
def test_every_class_has_a_page(cause: str) -> None:
    assert cause in PAGES


@pytest.mark.parametrize("page", PAGES)
def test_a_page_says_what_you_see_what_shoal_did_and_what_you_do(page: str) -> None:
    text = (RUNBOOKS / f"{page}.md").read_text()
    assert text.startswith(f"# {page}: ")
    for heading in ("What you see", "What Shoal did", "What to do"):
        assert text.count(f"**{heading}.**") == 1, heading


def test_the_table_lists_exactly_the_pages_there_are() -> None:
    listed = re.findall(r"^\| \[([a-z-]+)\]\(([a-z-]+)\.md\) \|", (RUNBOOKS / "README.md").read_text(), re.MULTILINE)
    assert all(name == file for name, file in listed)
    assert sorted(name for name, _ in listed) == PAGES
