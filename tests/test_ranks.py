"""The harness that the multi-rank tests stand on."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.guard.fake import alive, until
from tests.kept_ranks import kept
from tests.patience import Stopwatch
from tests.ranks import Rows, rank_outcomes, run_ranks


def test_every_rank_returns_its_value() -> None:
    def work(rank: int, world: int, scale: int) -> tuple[int, torch.Tensor]:
        total = torch.tensor([rank * scale])
        dist.all_reduce(total)
        return rank, total

    values = run_ranks(work, 4, 10)
    assert [rank for rank, _ in values] == [0, 1, 2, 3]
    assert all(total.item() == 60 for _, total in values)


def test_a_failing_rank_is_named_with_its_traceback_and_ends_the_others() -> None:
    def work(rank: int, world: int) -> None:
        if rank == 1:
            raise ValueError("the shard is upside down")
        dist.barrier()

    watch = Stopwatch()
    with pytest.raises(AssertionError, match=r"rank 1: exit code 1[\s\S]*the shard is upside down"):
        run_ranks(work, 3)
    assert watch.quiet_s() < 30


def test_a_hanging_rank_is_killed_and_its_stack_is_shown() -> None:
    def stuck_here() -> None:
        time.sleep(100)

    def work(rank: int, world: int) -> None:
        if rank == 0:
            stuck_here()

    with pytest.raises(TimeoutError, match="stuck_here"):
        run_ranks(work, 2, timeout_s=3)


def test_no_process_outlives_the_call(tmp_path: Path) -> None:
    def work(rank: int, world: int) -> None:
        child = subprocess.Popen(["sleep", "1000"])
        (tmp_path / str(rank)).write_text(f"{os.getpid()} {child.pid}")
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(1000)

    outcomes = rank_outcomes(work, 2, grace_s=0.5)
    assert [o.status for o in outcomes] == [-signal.SIGKILL, -signal.SIGKILL]
    pids = [int(pid) for rank in range(2) for pid in (tmp_path / str(rank)).read_text().split()]
    until(lambda: not any(map(alive, pids)))  # a killed process takes a moment


def test_rows_of_as_many_ranks_are_computed_by_the_same() -> None:
    rows = Rows(lambda rank, world, n: (os.getpid(), n), {"a": (2, 5), "b": (1, 6), "c": (2, 7)})
    first, alone, second = rows["a"], rows["b"], rows["c"]
    assert [n for _, n in (*first, *alone, *second)] == [5, 5, 6, 7, 7]
    assert [pid for pid, _ in first] == [pid for pid, _ in second]
    assert len({pid for pid, _ in (*first, *alone)}) == 3


def test_a_row_that_fails_takes_no_other_with_it() -> None:
    def work(rank: int, world: int, n: int) -> int:
        assert n != 6 or rank == 0, "six"
        dist.barrier()
        return n

    rows = Rows(work, {"a": (2, 5), "b": (2, 6), "c": (2, 7)})
    assert rows["c"] == [7, 7]
    with pytest.raises(AssertionError, match="six"):
        rows["b"]
    assert rows["a"] == [5, 5]


def test_kept_ranks_begin_each_call_as_fresh_ones_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def work(rank: int, world: int, n: int) -> tuple[int, list[str | None], str, float]:
        said = [os.environ.get(name) for name in ("RANK", "OF_THE_TEST", "LEFT")]
        os.environ["LEFT"] = "behind"
        pytest.MonkeyPatch().setattr(time, "sleep", None)
        return os.getpid(), said, os.getcwd(), n * torch.rand(1).item()

    def sleeps(rank: int, world: int) -> bool:
        return time.sleep is not None

    with kept():
        first = run_ranks(work, 2, 1)
        assert all(run_ranks(sleeps, 2)), "what a rank patches is put back"
        monkeypatch.setenv("OF_THE_TEST", "yes")
        monkeypatch.chdir(tmp_path)
        second = run_ranks(work, 2, 1)
    assert [pid for pid, *_ in first] == [pid for pid, *_ in second]
    assert [said for _, said, *_ in second] == [["0", "yes", None], ["1", "yes", None]]
    assert {where for _, _, where, _ in second} == {str(tmp_path)}
    assert {number for *_, number in (*first, *second)} == {first[0][3]}, "of the same seed"
    assert not any(alive(pid) for pid, *_ in first)


def test_kept_ranks_see_what_is_patched_and_a_failure_is_the_last_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def work(rank: int, world: int, n: int) -> tuple[int, str]:
        assert n != 6 or rank == 0, "six"
        return os.getpid(), signal.strsignal(1) or ""

    with kept():
        with monkeypatch.context() as patch:
            patch.setattr(signal, "strsignal", lambda number: "patched")
            patched = run_ranks(work, 2, 5)
        first = run_ranks(work, 2, 5)
        with pytest.raises(AssertionError, match="six"):
            run_ranks(work, 2, 6)
        second = run_ranks(work, 2, 5)
    assert [said for _, said in (*patched, *first)] == ["patched"] * 2 + [first[0][1]] * 2
    assert first[0][1] != "patched"
    assert len({pid for pid, _ in (*patched, *first, *second)}) == 6
