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
