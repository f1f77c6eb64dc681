"""The runner itself: whatever a reader does that it may not, is a finding; a case is its reader and its seed."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.fuzz import every, json_values, run
from tests.fuzz.__main__ import _shared_out, turns
from tests.fuzz.reader import READERS, Finding, Reader, Target, dump, load, objection
from tests.fuzz.run import Work, case_of

every.load()


class Refused(ValueError):
    pass


def _read(case: int) -> None:
    match case:
        case 1:
            raise Refused("the file a.json has no name")
        case 2:
            raise KeyError("name")
        case 3:
            os.kill(os.getpid(), 11)
        case 4:
            while True:
                pass
        case 5:
            b"x" * (120 << 20)
        case 6:
            raise Refused("this is a defect")
        case 7:
            raise Finding("it is another after a round trip")
        case 8:
            raise BaseException("a panic")  # as those of Rust libraries are
        case 9:
            sum(range(10**13))  # never comes back to Python
        case 11:
            _threads(32)


def _threads(count: int) -> None:
    over = threading.Event()
    for _ in range(count):
        # Looking up a name takes memory of the C library's, which each thread has its own of.
        threading.Thread(target=lambda: (socket.getaddrinfo("127.0.0.1", 80), over.wait()), daemon=True).start()
    over.set()


def _make(case: int) -> int:
    if case == 10:
        b"x" * (120 << 20)
    return case


@pytest.fixture
def reader(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., run.Ran]]:
    monkeypatch.setattr(run, "MOST_CPU_S", 0.2)
    monkeypatch.setattr(run, "_KILL_CPU_S", 0.4)

    def runs(cases: list[int], isolated: bool = False) -> run.Ran:
        made = iter([0, 0, 0, *cases])  # three to warm up
        target = Target(lambda rng: _make(next(made)), _read, (Refused,))
        READERS["of a test"] = Reader("of a test", lambda folder: target, 1, 1, 100, isolated)
        return run.run([Work("of a test", 0, len(cases))])

    yield runs
    READERS.pop("of a test", None)


def test_what_is_allowed_is_no_finding(reader: Callable[..., run.Ran]) -> None:
    ran = reader([0, 1, 0])
    assert (ran.cases, ran.taken, ran.found) == ({"of a test": 3}, {"of a test": 2}, {})


@pytest.mark.parametrize(
    ("case", "place"),
    [(2, "KeyError"), (4, "TooLong"), (5, "memory"), (6, "says 'defect'"), (7, "another"), (8, "BaseException")],
)
def test_what_is_not_allowed_is_a_finding(reader: Callable[..., run.Ran], case: int, place: str) -> None:
    ran = reader([0, case, 0])
    (found,) = ran.found.values()
    assert place in found.place
    assert found.seed == 1
    assert ran.cases == {"of a test": 3}


def test_a_reader_that_dies_is_a_finding_and_the_rest_is_run(reader: Callable[..., run.Ran]) -> None:
    ran = reader([0, 3, 2, 0])  # the child after it makes the cases anew, from the first
    assert {found.place for found in ran.found.values()} >= {"process:died of SIGSEGV"}
    assert ran.found["of a test", "process:died of SIGSEGV"].seed == 1
    assert ran.cases == {"of a test": 4}


def test_what_was_taken_before_a_death_is_counted(reader: Callable[..., run.Ran]) -> None:
    assert reader([0, 1, 0, 3]).taken == {"of a test": 2}


def test_memory_for_making_a_case_is_not_its_readers(reader: Callable[..., run.Ran]) -> None:
    assert not reader([10, 0]).found
    assert reader([10, 5]).found  # and hides nothing of it


def test_the_slowest_readers_begin_first_and_alone() -> None:
    works = _shared_out(list(READERS), 10_000_000, 7)
    first = [turn[0].reader for turn in turns(works, 15)]
    assert READERS[first[0]].share == min(one.share for one in READERS.values())
    assert all(len(turn) == 1 for turn in turns(works, 15) if READERS[turn[0].reader].share < 100)
    assert sorted(map(repr, works)) == sorted(repr(work) for turn in turns(works, 15) for work in turn)
    begun = [work for turn in turns(works, 1) for work in turn]
    assert {work.reader for work in begun[: len(READERS)]} == READERS.keys()  # with --minutes each gets its turn


def test_no_case_is_beyond_all_memory() -> None:
    value: Any = "x" * 5000
    for change in (json_values._many, json_values._much_longer) * 3:
        value = change(Random(1), {"a": value} if change is json_values._many else [value])
    assert 1 << 20 < len(json_values.encoded(value)) < 5 * json_values.MOST_BYTES


def test_threads_of_a_library_take_nothing_of_a_cases_memory(reader: Callable[..., run.Ran]) -> None:
    assert not reader([11]).found


def test_one_that_never_comes_back_is_ended(reader: Callable[..., run.Ran]) -> None:
    ran = reader([0, 9])
    (found,) = ran.found.values()
    assert "took more than" in found.place
    assert (found.seed, ran.cases) == (1, {"of a test": 2})


def test_one_that_the_product_reads_in_a_child_may_die(reader: Callable[..., run.Ran]) -> None:
    ran = reader([0, 3, 0], isolated=True)
    assert (ran.cases, ran.found) == ({"of a test": 3}, {})


@pytest.mark.parametrize("name", ["values", "frames", "swarm-messages", "slurm"])
def test_a_case_is_its_reader_and_its_seed(name: str, tmp_path: Path) -> None:
    made = []
    for again in ("a", "b"):
        (tmp_path / again).mkdir()
        target = READERS[name].make(tmp_path / again)
        made.append([case_of(name, target, seed) for seed in range(20)])
    assert made[0] == made[1]
    assert made[0][0] != made[0][1]


@pytest.mark.parametrize("case", [b"\xff", {"a": [1, None]}, "\ud800", [float("inf"), 10**400]])
def test_a_kept_case_is_read_back(case: Any, tmp_path: Path) -> None:
    ending, data = dump(case)
    (tmp_path / f"x.{ending}").write_bytes(data)
    assert load(tmp_path / f"x.{ending}") == case


def test_messages() -> None:
    assert objection(ValueError("a.json: 5 where a text belongs")) is None
    assert objection(ValueError("")) == "says nothing"
    assert objection(ValueError("a\nb")) == "says more than one line"
    assert objection(ValueError("x" * 5000)) is not None
