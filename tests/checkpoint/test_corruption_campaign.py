"""Hundreds of damages drawn by seed: all are noticed, all are survived, and nothing else raises an alarm.

What is drawn and how it is judged is in `campaign`; the whole campaign, with torch's DCP beside it, is
benchmarks/corruption.py.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests.checkpoint import campaign, shelves
from tests.checkpoint.damages import HURTS, Draw
from tests.checkpoint.shelves import GOOD, Disk, History, InBucket, about, empty, files_of, flipped, sharded
from tests.checkpoint.states import same_bits
from tests.patience import limit
from tests.ranks import run_ranks
from tests.services import s3_server

from shoal import checkpoint
from shoal.checkpoint import Name, ledger
from shoal.errors import WRONG_ENVIRONMENT, CheckpointError


@pytest.fixture(scope="module", autouse=True)
def no_power_cut() -> Iterator[None]:
    """Nothing here cuts the power: what fsync does is not tested, and it takes most of the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda fd: None)
        yield


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory) -> History:
    return shelves.make_history(tmp_path_factory.mktemp("history"))


@pytest.fixture
def shelf(history: History, tmp_path: Path) -> Disk:
    shelf = Disk(tmp_path / "checkpoints")
    shelf.lay(history.pristine)
    return shelf


def test_every_damage_on_a_disk_is_noticed_and_survived(history: History, shelf: Disk) -> None:
    tally = campaign.Tally()
    kinds = campaign.kinds(on_disk=True)
    campaign.judge(range(2 * len(kinds)), shelf, history, campaign.damage, tally)
    assert tally.missed == []
    assert tally.tried.keys() == set(kinds)


def test_what_is_harmless_raises_no_alarm_on_a_disk(history: History, shelf: Disk) -> None:
    tally = campaign.Tally()
    campaign.judge(range(36), shelf, history, campaign.harmless, tally)
    campaign.clean_loads(20, shelf, history, tally)
    assert tally.missed == []
    assert sum(tally.harmless.values()) == 36


@pytest.mark.cluster
@pytest.mark.timeout(900)
def test_the_same_holds_in_a_bucket(bucket: tuple[InBucket, History]) -> None:
    in_bucket, history = bucket
    tally = campaign.Tally()
    kinds = campaign.kinds(on_disk=False)
    campaign.judge(range(3 * len(kinds)), in_bucket, history, campaign.damage, tally)
    campaign.judge(range(44), in_bucket, history, campaign.harmless, tally)
    campaign.clean_loads(20, in_bucket, history, tally)
    assert tally.missed == []
    assert tally.tried.keys() == set(kinds)


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[InBucket, History]]:
    """The history, written by real saves to a real S3 server."""
    with s3_server(tmp_path_factory.mktemp("seaweed")) as server, pytest.MonkeyPatch.context() as patch:
        server.make_bucket("checkpoints")
        for name, value in server.environment.items():
            patch.setenv(name, value)
        urls = ["s3://checkpoints/run", "s3://checkpoints/another"]
        subprocess.run([sys.executable, "-m", "tests.checkpoint.shelves", *urls], check=True, timeout=limit(200))
        mine, other = (InBucket(server.client(), url) for url in urls)
        history = shelves.taken_from(mine, other)
        yield mine, history


def test_two_ranks_fall_back_together_when_one_of_them_meets_damage(history: History, tmp_path: Path) -> None:
    """Damage to what only one of them reads, or to what both read; each time all load the same older step."""
    shelf = Disk(tmp_path)
    in_files = [kind for kind, hurt in HURTS.items() if hurt.__name__ in ("flip_data", "lose_a_block", "truncate")]

    def work(rank: int, world: int) -> list[str]:
        wrong = []
        for number in range(12):
            victims = GOOD[: 1 + number % 3]
            if rank == 0:
                shelf.lay(history.pristine)
                draw = OfOneRank(random.Random(number), shelf, history)
                for name in victims:
                    HURTS[in_files[number % len(in_files)]](draw, name)
            dist.barrier()
            tensors = sharded(empty())
            found = checkpoint.restore(shelf.root, tensors)
            good = GOOD[len(victims)]
            if found is None or found.name != good or found.extra != about(good):
                wrong.append(f"{number}: rank {rank} loaded {found and found.name}")
            truth = sharded(history.truth(good))
            if not same_bits(*({n: local(t) for n, t in table.items()} for table in (tensors, truth))):
                wrong.append(f"{number}: rank {rank} has other numbers than {good}")
            dist.barrier()
            if not set(victims) <= ledger.read(shelf.store).quarantined:
                wrong.append(f"{number}: not quarantined")
            dist.barrier()
        return wrong

    assert run_ranks(work, 2, timeout_s=120) == [[], []]


class OfOneRank(Draw):
    """Only the file of one rank is touched; which one is drawn."""

    def file(self, name: Name, *files: str) -> str:
        return f"{name}/rank-0000{self.rng.randrange(2)}.safetensors"


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, torch.distributed.tensor.DTensor) else tensor


def test_a_history_that_is_all_bad_is_refused_by_all_ranks_in_one_sentence(history: History, tmp_path: Path) -> None:
    shelf = Disk(tmp_path)
    shelf.lay(history.pristine)
    ways = list(HURTS.values())
    for i, name in enumerate(GOOD):
        ways[4 * i](Draw(random.Random(i), shelf, history), name)
    before = shelf.names()

    def work(rank: int, world: int) -> tuple[str, int]:
        with pytest.raises(CheckpointError) as e:
            checkpoint.restore(tmp_path, sharded(empty()))
        return str(e.value), e.value.exit_code

    (said, code), other = run_ranks(work, 2)
    assert other == (said, code)
    assert code == WRONG_ENVIRONMENT
    assert "\n" not in said
    assert all(str(name) in said for name in GOOD)
    assert shelf.names() == before, "what may be the last hope is neither touched nor marked"


def test_on_a_disk_that_cannot_be_written_the_older_one_is_used_all_the_same(
    history: History, tiny_disk: Path, tmp_path: Path
) -> None:
    shelf = Disk(tiny_disk / "checkpoints")
    shelf.lay(history.pristine)
    file = files_of(history.pristine, GOOD[0])[-1]
    shelf.write(file, flipped(history.pristine[file], 8 * len(history.pristine[file]) - 1))
    subprocess.run(["mount", "-o", "remount,ro", str(tiny_disk)], check=True)
    for _ in range(2):  # nobody could write down that it is bad: it is noticed again
        tensors = empty()
        found = checkpoint.restore(shelf.root, tensors)
        assert found is not None
        assert found.name == GOOD[1]
        assert same_bits(tensors, history.truth(GOOD[1]))
        assert [bad.name for bad in found.skipped if not bad.known] == [GOOD[0]]
    copy = shutil.copytree(shelf.root, tmp_path / "copy")
    checkpoint.restore(copy, empty())
    assert GOOD[0] in ledger.read(Disk(Path(copy)).store).quarantined
