"""Every place that parses what others wrote has a generator, and every generator makes what a reader takes."""

from __future__ import annotations

import ast

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
