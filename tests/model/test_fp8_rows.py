"""Products in 8 bits with a scale for each row, emulated on a CPU: an outlier stays where it is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from shoal.model import fp8, fp8_rows
from tests.train.tiny import losses_of, make_data, make_run, train_on

DIGITS = 2.0**-4  # e4m3 rounds by no more than this share of a number; what is summed is off by less


def numbers(*sides: int, seed: int = 0) -> Tensor:
    return torch.randn(*sides, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


def grads(way: type[torch.autograd.Function] | None, x: Tensor, weights: list[Tensor]) -> list[Tensor]:
    """The results and all gradients, in float32; without a way the exact ones."""
    x, *weights = (t.detach().clone().requires_grad_() for t in (x, *weights))
    if way is None:
        results = [x.float() @ w.float().t() for w in weights]
    else:
        results = way.apply(x, *weights)
    torch.autograd.backward(results, [numbers(*y.shape, seed=i).to(y.dtype) for i, y in enumerate(results)])
    assert all(t.grad is not None and t.grad.dtype == t.dtype for t in (x, *weights))
    return [t.detach().float() for t in (*results, *(t.grad for t in (x, *weights)))]


def off(a: Tensor, b: Tensor) -> Tensor:
    """How far each row of `a` is off, as a share of it."""
    return (a - b).norm(dim=1) / b.norm(dim=1)


def test_products_and_gradients_of_several_weights_are_near_the_exact_ones() -> None:
    x, weights = numbers(96, 64), [numbers(out, 64, seed=out) / 8 for out in (64, 32, 32)]
    for a, b in zip(grads(fp8_rows._RowProducts, x, weights), grads(None, x, weights), strict=True):
        assert off(a, b).max() < DIGITS


def test_gradients_come_in_the_weights_own_type() -> None:
    grads(fp8_rows._RowProducts, numbers(32, 16), [numbers(16, 16).float()])  # which says so itself


def test_an_outlier_hurts_its_own_row_alone() -> None:
    """With one scale for all of it everything else is below the smallest number that 8 bits can hold."""
    x, weights = numbers(64, 64), [numbers(64, 64, seed=1) / 8]
    x[5, 7] = 2.0**22
    exact = grads(None, x, weights)[0]
    by_row, by_tensor = (grads(way, x, weights)[0] for way in (fp8_rows._RowProducts, fp8._Products))
    others = torch.arange(64) != 5
    assert off(by_row, exact)[others].max() < DIGITS
    assert off(by_tensor, exact)[others].min() > 0.9


def test_rows_of_gradients_of_unlike_size_keep_their_digits() -> None:
    """They span nine powers of ten; e4m3 with one scale holds five, the last of them with one digit."""
    g = numbers(64, 64) * torch.logspace(-9, 0, 64).to(torch.bfloat16)[:, None]
    eight, transposed, by_row, by_column = fp8_rows.cast([g[:, :48], g[:, 48:]], 1)
    assert off(eight.float() * by_row[:, None], g.float()).max() < DIGITS
    assert transposed.is_contiguous()
    assert off(transposed.float() * by_column[:, None], g.float().t()).max() < DIGITS


def test_rows_and_columns_of_zeros_stay_so() -> None:
    x, weights = numbers(32, 32), [numbers(32, 32, seed=1)]
    x[3], x[:, 4], weights[0][5] = 0, 0, 0
    y, grad_x, grad_w = grads(fp8_rows._RowProducts, x, weights)
    assert not y[3].any()
    assert not y[:, 5].any()
    assert not grad_w[:, 4].any()
    assert all(t.isfinite().all() for t in (y, grad_x, grad_w))


def test_what_is_no_number_is_not_lost() -> None:
    x = numbers(32, 32)
    x[3, 4] = float("nan")
    y, _, grad_w = grads(fp8_rows._RowProducts, x, [numbers(32, 32, seed=1)])
    assert not y[3].isfinite().any()
    assert y[:3].isfinite().all()
    assert not grad_w[:, 4].isfinite().any()


def test_backward_keeps_one_byte_a_number() -> None:
    x = numbers(256, 64).requires_grad_()
    weights = [numbers(out, 64).requires_grad_() for out in (64, 32)]
    y = fp8_rows._RowProducts.apply(x, *weights)[0]
    kept = sum(t.untyped_storage().nbytes() for t in y.grad_fn.saved_tensors)
    assert kept == (256 + 96) * 64 + 2 * 4 * 64  # and a scale for each input


def test_compiled_it_gives_the_same() -> None:
    layer = torch.nn.Linear(32, 16)
    layer.__class__ = fp8_rows.RowLinear8
    x = numbers(2, 16, 32)
    told = []
    for call in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):
        layer.zero_grad()
        call(x).float().square().sum().backward()
        assert layer.weight.grad is not None
        told.append(layer.weight.grad.clone())
    torch.testing.assert_close(told[0], told[1])


def test_a_run_trains_with_it(tmp_path: Path) -> None:
    data = make_data(tmp_path / "data")
    curves = []
    for name, precision in (("sixteen", "bf16"), ("eight", "fp8")):
        changes = {"name": name, "train.precision": precision, "train.fp8_scaling": "row"}
        curves.append(losses_of(train_on(make_run(data, **changes), tmp_path, world=1)))
    assert curves[0][-1] < curves[0][0] - 0.3
    assert curves[1] == pytest.approx(curves[0], rel=0.02)
    assert (curves[0] != curves[1]).any()
