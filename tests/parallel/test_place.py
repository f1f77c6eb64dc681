"""Where a process stands: its GPU, the groups of its axes and how many of them there are, its files and sockets."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.testing._internal.distributed.fake_pg import FakeStore

from shoal.errors import SetupError
from shoal.parallel.groups import line
from shoal.parallel.place import Place, gpu_shared, join, lay_out, leave, raise_open_files
from shoal.shared_gpu import SETTING, ranks_per_gpu
from shoal.spec.mesh import Sizes
from shoal.spec.run import Run
from tests.forked import fork
from tests.ranks import run_ranks

CPU = torch.device("cpu")
ON_CUDA = Run.model_validate(
    {"name": "x", "data": {"train": "d"}, "train": {"steps": 1}, "resources": {"device": "cuda"}}
)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Two GPUs that are not there; which of them were chosen."""
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    for name in ("NCCL_HOSTID", "NCCL_IB_DISABLE", "NCCL_SOCKET_IFNAME", "NCCL_NVLS_ENABLE", SETTING):
        monkeypatch.setenv(name, "")  # what the code sets is taken back with it
        monkeypatch.delenv(name)
    return chosen


def alone(monkeypatch: pytest.MonkeyPatch, rank: int, here: int) -> Place:
    """The place of one process, whose GPU is chosen as if there were `here` of them."""
    for name, value in {"RANK": rank, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": here, "WORLD_SIZE": 1}.items():
        monkeypatch.setenv(name, str(value))
    return join(ON_CUDA)


def test_more_processes_than_gpus_are_refused(gpus: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    assert alone(monkeypatch, 1, 2).device == torch.device("cuda", 1)
    with pytest.raises(SetupError, match=r"process 2 has no GPU of its own \(2 are visible\)"):
        alone(monkeypatch, 2, 4)
    assert gpus == [1]
    assert "NCCL_HOSTID" not in os.environ


def test_with_the_tests_setting_they_share_and_say_so(gpus: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SETTING, "1")
    places = []
    for rank in range(5):
        places.append(alone(monkeypatch, rank, 5))
        assert os.environ["NCCL_HOSTID"] == f"h{rank}"
    assert gpus == [0, 1, 0, 1, 0]
    assert (os.environ["NCCL_IB_DISABLE"], os.environ["NCCL_SOCKET_IFNAME"]) == ("1", "lo")
    said = gpu_shared(places[0])
    assert said == (
        "5 processes share 2 GPUs (SHOAL_TEST_SHARE_GPU, for tests alone): what is computed is right, no speed means "
        "anything"
    )
    assert ranks_per_gpu(5, 2) == 3


def test_with_it_and_enough_gpus_nothing_is_shared(gpus: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SETTING, "1")
    assert gpu_shared(alone(monkeypatch, 1, 2)) is None
    assert gpus == [1]
    assert "NCCL_HOSTID" not in os.environ
    assert ranks_per_gpu(2, 2) == 1


@contextlib.contextmanager
def pretended(world: int, rank: int) -> Iterator[None]:
    """A group of so many, of which this process is one and the others are not there."""
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


# Axes, and the groups of more than one process that a rank is in: all of them, and one for each axis.
LAID: dict[str, tuple[dict[str, Any], bool, int]] = {
    "FSDP": ({"dp_shard": 8}, False, 2),
    "HSDP": ({"dp_replicate": 2, "dp_shard": 4}, False, 3),
    "shared sequences": ({"dp_shard": 2, "cp": 2, "tp": 2}, False, 4),
    "all": ({"pp": 2, "dp_replicate": 2, "dp_shard": 2, "cp": 2, "tp": 2}, False, 6),
    # Experts: their own shards (cut otherwise), ep, and copies of theirs; the pipeline's is the dense one.
    "experts": ({"pp": 2, "dp_replicate": 2, "dp_shard": 2, "tp": 2, "ep": 2}, True, 8),
}


@pytest.mark.parametrize("name", LAID)
def test_a_process_has_a_group_for_each_axis_and_no_other_however_many_there_are(name: str) -> None:
    changes, experts, groups = LAID[name]
    for more in (1, 16):
        sizes = Sizes(**{**changes, "dp_shard": changes["dp_shard"] * more})
        with pretended(sizes.world, rank=sizes.world - 3):
            place = lay_out(sizes.world - 3, sizes.world, CPU, sizes, experts)
            held = [c10d.get_process_group_ranks(group) for group in c10d._world.pg_map]
            assert sum(len(ranks) > 1 for ranks in held) == groups
            assert sum(len(ranks) == 1 for ranks in held) <= 1
            assert place.dense is not None
            assert place.dense.get_group("shard").size() == sizes.dp_shard * sizes.cp
            if place.expert is not None:
                assert place.expert.get_group("pp") is place.dense.get_group("pp")


def test_axes_have_the_members_that_the_numbering_of_ranks_says() -> None:
    sizes = Sizes(pp=2, dp_replicate=2, dp_shard=2, cp=2, tp=2, ep=4)
    for rank in range(0, sizes.world, 5):
        with pretended(sizes.world, rank):
            place = lay_out(rank, sizes.world, CPU, sizes, experts=True)
            assert place.dense is not None
            assert place.expert is not None
            assert place.context is not None
            at = sizes.coordinate(rank)

            def same(rest: set[str], at: dict[str, int] = at) -> list[int]:
                """The ranks that stand where this one does but for these axes."""
                others = {r: sizes.coordinate(r) for r in range(sizes.world)}
                return [r for r, o in others.items() if all(o[name] == at[name] for name in at.keys() - rest)]

            members = c10d.get_process_group_ranks
            assert members(place.dense.get_group("tp")) == same({"tp"})
            assert members(place.dense.get_group("pp")) == same({"pp"})
            assert members(place.context) == same({"cp"})
            copy = [r for r in same({"dp", "cp"}) if r // 8 == rank // 8]
            assert members(place.dense.get_group("shard")) == copy
            assert members(place.expert.get_group("ep")) == list(range(rank // 4 * 4, rank // 4 * 4 + 4))
            assert members(place.expert.get_group("replicate")) == line(rank, 2, 8)


def test_gloo_connects_to_those_it_talks_to_and_not_to_everybody(tmp_path: Path) -> None:
    """Descriptors of a rank do not grow with their number: they are a ring's, and the store's."""
    torch.set_num_threads(1)  # before the fork, as tests/ranks.py does

    def work(rank: int, world: int, folder: Path) -> int:
        os.environ |= {"SHOAL_RENDEZVOUS": f"file://{folder}/store", "RANK": str(rank), "WORLD_SIZE": str(world)}
        before = len(os.listdir("/proc/self/fd"))
        run = ON_CUDA.model_copy(update={"resources": ON_CUDA.resources.model_copy(update={"device": "cpu"})})
        axes = dict.fromkeys(Sizes.__dataclass_fields__, 1) | {"dp_shard": world}
        place = join(run.model_copy(update={"mesh": run.mesh.model_copy(update=axes)}))
        assert place.sum(1.0) == [world]
        (folder / f"opened-{rank}").write_text(str(len(os.listdir("/proc/self/fd")) - before))
        leave(place)
        return 0

    opened = {}
    for world in (4, 12):
        (folder := tmp_path / str(world)).mkdir()
        ranks = [fork(partial(work, rank, world, folder), folder / "log") for rank in range(world)]
        codes = [os.waitpid(pid, 0)[1] for pid in ranks]
        assert codes == [0] * world, (folder / "log").read_text()
        opened[world] = max(int((folder / f"opened-{rank}").read_text()) for rank in range(world))
    assert opened[12] <= opened[4] + 4, opened


def test_as_many_files_may_be_open_as_the_system_allows() -> None:
    def work(rank: int, world: int) -> tuple[int, int]:
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
        raise_open_files()
        return resource.getrlimit(resource.RLIMIT_NOFILE)

    ((soft, hard),) = run_ranks(work, 1)
    assert soft == hard
