"""Reckoned by column, with an index and without: the numbers are those that one reads record by record."""

from __future__ import annotations

import json
import math
import random
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shoal.guard import history as guard_history
from shoal.journal.journal import Record, records
from shoal.journal.reading import Told, told
from shoal.journal.rundir import RunDir
from shoal.observe import lives
from shoal.observe.curves import MOST_POINTS, thinned
from shoal.observe.history import history
from shoal.observe.plot import WIDTH, plot, plot_many, shown
from shoal.observe.steps import median, nearest, steps_of
from shoal.observe.time_ledger import ledger
from shoal.train.numerics import Past
from shoal.train.spikes import ROW, WINDOW
from tests.journal.journals import make_run
from tests.observe import by_record
from tests.observe.islands import Fleet
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


@settings(deadline=None, max_examples=100)
@given(st.lists(any_record(), max_size=60), st.one_of(st.none(), st.floats(0, 2e4)), st.sampled_from([3, 1 << 17]))
def test_any_records_in_any_order_give_the_same_ledger_and_history(
    told: list[Record], now: float | None, chunk: int
) -> None:
    told = [whole(record) for record in told]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lives, "CHUNK", chunk)
        same(told, told, now)


@pytest.mark.parametrize("chunk", [16, 1 << 17])
def test_a_long_run_with_saves_behind_its_steps_gives_the_same(
    tmp_path: Path, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stretches of steps that touch nothing else, and what touches them: saves, evaluations, failures, rewinds."""
    monkeypatch.setattr(lives, "CHUNK", chunk)
    chance = random.Random(7)
    story = make_run(tmp_path).open().start()
    for _ in range(60):
        story.steps(story.step + chance.randint(1, 40))
        match chance.randint(0, 9):
            case 0:
                story.failure(chance.random()).wait(1.0).start(max(0, story.step - chance.randint(0, 60)), 2.0)
            case 1:
                to, begin = max(0, story.step - chance.randint(1, 60)), story.t
                about = {"attempt": story.attempt, "step": story.step, "begin": begin, "batches": [0, 1]}
                story.wait(0.5).write("rewind", to=to, **about)
                story.step = to
            case 2:
                story.close("stopped", 143).wait(50.0).open(resumed=True).start()
            case 3:
                story.eval()
            case 4:
                story.write("stopping", signal="SIGTERM")
            case 6:
                story.wait(-chance.uniform(0.1, 12.0))  # a clock that is set back: steps lie over one another
            case 5:
                more = {"first_layer": 0, "imbalance": [1.0], "imbalance_mean": 1.0}
                story.write("router", attempt=story.attempt, step=story.step, **more)
            case _:  # a save that began some steps ago
                begin = round(story.t - chance.uniform(0, 5), 6)
                story.write("checkpoint", attempt=story.attempt, step=story.step, begin=begin, bytes=1)
    assert len(story.records) > 500
    same(story.records, story.records)
    same(story.records, story.records, story.t + 100)
    same(told(story.run_dir.journal_file, 5_000), story.records)


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


@settings(deadline=None, max_examples=50)
@given(st.lists(any_record(), max_size=60), st.integers(0, 30))
@example([{"kind": "step", "t": 1.0, "attempt": 0, "step": step} for step in (3, 9, 2)], 30)
def test_a_start_learns_the_same_from_an_index_as_from_every_record(
    tmp_path_factory: pytest.TempPathFactory, written: list[Record], at: int
) -> None:
    run_dir = RunDir(tmp_path_factory.mktemp("run"))
    run_dir.journal_file.write_text("".join(json.dumps(started(record)) + "\n" for record in written))
    one_by_one = guard_history.History.of(run_dir)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(guard_history, "LONG_BYTES", 0)
        at_once = guard_history.History.of(run_dir)
    assert vars(at_once) == vars(one_by_one)
    plain = records(run_dir.journal_file)
    taken = {
        r["step"]: (r["step"], r["loss"], r["grad_norm"]) for r in plain if r["kind"] == "step" and r["step"] <= at
    }
    past = Past.of(told(run_dir.journal_file), at)
    assert past.taken == [taken[step] for step in sorted(taken)][-WINDOW - ROW :]
    assert past.skipped == [r["step"] for r in plain if r["kind"] == "skip"]
    assert past.rewound == [r["step"] for r in plain if r["kind"] == "rewind"]


def test_a_step_that_is_told_twice_counts_once_by_column_too() -> None:
    fleet = Fleet().open().take(10)
    fleet.begin_epoch({"0": "was silent"}, noticed=fleet.t).take()
    fleet.tell_step(10, begin=fleet.t - 2)  # by a first member that had been stopped
    fleet.t += 3
    fleet.tell_step(11, begin=fleet.t - 2)
    same(fleet.take(5).close().records, fleet.records)


def started(record: dict[str, Any]) -> Record:
    """With what the workers and the supervisor always write."""
    number = record.get("step", 3)
    more: dict[str, Any] = {
        "step": {"loss": number / 7, "grad_norm": 1.5, "islands": record.get("islands") or [1, number % 3]},
        "rewind": {"step": number, "batches": [1, 2]},
        "skip": {"batch": 4},
        "open": {"session": int(record["t"]) % 5, "job": "j" if record["t"] > 5e3 else None},
        "decision": {"value": 1, "asked": record["t"] > 5e3},
        "close": {"status": "done"},
    }.get(record["kind"], {})
    return {**whole(record), **more}


def test_a_plot_of_the_points_that_show_is_the_plot_of_all() -> None:
    chance = np.random.default_rng(3)
    for size in (900, 5000, 20_000):
        xs, ys = np.cumsum(chance.integers(1, 4, size)), np.cumsum(chance.normal(size=size))
        ys[chance.integers(0, size, 5)] += 1000.0  # spikes
        ys[chance.integers(0, size, 9)] = np.nan
        ys[3], ys[size // 2 : size // 2 + 200] = np.inf, np.nan
        every = list(zip(xs.tolist(), ys.tolist(), strict=True))
        few = shown(xs, ys)
        assert len(few) < 4 * 128 + 100
        assert plot(few) == plot(every)
        marks = [(-50.0, 1.0), (xs[-1] + 500.0, 2.0)]
        assert plot(shown(xs, ys, [x for x, _ in marks]), marks) == plot(every, marks)
        both = [("A", shown(xs, ys, [0.0], WIDTH)), ("B", [(0.0, 1.0), (5.0, 1.0)])]
        assert plot_many(both) == plot_many([("A", every), both[1]])


def test_a_thinned_curve_keeps_every_spike_and_every_gap() -> None:
    xs, ys = np.arange(100_000), np.zeros(100_000)
    ys[[7, 31_234, 99_999]], ys[[5_000, 70_001]], ys[88_888] = 9.0, -9.0, np.nan
    few_xs, few_ys = thinned(xs, ys)
    assert len(few_xs) <= MOST_POINTS + 1
    kept = dict(zip(few_xs.tolist(), few_ys.tolist(), strict=True))
    assert [kept.get(x) for x in (7, 31_234, 99_999, 5_000, 70_001)] == [9.0, 9.0, 9.0, -9.0, -9.0]
    assert math.isnan(kept[88_888])
    assert few_xs.tolist() == sorted(few_xs.tolist())


def test_medians_and_quantiles_are_those_of_the_measured_values() -> None:
    chance = np.random.default_rng(5)
    for size in (1, 2, 7, 100):
        values = chance.normal(size=size)
        assert median(values) == statistics.median(values.tolist())
        assert list(nearest(values, (0.05, 0.95))) == [
            sorted(values)[min(size - 1, int(q * size))] for q in (0.05, 0.95)
        ]
    steps = steps_of([{"step": i, "tokens": (1 << 62) - 1} for i in range(9)])
    assert steps.total_tokens() == 9 * ((1 << 62) - 1), "more than 64 bits hold"
