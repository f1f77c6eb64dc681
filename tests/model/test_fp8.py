"""Products in 8 bits, emulated on a CPU: near those in bfloat16, and a model that learns with them."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Literal

import pytest
import torch

from shoal.errors import SetupError, SpecError
from shoal.model import fp8, head, head8
from shoal.model.decoder import Decoder
from shoal.spec.eight_bits import head_in_8_bits
from shoal.spec.shape import Shape, shape_of
from tests.train.tiny import make_run

Scaling = Literal["tensor", "row"]
SCALINGS: tuple[Scaling, ...] = ("tensor", "row")
by_scaling = pytest.mark.parametrize("scaling", SCALINGS)
CPU = torch.device("cpu")
SHAPE = shape_of(make_run("x", **{"model.dim": 64, "model.ffn_dim": 128, "model.vocab_size": 96}).model)  # type: ignore[arg-type]


def model(shape: Shape = SHAPE) -> Decoder:
    decoder = Decoder(shape)
    decoder.init_weights(0)
    return decoder


def loss(decoder: Decoder, tokens: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return decoder(tokens[:, :-1], targets=tokens[:, 1:]) / tokens[:, 1:].numel()


@by_scaling
def test_losses_and_gradients_are_near_those_in_16_bits(scaling: Scaling) -> None:
    plain = model(replace(SHAPE, qkv_bias=True))
    eight = copy.deepcopy(plain)
    fp8.apply(eight, CPU, head=True, scaling=scaling)
    assert [name for name, _ in plain.named_parameters()] == [name for name, _ in eight.named_parameters()]
    tokens = torch.randint(0, 96, (4, 33), generator=torch.Generator().manual_seed(0))
    losses = [loss(decoder, tokens) for decoder in (plain, eight)]
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-3, atol=0)
    assert losses[0] != losses[1]  # it is in 8 bits
    for one in losses:
        one.backward()
    for (name, a), b in zip(plain.named_parameters(), eight.parameters(), strict=True):
        assert a.grad is not None
        assert b.grad is not None
        if a.grad.norm() > 1e-6:
            assert torch.nn.functional.cosine_similarity(a.grad.flatten(), b.grad.flatten(), dim=0) > 0.98, name


def test_the_head_alone_is_near_its_twin_in_16_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several groups of several parts, tokens that are no targets, and no gradients where none are asked for."""
    monkeypatch.setattr(head, "CPU_CHUNK_BYTES", 1)  # the fewest tokens at a time: 128
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(300, 64, generator=generator), torch.randn(96, 64, generator=generator) / 8)
    targets = torch.randint(0, 96, (300,), generator=generator)
    targets[::7] = head.NO_TARGET
    told = []
    for summed in (head.summed_cross_entropy, head8.summed_cross_entropy):
        h, w = (t.clone().requires_grad_() for t in (hidden, weight))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = summed(h[None], w, targets[None])
        loss.backward()
        with torch.no_grad():
            assert summed(h[None].bfloat16(), w, targets[None]).item() == pytest.approx(loss.item(), rel=1e-3)
        told.append((loss.item(), h.grad, w.grad))
    assert told[0][0] != told[1][0] == pytest.approx(told[0][0], rel=2e-3)
    for a, b in zip(told[0][1:], told[1][1:], strict=True):
        assert a is not None
        assert b is not None
        assert b.dtype == torch.float32
        assert torch.nn.functional.cosine_similarity(a.flatten(), b.flatten(), dim=0) > 0.995
        assert b.norm().item() == pytest.approx(a.norm().item(), rel=0.01)


def test_the_head_stays_where_it_is_not_wanted_or_cannot_be() -> None:
    for vocab, wanted, changed in ((96, True, True), (96, False, False), (97, True, False)):
        run = make_run("x", **{"train.precision": "fp8", "train.fp8_head": wanted, "model.vocab_size": vocab})  # type: ignore[arg-type]
        assert head_in_8_bits(run, shape_of(run.model)) == changed
        decoder = model()
        fp8.apply(decoder, CPU, changed)
        assert (decoder.head.loss is head8.summed_cross_entropy) == changed


@pytest.mark.slow
def test_it_learns_as_fast() -> None:
    curves = []
    for scaling in (None, *SCALINGS):
        decoder = model()
        if scaling is not None:
            fp8.apply(decoder, CPU, head=True, scaling=scaling)
        optimizer = torch.optim.AdamW(decoder.parameters(), lr=3e-3)
        generator = torch.Generator().manual_seed(1)
        for _ in range(60):
            begin = torch.randint(0, 96, (8, 1), generator=generator)
            now = loss(decoder, (begin + torch.arange(33)) % 96)  # counting
            now.backward()
            optimizer.step()
            optimizer.zero_grad()
        curves.append(now.item())
    assert curves[0] < 2.0  # of 4.6 at the start
    assert curves[1:] == pytest.approx([curves[0]] * 2, rel=0.1)


@by_scaling
def test_one_compiled_block_serves_all(scaling: Scaling) -> None:
    decoder = model()
    fp8.apply(decoder, CPU, head=True, scaling=scaling)
    graphs = 0

    def count(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> object:
        nonlocal graphs
        graphs += 1
        return graph.forward

    for block in decoder.blocks.values():
        block.compile(fullgraph=True, backend=count)
    loss(decoder, torch.randint(0, 96, (2, 33)))
    assert graphs == 1


def test_sizes_that_tensor_cores_cannot_take_are_refused() -> None:
    with pytest.raises(SpecError, match=r"model\.ffn_dim is 72: make it 64"):
        fp8.apply(model(replace(SHAPE, ffn_dim=72)), CPU, head=True)


def test_a_gpu_without_8_bit_products_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    with pytest.raises(SetupError, match="which NVIDIA A100 is not: take bf16"):
        fp8.apply(model(), torch.device("cuda", 0), head=True)
