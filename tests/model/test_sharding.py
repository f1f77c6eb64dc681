"""The numbers do not depend on how the model is laid out: initial weights, imported weights, loss and gradients."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from shoal.model import init
from shoal.model.decoder import Decoder
from shoal.model.hf import load_weights, save_folder
from shoal.spec.model import Model
from shoal.spec.shape import Shape, shape_of
from shoal.spec.start_values import RULES
from tests.ranks import run_ranks
from tests.slow import some_slow

pytestmark = pytest.mark.usefixtures("kept_ranks")

# Sizes that 4 ranks do not divide, so that shards are uneven and one is empty.
SMALL = {"vocab_size": 101, "dim": 36, "layers": 2, "heads": 3, "kv_heads": 1, "head_dim": 14, "ffn_dim": 50}


def shape(tied: bool, init: str = "auto") -> Shape:
    return shape_of(Model(family="qwen2", qkv_bias=True, tie_embeddings=tied, init=init, **SMALL))


def whole(tied: bool, seed: int = 5, init: str = "auto") -> Decoder:
    model = Decoder(shape(tied, init))
    model.init_weights(seed)
    return model


def sharded(tied: bool, mesh: dist.DeviceMesh) -> Decoder:
    with torch.device("meta"):
        model = Decoder(shape(tied))
    for block in model.blocks.values():
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    return model


def gathered(model: Decoder) -> dict[str, torch.Tensor]:
    return {name: p.full_tensor() for name, p in model.named_parameters()}


def same(found: dict[str, torch.Tensor], model: Decoder) -> bool:
    return all(torch.equal(found[name], p) for name, p in model.named_parameters())


@pytest.mark.parametrize("tied", some_slow([False, True], slow=[True]))
def test_initial_and_imported_weights_do_not_depend_on_the_sharding(
    tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(init, "BLOCK_NUMBERS", 500)  # several generators a matrix, whose borders are not the shards'
    references = {rule: whole(tied, init=rule) for rule in RULES}
    other = whole(tied, seed=6)
    save_folder(tmp_path / "hf", other.shape, dict(other.named_parameters()))

    def work(rank: int, world: int) -> list[bool]:
        found = []
        for mesh in (
            init_device_mesh("cpu", (world,)),
            init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")),
        ):
            model = sharded(tied, mesh)
            for rule, reference in references.items():
                model.shape = shape(tied, rule)
                model.init_weights(5)
                found.append(same(gathered(model), reference))
            load_weights(model, tmp_path / "hf")
            found.append(same(gathered(model), other))
        return found

    assert run_ranks(work, 4) == [[True] * 2 * (len(RULES) + 1)] * 4


def test_every_seed_parameter_and_row_has_numbers_of_its_own() -> None:
    one, two = (whole(False, seed, init="normal") for seed in (1, 2))
    drawn = [p for _, p in one.named_parameters() if p.ndim == 2]
    rows = torch.cat([p.detach()[:, :36] for p in drawn if p.shape[1] >= 36])
    assert torch.unique(rows, dim=0).shape == rows.shape
    assert not any(torch.equal(a, b) for a, b in zip(drawn, (p for p in two.parameters() if p.ndim == 2), strict=True))
    numbers = torch.cat([p.detach().flatten() for p in drawn])
    assert abs(numbers.std().item() / 0.02 - 1) < 0.02
    assert abs(numbers.mean().item()) < 0.001
    for name, p in one.named_parameters():
        if p.ndim == 1:
            assert (p == (0.0 if name.endswith("bias") else 1.0)).all(), name


def test_filling_a_model_that_has_no_memory_yet_is_an_error() -> None:
    with torch.device("meta"):
        model = Decoder(shape(False))
    with pytest.raises(RuntimeError, match="to_empty"):
        model.init_weights(0)


@pytest.mark.parametrize("tied", [False, True])
def test_fsdp_and_ddp_give_the_loss_and_gradient_of_one_process(tied: bool) -> None:
    tokens = torch.randint(0, 101, (4, 24), generator=torch.Generator().manual_seed(0))
    targets = tokens.roll(-1, 1)
    documents = (torch.arange(24) // 9).expand(4, 24)
    positions = (torch.arange(24) % 9).expand(4, 24)
    reference = whole(tied)
    loss = reference(tokens, positions, documents, targets)
    (loss / 50).backward()
    expected = {name: p.grad for name, p in reference.named_parameters()}

    def work(rank: int, world: int, layout: str) -> tuple[float, float]:
        if layout == "ddp":
            model = whole(tied)
            wrapped: torch.nn.Module = torch.nn.parallel.DistributedDataParallel(model)
        else:
            wrapped = model = sharded(tied, init_device_mesh("cpu", (world,)))
            model.init_weights(5)
        mine = slice(rank * 2, rank * 2 + 2)
        part = wrapped(tokens[mine], positions[mine], documents[mine], targets[mine])
        (part * (world / 50)).backward()  # both average over ranks
        total = part.detach().clone()
        dist.all_reduce(total)
        grads = {n: p.grad if layout == "ddp" else p.grad.full_tensor() for n, p in model.named_parameters()}
        return total.item(), max((grads[n] - g).abs().max().item() for n, g in expected.items())

    for layout in ("ddp", "fsdp"):
        for total, difference in run_ranks(work, 2, layout):
            assert total == pytest.approx(loss.item(), rel=1e-6)
            assert difference < 1e-6
