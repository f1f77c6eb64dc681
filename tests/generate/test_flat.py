"""A CPU's way to decode: the same model, laid out. (What it generates: test_golden.)"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shoal.generate import flat
from shoal.generate.engine import Engine
from shoal.generate.flat import PAYS_AFTER, Flat, Product, fits, packed
from shoal.generate.request import Sampling
from shoal.model.decoder import Decoder
from shoal.spec.model import Model
from shoal.spec.shape import shape_of
from tests.generate.test_engine import answers


def linears(dtype: torch.dtype, bias: bool) -> list[nn.Linear]:
    torch.manual_seed(1)
    return [nn.Linear(48, width, bias=bias, dtype=dtype) for width in (64, 16, 16)]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("dtype", "near"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
@torch.no_grad()
def test_products_side_by_side_are_those_of_their_weights(dtype: torch.dtype, near: float, bias: bool) -> None:
    parts = linears(dtype, bias)
    for rows in (1, 2, 5, 200):
        x, add = (torch.randn(rows, width, dtype=dtype) for width in (48, 96))
        wanted = torch.cat([part(x) for part in parts], 1)
        product = Product([p.weight for p in parts], [p.bias for p in parts])
        for _ in range(PAYS_AFTER + 2):  # as it lies, and packed
            torch.testing.assert_close(product(x), wanted, atol=near, rtol=near)
        torch.testing.assert_close(product(x, add), wanted + add, atol=2 * near, rtol=near)
        if rows == 1 and product.across is not None:
            scaled = product.scaled(x, 0.5, add)
            bare = wanted if product.bias is None else wanted - product.bias
            torch.testing.assert_close(scaled, wanted - 0.5 * bare + add, atol=2 * near, rtol=near)


def test_the_weights_keep_their_values_and_lie_in_memory_once() -> None:
    parts = linears(torch.float32, False)
    before = [part.weight.detach().clone() for part in parts]
    product = Product([p.weight for p in parts], [None] * 3)
    assert product.across is not None
    begin, end = product.across.data_ptr(), product.across.data_ptr() + product.across.nbytes
    for part, was in zip(parts, before, strict=True):
        assert torch.equal(part.weight, was)
        assert begin <= part.weight.data_ptr() < end


def test_without_room_nothing_is_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(64, 48)
    assert packed(weight) is not None or not torch.backends.mkldnn.is_available()
    monkeypatch.setattr(flat, "SPARE", 1.0)
    assert packed(weight) is None
    x = torch.randn(3, 48)
    product = Product([nn.Parameter(weight)], [None])
    for _ in range(PAYS_AFTER + 1):
        torch.testing.assert_close(product(x), F.linear(x, weight))


def test_only_a_model_that_is_nobody_elses_is_laid_out() -> None:
    made = Model(vocab_size=64, dim=32, layers=2, heads=4, kv_heads=2, ffn_dim=48, max_seq_len=40, init_std=0.3)
    model = Decoder(shape_of(made))
    model.init_weights(3)
    assert fits(model)
    asked = [([1, 2, 3], Sampling(max_tokens=20, temperature=0))]
    wanted = answers(Engine(model, vocab_size=64), asked)
    assert all(parameter.is_contiguous() for parameter in model.parameters())
    found = answers(Engine(model, vocab_size=64, alone=True), asked)
    assert found[0][0] == wanted[0][0]
    assert found[0][1] == pytest.approx(wanted[0][1], abs=1e-5)


def test_what_stands_in_the_place_of_a_part_is_not_passed_over() -> None:
    made = Model(vocab_size=64, dim=32, layers=1, heads=4, kv_heads=2, ffn_dim=48, max_seq_len=40)
    model = Decoder(shape_of(made))

    class Other(nn.Linear):
        pass

    model.blocks["0"].ffn.up = Other(32, 48, bias=False)  # type: ignore[union-attr]  # a Block's
    assert not fits(model)
    with pytest.raises(AssertionError):
        Flat(model)
