"""Products of matrices by shape and precision.

Operands are random numbers: zeros cost a GPU less power, and an H200 multiplied them 13% faster (894 against 788
TFLOP/s in bf16, 2026-10).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from shoal.bench import shapes
from shoal.bench.clock import Clock, Work, digits
from shoal.bench.shapes import Product
from shoal.devices import on_torch
from shoal.plan.hardware_types import Row

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "tf32": torch.float32}
BY_TENSOR, BY_ROW = "fp8", "fp8 by row"  # one scale a tensor, one a row

# Of the time for products, shares. The precision that models are trained in is measured in every shape.
_GPU_SHARES = {"bf16": 6.0, "fp16": 1.0, "tf32": 1.0, "fp32": 1.0, BY_TENSOR: 2.0, BY_ROW: 1.5}
_CPU_SHARES = {"fp32": 3.0, "bf16": 2.0, "fp16": 1.0}


def measure(clock: Clock, seconds: float, quick: bool) -> list[Row]:
    """Rows of m, n, k, precision, TFLOP/s."""
    shares = {p: share for p, share in _shares(clock).items() if _computes(clock, p)}
    rows: list[Row] = []
    for precision, share in shares.items():
        if not clock.cuda:
            chosen = shapes.cpu_products()
        elif precision == next(iter(shares)):
            chosen = shapes.products(quick)
        else:
            chosen = shapes.few_products()
        rows += _of_precision(clock, precision, chosen, seconds * share / sum(shares.values()))
    return rows


def best(rows: list[Row] | tuple[Row, ...]) -> dict[str, Row]:
    """The fastest product of each precision."""
    found: dict[str, Row] = {}
    for row in rows:
        if row[3] not in found or row[4] > found[row[3]][4]:
            found[row[3]] = row
    return found


def _shares(clock: Clock) -> dict[str, float]:
    return _GPU_SHARES if clock.cuda else _CPU_SHARES


def _computes(clock: Clock, precision: str) -> bool:
    """Whether the device has units for it, as far as one can ask."""
    if not clock.cuda:
        return True
    if precision == "bf16":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if precision == "tf32":
        return on_torch.has_tf32(clock.device)
    if precision in (BY_TENSOR, BY_ROW):
        return on_torch.eight_bits(clock.device) is not None
    return True


def _of_precision(clock: Clock, precision: str, chosen: list[Product], seconds: float) -> list[Row]:
    end = time.monotonic() + seconds
    rows: list[Row] = []
    rate = 0.0  # FLOP/s of the last product
    for product in chosen:
        left = end - time.monotonic()
        if rows and (left <= 0 or 4 * product.flops / rate > left):
            continue
        try:
            with _precise(precision):
                work = _work(clock.device, precision, product)
                taken = clock.seconds(work, seconds / len(chosen))
        except torch.OutOfMemoryError:
            continue
        except (RuntimeError, ValueError):
            if precision not in (BY_TENSOR, BY_ROW):
                raise
            return rows  # no kernel for fp8 on this device, which one learns by trying
        rate = product.flops / taken
        rows.append((product.m, product.n, product.k, precision, digits(rate / 1e12)))
    return rows


@contextmanager
def _precise(precision: str) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _work(device: torch.device, precision: str, product: Product) -> Work:
    m, n, k = product.m, product.n, product.k
    if precision in (BY_TENSOR, BY_ROW):
        return _scaled(device, product, precision == BY_ROW)
    dtype = DTYPES[precision]
    if product.of_weights:  # gradients [tokens, m], inputs [tokens, n]
        a = torch.randn(k, m, device=device, dtype=dtype).t()
        b = torch.randn(k, n, device=device, dtype=dtype)
    else:  # inputs [tokens, k], weights [n, k]
        a = torch.randn(m, k, device=device, dtype=dtype)
        b = torch.randn(n, k, device=device, dtype=dtype).t()
    out = torch.empty(m, n, device=device, dtype=dtype)
    return lambda: torch.mm(a, b, out=out)


def _scaled(device: torch.device, product: Product, by_row: bool) -> Work:
    """fp8 has one layout only (both operands along k), so that whoever trains in it transposes before."""
    m, n, k = product.m, product.n, product.k
    dtype = _fp8(device)
    a = torch.randn(m, k, device=device, dtype=torch.bfloat16).to(dtype)
    b = torch.randn(n, k, device=device, dtype=torch.bfloat16).to(dtype).t()
    scale_a = torch.ones((m, 1) if by_row else (), device=device, dtype=torch.float32)
    scale_b = torch.ones((1, n) if by_row else (), device=device, dtype=torch.float32)
    return lambda: torch._scaled_mm(
        a, b, scale_a=scale_a, scale_b=scale_b, out_dtype=torch.bfloat16, use_fast_accum=True
    )


def _fp8(device: torch.device) -> torch.dtype:
    return on_torch.eight_bits(device) or torch.float8_e4m3fn  # a processor computes it in float32
