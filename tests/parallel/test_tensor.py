"""A model cut over the tensor-parallel axis has the losses, gradients and logits of the whole one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from shoal.model.decoder import Decoder
from shoal.parallel.place import Place, lay_out
from shoal.parallel.tensor import split
from shoal.spec.mesh import Sizes
from shoal.spec.model import Model
from shoal.spec.shape import Shape, shape_of
from tests.ranks import run_ranks

SMALL: dict[str, Any] = {"vocab_size": 136, "dim": 32, "layers": 2, "heads": 8, "kv_heads": 4, "ffn_dim": 40}
# Large weights, so that attention is far from uniform and a wrong angle, mask or head shows.
FAMILIES = {
    "llama": Model(family="llama", init_std=0.2, **SMALL),
    "llama tied, all biases": Model(
        family="llama", init_std=0.2, tie_embeddings=True, qkv_bias=True, out_bias=True, mlp_bias=True, **SMALL
    ),
    "qwen2 sliding": Model(
        family="qwen2", init_std=0.2, qkv_bias=True, sliding_window=5, full_attention_layers=1, **SMALL
    ),
    "qwen3 tied": Model(family="qwen3", init_std=0.2, qk_norm=True, tie_embeddings=True, head_dim=6, **SMALL),
}
BATCH, SEQ = 4, 16


def shape(family: str) -> Shape:
    return shape_of(FAMILIES[family])


def a_batch(packed: bool) -> dict[str, Tensor]:
    """Tokens and targets, some of which do not count; packed: several documents a row, counted from 0 each."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, SMALL["vocab_size"], (BATCH, SEQ + 1), generator=generator)
    targets = tokens[:, 1:].masked_fill(torch.rand(BATCH, SEQ, generator=generator) < 0.2, -100)
    batch = {"x": tokens[:, :-1], "targets": targets}
    if packed:
        ends = torch.rand(BATCH, SEQ, generator=generator) < 0.25
        batch["documents"] = ends.cumsum(1) - ends.long()
        starts = torch.where(torch.cat((torch.ones(BATCH, 1).bool(), ends[:, :-1]), 1), torch.arange(SEQ), 0)
        batch["positions"] = torch.arange(SEQ) - starts.cummax(1).values
    return batch


def whole(family: str) -> Decoder:
    decoder = Decoder(shape(family))
    decoder.init_weights(1)
    return stirred(decoder)


def cut(family: str, place: Place, layers: range | None = None, policy: MixedPrecisionPolicy | None = None) -> Decoder:
    """Over tp, and with FSDP2 above it where the place has such an axis or a policy asks for it."""
    with torch.device("meta"):
        decoder = Decoder(shape(family), layers)
    split(decoder, place)
    if place.sizes.dp > 1 or policy is not None:
        assert place.dense is not None
        for module in (*decoder.blocks.values(), decoder):
            fully_shard(module, mesh=place.dense["shard"], mp_policy=policy or MixedPrecisionPolicy())
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)
    decoder.to_empty(device="cpu")
    decoder.init_weights(1)
    return stirred(decoder)


@torch.no_grad()
def stirred(decoder: Decoder) -> Decoder:
    """Norms and biases off their ones and zeros, which would hide a missing one."""
    for name, parameter in decoder.named_parameters():
        if parameter.ndim == 1:
            generator = torch.Generator().manual_seed(len(name))
            values = torch.rand(parameter.shape, generator=generator) * 0.4 - 0.2
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            local += _part_of(values, parameter)
    return decoder


def _part_of(values: Tensor, parameter: Tensor) -> Tensor:
    from shoal.model.init import local_box

    return values[local_box(parameter)[1]]


def grads(decoder: Decoder) -> dict[str, Tensor]:
    return {n: p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for n, p in decoder.named_parameters()}


def off(found: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """The largest difference of each tensor, relative to its largest number."""
    assert found.keys() == expected.keys()
    return {n: float((found[n] - t).abs().max() / t.abs().max()) for n, t in expected.items()}


def on_ranks(sizes: Sizes, work: Callable[..., Any], *args: Any) -> Any:
    def rank(rank: int, world: int) -> Any:
        return work(lay_out(rank, world, torch.device("cpu"), sizes), *args)

    return run_ranks(rank, sizes.world)


def one_step(place: Place, family: str, packed: bool) -> tuple[float, dict[str, Tensor], Tensor, bool]:
    decoder, batch = cut(family, place), a_batch(packed)
    mine = place.at["dp"]
    each = BATCH // place.sizes.dp
    part = {name: t[mine * each : (mine + 1) * each] for name, t in batch.items()}
    loss = decoder(**part)
    loss.backward()
    all_dtensor = all(isinstance(p, DTensor) for p in decoder.parameters())
    gradients = grads(decoder)
    part.pop("targets")
    with torch.no_grad():
        logits = decoder(**part)
    return loss.item(), gradients, logits, all_dtensor


MESHES = {"tp2": Sizes(tp=2), "tp4": Sizes(tp=4), "fsdp2 x tp2": Sizes(dp_shard=2, tp=2)}
CASES = [
    ("llama", "tp2", False),
    ("llama", "tp4", True),
    ("llama", "fsdp2 x tp2", True),
    ("llama tied, all biases", "tp2", True),
    ("llama tied, all biases", "fsdp2 x tp2", False),
    ("qwen2 sliding", "tp2", True),
    ("qwen2 sliding", "tp4", False),
    ("qwen3 tied", "tp4", True),
    ("qwen3 tied", "fsdp2 x tp2", True),
]


@pytest.mark.parametrize(("family", "mesh", "packed"), CASES)
def test_loss_gradients_and_logits_are_those_of_one_process(family: str, mesh: str, packed: bool) -> None:
    model, batch = whole(family), a_batch(packed)
    loss = model(**batch)
    loss.backward()
    del batch["targets"]
    logits = model(**batch)
    sizes = MESHES[mesh]
    found = on_ranks(sizes, one_step, family, packed)
    readers = found[:: sizes.tp]
    assert sum(value for value, *_ in readers) == pytest.approx(loss.item(), rel=2e-6)
    assert all(found[i][0] == found[i // sizes.tp * sizes.tp][0] for i in range(sizes.world)), "one number on the axis"
    torch.testing.assert_close(
        torch.cat([rank_logits for *_, rank_logits, _ in readers]), logits.detach(), atol=1e-4, rtol=1e-4
    )
    for _, gradients, _, all_dtensor in found:
        assert all_dtensor
        worst = off(gradients, grads(model))
        assert max(worst.values()) < 2e-5, worst
