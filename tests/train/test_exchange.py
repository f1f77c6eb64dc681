"""What ranks agree on about a step travels during the one before it: nobody waits for a sum of the hosts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shoal.decide.auto import decide
from shoal.journal.journal import records
from shoal.journal.rundir import RunDir
from shoal.parallel.place import Place, Summing, join
from shoal.spec import dump
from shoal.train import loop
from shoal.train.amount import Amount
from shoal.train.exchange import Exchange
from shoal.train.worker import work
from tests.ranks import run_ranks
from tests.train.tiny import digest_of, make_data, make_run, train_on

pytestmark = pytest.mark.usefixtures("kept_ranks")

STEPS = 5
FEW = {"train.steps": STEPS, "train.batch": 8, "mesh.dp_shard": 2, "mesh.dp_replicate": 1}


class _Late(Summing):
    """The message of a process that is late: it leaves when its sender has computed its whole step."""

    def wait(self) -> list[float]:
        dist.all_reduce(self._total, group=_apart)
        return super().wait()


_apart: Any = None  # a group for the exchange alone, so that a late message stands in no other's way


def _begin_late(self: Place, *values: float) -> Summing:
    total = torch.tensor(values, dtype=torch.float64)
    if self.rank == 1:
        return _Late(total, None, 1)
    return Summing(total, dist.all_reduce(total, group=_apart, async_op=True), 1)


@pytest.mark.usefixtures("fresh_ranks")  # a message may come when the run has ended
def test_a_peer_whose_message_is_late_by_a_whole_step_holds_up_nobody(tmp_path: Path) -> None:
    """Were it waited for before a step computes, rank 0 would wait for rank 1, and rank 1 for rank 0's shards."""
    run = make_run(make_data(tmp_path / "data"), **FEW)
    whole = train_on(run, tmp_path / "in-time", 2)
    decided, run_dir = decide(run, tmp_path, 2).run, RunDir.of(run.name, tmp_path)
    run_dir.path.mkdir(parents=True)
    run_dir.spec_file.write_text(dump(decided))

    def rank(rank: int, world: int) -> list[int]:
        global _apart
        place, waits, steps = join(decided), [], []
        _apart = dist.new_group(backend="gloo")
        step = loop.train_step

        def counted(*args: Any) -> Any:
            waits.clear()
            record = step(*args)
            steps.append(len(waits))
            return record

        def noted(self: Place, *values: float) -> list[float]:
            waits.append(values)
            total = torch.tensor(values, dtype=torch.float64)
            dist.all_reduce(total)
            return [float(v) for v in total]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Place, "begin_sum_of_batch", _begin_late)
            patch.setattr(Place, "sum_of_batch", noted)
            patch.setattr(loop, "train_step", counted)
            work(run_dir, decided, place, lambda: False)
        return steps

    for waits in run_ranks(rank, 2):
        assert waits == [1] + [0] * (STEPS - 1), "only the first step has nobody before it to ask during"
    assert digest_of(run_dir) == digest_of(whole)


def test_what_is_known_of_a_batch_is_used_for_that_batch_alone() -> None:
    place, exchange = Place(0, 1, torch.device("cpu")), Exchange()
    assert exchange.of(place, 4, lambda: Amount(1, 2, 3), False) == ((1, 2, 3), False)
    exchange.begin(place, 5, Amount(4, 5, 6), False, (0, 1))
    assert exchange.join() == [0, 1]
    assert exchange.of(place, 5, lambda: pytest.fail("it is known"), False) == ((4, 5, 6), False)
    exchange.begin(place, 6, Amount(7, 8, 9), False, ())
    exchange.join()
    assert exchange.of(place, 9, lambda: Amount(1, 1, 1), False)[0] == (1, 1, 1)  # batches 6 to 8 are left out
    assert exchange.of(place, 9, lambda: Amount(1, 1, 1), True)[1]  # alone, it hears itself at once


def test_who_is_told_to_stop_ends_a_step_later_with_all_saved(tmp_path: Path) -> None:
    """Told on one rank of two before step 2 begins: that step is taken, and all end together before the next."""
    run = make_run(make_data(tmp_path / "data"), **FEW)
    decided, run_dir = decide(run, tmp_path, 2).run, RunDir.of(run.name, tmp_path)
    run_dir.path.mkdir(parents=True)
    run_dir.spec_file.write_text(dump(decided))

    def rank(rank: int, world: int) -> str:
        asked = iter([False, rank == 1, False, False, False])
        try:
            work(run_dir, decided, join(decided), lambda: next(asked))
        except Exception as e:
            return str(e)
        return "went on"

    said = run_ranks(rank, 2)
    assert all("stopped after step 2 of 5; the state is saved" in words for words in said), said
    kinds = [r["kind"] for r in records(run_dir.journal_file)]
    assert kinds.count("step") == 2
    assert kinds.count("checkpoint") == 1
    whole = train_on(run, tmp_path / "whole", 2)
    assert digest_of(train_on(run, tmp_path, 2)) == digest_of(whole)
