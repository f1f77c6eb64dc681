"""What is saved under one layout is loaded under any other, bit for bit, parameters and optimizer state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.checkpoint.states import LAYOUTS, build, pretend_to_train, same_bits, tensors_of, train, whole
from tests.ranks import Rows, run_ranks
from tests.slow import some_slow
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from shoal import checkpoint
from shoal.errors import CheckpointError

Tensors = dict[str, torch.Tensor]
LARGE = [layout for layout, world in LAYOUTS.items() if world == 4]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Tensors]]:
    """layout → (root, what was saved, whole)"""

    def save(rank: int, world: int, given: tuple[str, Path]) -> Tensors:
        layout, root = given
        model, optimizer = build(layout, seed=1)
        if layout.startswith("grid"):
            pretend_to_train(optimizer)
        else:
            train(model, optimizer, steps=2)
        tensors = tensors_of(model, optimizer)
        # Pieces of 100 bytes: every matrix is cut into several slices, as large ones are with the real limit.
        checkpoint.save(root, 2, tensors, {"layout": layout}, piece_bytes=100)
        return whole(tensors)

    roots = {layout: tmp_path_factory.mktemp(layout) for layout in LAYOUTS}
    rows = Rows(save, {layout: (world, (layout, roots[layout])) for layout, world in LAYOUTS.items()})
    return {layout: (root, rows[layout][0]) for layout, root in roots.items()}


@pytest.fixture(scope="module")
def loaded(saved: dict[str, tuple[Path, Tensors]]) -> Rows:
    """layout → of each rank, source → (extra, what was loaded, whole)"""

    def load(rank: int, world: int, layout: str) -> dict[str, tuple[Any, Tensors]]:
        result = {}
        for source, (root, _) in saved.items():
            tensors = tensors_of(*build(layout, seed=2))
            found = checkpoint.restore(root, tensors)
            assert found is not None
            result[source] = found.extra, whole(tensors)
        return result

    return Rows(load, {layout: (world, layout) for layout, world in LAYOUTS.items()}, slow=LARGE)


@pytest.mark.parametrize("layout", some_slow(LAYOUTS, slow=LARGE))
def test_every_layout_loads_what_every_layout_saved(
    layout: str, saved: dict[str, tuple[Path, Tensors]], loaded: Rows
) -> None:
    for of_rank in loaded[layout]:
        for source, (_, expected) in saved.items():
            extra, tensors = of_rank[source]
            assert extra == {"layout": source}
            assert same_bits(tensors, expected), f"{source} → {layout}"


def test_one_process_reads_whole_weights_of_every_layout(saved: dict[str, tuple[Path, Tensors]]) -> None:
    for root, expected in saved.values():
        found = checkpoint.newest(root)
        assert found is not None
        weights = {name.removeprefix("model."): t for name, t in expected.items() if name.startswith("model.")}
        assert same_bits(checkpoint.read_full(found), weights)


def test_every_rank_writes_a_share_and_no_slice_is_written_twice(saved: dict[str, tuple[Path, Tensors]]) -> None:
    for layout, (root, expected) in saved.items():
        found = checkpoint.newest(root)
        assert found is not None
        data_bytes = [f.bytes - f.header_bytes for f in found.manifest.files.values()]
        assert len(data_bytes) == LAYOUTS[layout]
        assert sum(data_bytes) == sum(t.numel() * t.element_size() for t in expected.values())
        assert max(data_bytes) < 2 * sum(data_bytes) / len(data_bytes), f"{layout}: {data_bytes}"


def test_training_goes_on_bit_for_bit_after_a_resume(tmp_path: Path) -> None:
    def interrupted(rank: int, world: int) -> tuple[Tensors, Tensors]:
        model, optimizer = build("fsdp-2", seed=1)
        train(model, optimizer, steps=2)
        checkpoint.save(tmp_path, 2, tensors_of(model, optimizer), {})
        train(model, optimizer, steps=2)
        resumed, its_optimizer = build("fsdp-2", seed=9)
        checkpoint.restore(tmp_path, tensors_of(resumed, its_optimizer))
        train(resumed, its_optimizer, steps=2)
        return whole(tensors_of(model, optimizer)), whole(tensors_of(resumed, its_optimizer))

    straight, resumed = run_ranks(interrupted, 2)[0]
    assert same_bits(straight, resumed)


def test_dtypes_scalars_empty_and_non_contiguous_tensors_survive(tmp_path: Path) -> None:
    odd = {
        "bf16": torch.randn(5, 3).bfloat16(),
        "int64": torch.tensor([2**62, -1]),
        "uint8": torch.arange(7, dtype=torch.uint8),
        "bool": torch.tensor([True, False]),
        "fp8": torch.randn(4).to(torch.float8_e4m3fn),
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
        "transposed": torch.randn(4, 6).t(),
        "strided": torch.randn(10)[::3],
        "nan": torch.tensor([float("nan"), float("-inf"), -0.0]),
        'naïve name/with "quotes"': torch.ones(2),
    }
    checkpoint.save(tmp_path, 1, odd, {})
    into = {name: torch.zeros(t.shape, dtype=t.dtype) for name, t in odd.items()}
    into["transposed"] = torch.zeros(4, 6).t()
    assert checkpoint.restore(tmp_path, into) is not None
    assert same_bits(into, {name: t.contiguous() for name, t in odd.items()})


def test_placements_that_hold_stretches_of_a_dimension_are_resharded(tmp_path: Path) -> None:
    """Tensor parallelism under FSDP on the same dimension: a rank's part is not one box of the tensor."""
    full = torch.arange(11 * 3.0).reshape(11, 3)
    cases: list[list[Placement]] = [
        [_StridedShard(0, split_factor=2), Shard(0)],
        [Shard(0), Shard(0)],
        [Replicate(), Shard(1)],
        [Shard(1), Replicate()],
        [Replicate(), Replicate()],
    ]

    def work(rank: int, world: int) -> list[bool]:
        mesh = init_device_mesh("cpu", (2, 2))

        def lay_out(tensor: torch.Tensor, cuts: list[Placement]) -> DTensor:
            return distribute_tensor(tensor, mesh, cuts, src_data_rank=None)  # None: torch scatters no uneven strides

        checkpoint.save(tmp_path, 1, {str(i): lay_out(full, cuts) for i, cuts in enumerate(cases)}, {})
        turned = {str(i): lay_out(torch.zeros_like(full), cuts) for i, cuts in enumerate(cases[::-1])}
        checkpoint.restore(tmp_path, turned)
        expected = [lay_out(full, cuts).to_local() for cuts in cases[::-1]]
        return [torch.equal(turned[str(i)].to_local(), e) for i, e in enumerate(expected)]

    assert all(all(equal) for equal in run_ranks(work, 4))
    found = checkpoint.newest(tmp_path)
    assert found is not None
    assert all(torch.equal(t, full) for t in checkpoint.read_full(found, prefix="").values())


def test_a_state_with_other_names_shapes_or_dtypes_is_refused_on_all_ranks(tmp_path: Path) -> None:
    def work(rank: int, world: int) -> list[str]:
        checkpoint.save(tmp_path, 1, {"model.w": torch.ones(2, 3), "model.b": torch.ones(3)}, {})
        wrong = [
            {"model.w": torch.ones(2, 3)},
            {"model.w": torch.ones(2, 3), "model.b": torch.ones(3), "model.c": torch.ones(1)},
            {"model.w": torch.ones(3, 2), "model.b": torch.ones(3)},
            # Only one rank is wrong: the others learn it, and nobody waits.
            {
                "model.w": torch.ones(2, 3),
                "model.b": torch.ones(3, dtype=torch.bfloat16 if rank == 1 else torch.float32),
            },
        ]
        said = []
        for tensors in wrong:
            with pytest.raises(CheckpointError) as e:
                checkpoint.restore(tmp_path, tensors)
            said.append(str(e.value))
        return said

    first, second = run_ranks(work, 2)
    assert first == second
    assert "'model.b'" in first[0]
    assert "no tensor 'model.c'" in first[1]
    assert "'model.w' has shape [2, 3] in it and [3, 2] here" in first[2]
    assert "(rank 1): 'model.b' is F32 in it and BF16 here" in first[3]


def test_a_prefix_loads_the_weights_alone(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, 1, {"model.w": torch.ones(2), "optim.w.exp_avg": torch.ones(2)}, {})
    found = checkpoint.newest(tmp_path)
    assert found is not None
    weights = {"model.w": torch.zeros(2)}
    checkpoint.load(found, weights, prefix="model.")
    assert torch.equal(weights["model.w"], torch.ones(2))
