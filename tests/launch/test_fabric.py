"""A fabric that NCCL would pass over without a word is told of, in one sentence."""

from __future__ import annotations

import resource
from pathlib import Path

from shoal.launch.fabric import problem


def loads(name: str) -> object:
    return object()


def fails(name: str) -> object:
    raise OSError(f"{name}: cannot open shared object file")


def node(root: Path, cards: int = 1, doors: int = 1) -> Path:
    for i in range(cards):
        (root / f"sys/class/infiniband/mlx5_{i}").mkdir(parents=True)
    (root / "dev/infiniband").mkdir(parents=True)
    for i in range(doors):
        (root / f"dev/infiniband/uverbs{i}").touch()
    return root


def test_a_node_without_a_fabric_is_well_whatever_is_installed(tmp_path: Path) -> None:
    assert problem(tmp_path, fails, 0) is None


def test_a_fabric_that_can_be_used_is_well(tmp_path: Path) -> None:
    for limit in (resource.RLIM_INFINITY, 64 << 20):
        assert problem(node(tmp_path / str(limit)), loads, limit) is None


def test_a_missing_library_closed_devices_and_a_small_limit_are_named(tmp_path: Path) -> None:
    begins = "this node has InfiniBand or RoCE (mlx5_0, mlx5_1, mlx5_2, …), and "
    root = node(tmp_path / "eight", cards=8)
    assert problem(root, fails, 1 << 30) == (
        f"{begins}libibverbs.so.1 cannot be loaded: NCCL will use TCP, at about a tenth of the speed; install "
        "libibverbs1 and ibverbs-providers"
    )
    said = problem(root, loads, 64 << 10)
    assert said is not None
    assert said.startswith(f"{begins}a process may lock 64 KiB of memory (ulimit -l)")
    said = problem(node(tmp_path / "closed", doors=0), loads, 1 << 30)
    assert said is not None
    assert "its devices /dev/infiniband/uverbs* are not here: NCCL will use TCP" in said
