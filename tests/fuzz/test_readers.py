"""Every place that parses what others wrote has a generator, and every generator makes what a reader takes."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tests.fuzz import every, sites
from tests.fuzz.reader import READERS

every.load()


def test_every_reader_has_a_generator() -> None:
    hint = (
        "write a generator (docs/guide/fuzzing.md), then `python -m tests.fuzz reach`; or say in own_places.py why not"
    )
    assert not sites.missing(), hint
    assert not sites.stale(), "these places are gone: `python -m tests.fuzz reach`, or out of own_places.py"


def test_the_table_names_generators_that_exist() -> None:
    assert set(sites.read_by().values()) <= READERS.keys()


def test_modules_that_generators_name_exist() -> None:
    gone = [
        m for r in READERS.values() for m in r.modules if not (sites.SOURCE / (m.replace(".", "/") + ".py")).is_file()
    ]
    assert not gone


def test_a_new_call_of_a_parser_is_found() -> None:
    source = "class A:\n  def f(self):\n    def g(): return np.frombuffer(b'')\n"
    source += "    return map(json.loads, [tarfile.open('x')])\n"
    found = {(place, sites._parser(called)) for place, called in sites._calls(ast.parse(source), "")}
    assert {("A.f.g", "np.frombuffer"), ("A.f", "json.loads"), ("A.f", "tarfile.open")} <= found


def test_the_page_of_defects_names_tests_that_there_are() -> None:
    """docs/strangers.md: `FILE::NAME`, `::NAME` of the file before it, kept cases; … ends what is shortened."""
    tests, file, found = Path(__file__).parents[1], "", 0
    for said in re.findall(r"`([^`]+)`", (tests.parent / "docs" / "strangers.md").read_text(encoding="utf-8")):
        if said.startswith("fuzz/cases/"):
            assert list(tests.glob(said + "*")), said
        elif named := re.match(r"([\w/]+\.py)?(?:::(\w+)(…?)|$)", said):
            file, name = named[1] or file, named[2] or ""
            assert f"def {name}{'' if named[3] else '('}" in (tests / file).read_text(encoding="utf-8") or not name, (
                said
            )
            found += 1
    assert found > 50
