"""Ranks that hold different tensors: pipeline stages, experts on a mesh of their own, copies of tied weights."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests.ranks import run_ranks
from tests.slow import some_slow
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from shoal import checkpoint
from shoal.errors import CheckpointError

# Sizes that divide by nothing, by 2 and by 8: shards are even, uneven and empty.
SHAPES = [(8, 4, 6), (5, 3, 7), (2, 9, 4), (16, 8), (11, 3), (1, 5), (13,), (24,), ()]
WORLDS = (4, 8)
CASES = 5  # a world


def full(i: int) -> torch.Tensor:
    return torch.arange(math.prod(SHAPES[i]), dtype=torch.float32).reshape(SHAPES[i]) + 1000 * i


@cache
def mesh_of(shape: tuple[int, ...]) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=tuple("abcd"[: len(shape)]))


def lay_out(tensor: torch.Tensor, mesh: DeviceMesh, cuts: list[Placement]) -> DTensor:
    return distribute_tensor(tensor, mesh, cuts, src_data_rank=None)  # None: torch scatters no uneven strides


def grid(rng: random.Random, world: int) -> tuple[int, ...]:
    """2 to 4 mesh dimensions, some of size 1; the first is the pipeline."""
    sizes = [1] * rng.randint(2, 4)
    while math.prod(sizes) < world:
        sizes[rng.randrange(len(sizes))] *= 2
    return tuple(sizes)


def cuts_of(rng: random.Random, dims: int, sizes: tuple[int, ...]) -> list[Placement]:
    """Any of the layouts that FSDP, tensor and expert parallelism make together."""
    over = [rng.choice([None, *range(dims)]) for _ in sizes]
    cuts: list[Placement] = []
    for i, dim in enumerate(over):
        right = math.prod(n for n, d in zip(sizes[i + 1 :], over[i + 1 :], strict=True) if d == dim)
        if dim is None:
            cuts.append(Replicate())
        elif right > 1 and rng.random() < 0.7:  # the outer mesh dimension cuts what the inner ones have cut already
            cuts.append(_StridedShard(dim, split_factor=right))
        else:
            cuts.append(Shard(dim))
    return cuts


def state(seed: int, rank: int, world: int, value: Callable[[int], torch.Tensor]) -> tuple[dict, dict]:
    """What `rank` has in a layout drawn by `seed`, and who has the plain tensors."""
    rng = random.Random(seed)
    sizes = grid(rng, world)
    mesh = mesh_of(sizes)
    stage = mesh[tuple("abcd"[1 : len(sizes)])]
    mine = mesh.get_coordinate()
    assert mine is not None
    tensors: dict[str, torch.Tensor] = {}
    holders: dict[str, list[int]] = {}
    for i in range(len(SHAPES)):
        of = rng.randrange(sizes[0])
        cuts = cuts_of(rng, len(SHAPES[i]), sizes[1:])
        if of == mine[0]:
            tensors[f"w{i}"] = lay_out(value(i), stage, cuts)
            tensors[f"plain{i}"] = value(i).clone()
        holders[f"plain{i}"] = mesh.mesh[of].flatten().tolist()
    return tensors, holders


@pytest.fixture(scope="module")
def roots(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, int], Path]:
    """(world, seed) → a checkpoint of a layout of its own"""
    table = {(world, seed): tmp_path_factory.mktemp(f"{world}-{seed}") for world in WORLDS for seed in range(CASES)}

    def save(rank: int, world: int) -> None:
        for seed in range(CASES):
            tensors, holders = state(seed, rank, world, full)
            checkpoint.save(table[world, seed], 1, tensors, {}, holders=holders, piece_bytes=64)

    for world in WORLDS:
        run_ranks(save, world)
    return table


@pytest.mark.parametrize("world", some_slow(WORLDS, slow=[8]))
def test_random_stages_and_layouts_load_what_others_saved(world: int, roots: dict[tuple[int, int], Path]) -> None:
    def load(rank: int, world: int) -> list[str]:
        wrong = []
        for n, ((from_world, seed), root) in enumerate(roots.items()):
            tensors, _ = state(100 + n, rank, world, lambda i: torch.zeros(SHAPES[i]))
            expected, _ = state(100 + n, rank, world, full)
            checkpoint.restore(root, tensors)
            for name, tensor in tensors.items():
                here, there = (t.to_local() if isinstance(t, DTensor) else t for t in (tensor, expected[name]))
                if not torch.equal(here, there):
                    wrong.append(f"{from_world}/{seed} → {100 + n}: {name} {getattr(tensor, 'placements', '')}")
        return wrong

    assert run_ranks(load, world) == [[]] * world


def test_one_process_reads_them_whole_and_each_number_was_written_once(roots: dict[tuple[int, int], Path]) -> None:
    for root in roots.values():
        found = checkpoint.newest(root)
        assert found is not None
        tensors = checkpoint.read_full(found, prefix="")
        assert len(tensors) == 2 * len(SHAPES)
        assert all(
            torch.equal(t, full(int(name.removeprefix("plain").removeprefix("w")))) for name, t in tensors.items()
        )
        data_bytes = sum(f.bytes - f.header_bytes for f in found.manifest.files.values())
        assert data_bytes == 2 * 4 * sum(math.prod(shape) for shape in SHAPES)


def test_experts_on_a_mesh_of_their_own_go_to_other_sizes_and_back(tmp_path: Path) -> None:
    """(replicate, shard, ep) of one stage, sharded by FSDP along the inner dimension and by experts along the first."""
    experts = torch.arange(8 * 6 * 4.0).reshape(8, 6, 4)

    def work(rank: int, world: int) -> list[bool]:
        layouts = [((2, 1, 2, 2), [Replicate(), Shard(1), Shard(0)]), ((1, 2, 2, 2), [Replicate(), Shard(1), Shard(0)])]
        layouts += [((2, 1, 1, 4), [Replicate(), Shard(1), Shard(0)])]
        layouts += [((1, 2, 1, 4), [Replicate(), Replicate(), Shard(0)])]
        layouts += [((2, 2, 2, 1), [Replicate(), _StridedShard(0, split_factor=1), Shard(0)])]
        layouts += [((1, 1, 4, 2), [Replicate(), _StridedShard(0, split_factor=2), Shard(0)])]
        equal = []
        for step, (sizes, cuts) in enumerate(layouts, start=1):
            mesh = mesh_of(sizes)["b", "c", "d"]
            name = f"stage{rank // (world // sizes[0])}.experts"
            checkpoint.save(tmp_path, step, {name: lay_out(experts, mesh, cuts)}, {})
            for to_sizes, to_cuts in layouts:
                if to_sizes[0] == sizes[0]:
                    to_mesh = mesh_of(to_sizes)["b", "c", "d"]
                    into = lay_out(torch.zeros_like(experts), to_mesh, to_cuts)
                    checkpoint.restore(tmp_path, {name: into})
                    equal.append(torch.equal(into.to_local(), lay_out(experts, to_mesh, to_cuts).to_local()))
        return equal

    assert all(len(equal) > 12 and all(equal) for equal in run_ranks(work, 8))


def test_tied_weights_on_two_stages_are_written_by_their_owner_and_read_by_both(tmp_path: Path) -> None:
    embed = torch.arange(12 * 2.0).reshape(12, 2)

    def work(rank: int, world: int) -> tuple[str, bool]:
        stage = mesh_of((2, 2))["b"]
        own = embed if rank < 2 else embed + 1  # the copy must not win
        tied = {"embed": lay_out(own, stage, [Shard(0)]), "count": torch.tensor(float(rank < 2))}
        with pytest.raises(checkpoint.SaveError) as e:
            checkpoint.save(tmp_path, 1, tied, {}, holders={"count": [0, 1]})
        saved = checkpoint.save(tmp_path, 1, tied, {}, holders={"embed": [0, 1], "count": [0, 1]})
        files = checkpoint.open_checkpoint(tmp_path, saved.name).manifest.files
        size = [f.bytes - f.header_bytes for f in files.values()]
        assert sum(size) == embed.numel() * 4 + 4
        assert size[2:] == [0, 0]
        into = {"embed": lay_out(torch.zeros_like(embed), stage, [Shard(0)]), "count": torch.tensor(7.0)}
        checkpoint.restore(tmp_path, into)
        expected = lay_out(embed, stage, [Shard(0)])
        return str(e.value), torch.equal(into["embed"].to_local(), expected.to_local()) and into["count"].item() == 1.0

    said, right = zip(*run_ranks(work, 4), strict=True)
    assert all(right)
    assert len(set(said)) == 1
    assert "the ranks do not agree on who writes tensor 'embed'" in said[0]


def test_a_tensor_that_nobody_wrote_is_found_before_publishing(tmp_path: Path) -> None:
    def work(rank: int, world: int) -> str:
        with pytest.raises(checkpoint.SaveError) as e:
            # Each rank has its own tensor and the default says that all have it: some of them find no writer.
            checkpoint.save(tmp_path, 1, {f"w{rank}": torch.ones(2)}, {})
        return str(e.value)

    said = run_ranks(work, 2)
    assert said[0] == said[1]
    assert "'w1' do not cover it exactly once" in said[0]
    assert checkpoint.newest(tmp_path) is None


def test_copies_of_a_stage_share_its_writing(tmp_path: Path) -> None:
    def work(rank: int, world: int) -> None:
        stage = rank // 2
        holders = {f"stage{s}.w{i}": [2 * s, 2 * s + 1] for s in range(2) for i in range(8)}
        checkpoint.save(tmp_path, 1, {f"stage{stage}.w{i}": torch.ones(8) for i in range(8)}, {}, holders=holders)

    run_ranks(work, 4)
    found = checkpoint.newest(tmp_path)
    assert found is not None
    assert [f.bytes - f.header_bytes for f in found.manifest.files.values()] == [8 * 8 * 4 // 2] * 4


def test_names_are_checked_over_all_stages(tmp_path: Path) -> None:
    def work(rank: int, world: int) -> list[str]:
        names = ["a", "b", "c"]
        holders = {name: [i % 2] for i, name in enumerate(names)}
        mine = {name: torch.ones(2) for i, name in enumerate(names) if i % 2 == rank}
        checkpoint.save(tmp_path, 1, mine, {}, holders=holders)
        checkpoint.restore(tmp_path, mine)  # neither rank has all names, together they do
        checkpoint.restore(
            tmp_path, {name: torch.ones(2) for name in names} if rank else {}
        )  # nor need they all have some
        said = []
        for wrong in ({"a": torch.ones(2)}, {"abc"[rank]: torch.ones(2)}, {**mine, f"x{rank}": torch.ones(2)}):
            with pytest.raises(CheckpointError) as e:
                checkpoint.restore(tmp_path, wrong)
            said.append(str(e.value))
        dist.barrier()
        return said

    first, second = run_ranks(work, 2)
    assert first == second
    assert "it holds 'b', 'c', which this model and optimizer do not have" in first[0]
    assert "it holds 'c', which" in first[1]
    assert "(rank 0): it has no tensor 'x0'" in first[2]
