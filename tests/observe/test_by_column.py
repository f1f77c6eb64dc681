"""Reckoned by column, with an index and without: the numbers are those that one reads record by record."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.observe.history import history
from shoal.observe.ledger import ledger
from shoal.track.journal import Record, records
from shoal.track.told import Told, told
from tests.observe import by_record
from tests.observe.test_ledger import any_record

FIELDS = ("step", "attempt", "t", "begin")


def whole(record: dict[str, Any]) -> Record:
    """As it would stand in a journal: what every kind must say."""
    more: dict[str, Any] = {
        "decision": {"key": "a"},
        "island": {"island": 1},
        "rewind": {"to": int(record["t"]) % 20, "begin": max(0.0, record["t"] - 5)},
        "skip": {"step": 3, "begin": max(0.0, record["t"] - 5)},
        "epoch": {"members": [0, 1]},
        "warning": {"text": "w"},
    }.get(record["kind"], {})
    return {**record, **more, **({"begin": max(0.0, record["begin"])} if "begin" in record else {})}


def same(found: Told | list[Record], plain: list[Record], now: float | None = None) -> None:
    fast, slow = ledger(found, now), by_record.ledger(plain, now)
    assert (fast.parts_us, fast.total_us, fast.between_us, fast.sessions) == (
        slow.parts_us,
        slow.total_us,
        slow.between_us,
        slow.sessions,
    )
    assert [cost.as_json() for cost in fast.costs] == [cost.as_json() for cost in slow.costs]
    known, before = history(found), by_record.history(plain)
    assert known.steps.column("t").tolist() == [float(r["t"]) for r in before.steps]
    assert known.steps.column("step").tolist() == [r["step"] for r in before.steps]
    assert sorted(known.lost.column("t").tolist()) == sorted(float(r["t"]) for r in before.lost)
    for name in ("epochs", "evals", "checkpoints", "last_saves", "checkpoints_failed", "starts", "failures"):
        assert _known(getattr(known, name)) == _known(getattr(before, name)), name
    for name in ("warnings", "stragglers", "breaks", "sessions", "digest"):
        assert getattr(known, name) == getattr(before, name), name


def _known(value: Any) -> Any:
    return json.loads(json.dumps(value))


@settings(deadline=None, max_examples=300)
@given(st.lists(any_record(), max_size=60), st.one_of(st.none(), st.floats(0, 2e4)))
def test_any_records_in_any_order_give_the_same_ledger_and_history(told: list[Record], now: float | None) -> None:
    told = [whole(record) for record in told]
    same(told, told, now)


@settings(deadline=None, max_examples=60)
@given(st.lists(any_record(), max_size=60), st.integers(100, 2000))
def test_an_index_of_any_journal_gives_the_same_numbers(
    tmp_path_factory: pytest.TempPathFactory, written: list[Record], block_bytes: int
) -> None:
    path = tmp_path_factory.mktemp("run") / "journal.jsonl"
    path.write_text("".join(json.dumps(whole(record)) + "\n" for record in written))
    plain = records(path)
    for _ in range(2):  # the second reads what the first has written
        same(told(path, block_bytes), plain)
    with open(path, "a") as f:
        f.write("".join(json.dumps(whole(record)) + "\n" for record in written[:20]))
    same(told(path, block_bytes), records(path))
