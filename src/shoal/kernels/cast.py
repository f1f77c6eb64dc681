"""Casting to 8 bits, and the transposed copy with it, in one reading."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 128


@torch.library.triton_op("shoal::cast_both", mutates_args=())
def cast_both(x: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`x` [rows, columns] times `scale` (float32, one number) in an 8-bit type, and its transpose, both contiguous."""
    rows, columns = x.shape
    x = x if x.stride(1) == 1 else x.contiguous()
    cast = torch.empty(rows, columns, dtype=dtype, device=x.device)
    transposed = torch.empty(columns, rows, dtype=dtype, device=x.device)
    grid = (triton.cdiv(rows, TILE), triton.cdiv(columns, TILE))
    most = torch.finfo(dtype).max
    torch.library.wrap_triton(_cast_both)[grid](
        x, scale, cast, transposed, rows, columns, x.stride(0), MOST=most, TILE=TILE, num_warps=4
    )
    return cast, transposed


@triton.jit
def _cast_both(x, scale, cast, transposed, rows, columns, stride, MOST: tl.constexpr, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    r = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    c = tl.program_id(1).to(tl.int64) * TILE + tl.arange(0, TILE)
    there = (r[:, None] < rows) & (c[None, :] < columns)
    tile = tl.load(x + r[:, None] * stride + c[None, :], mask=there, other=0.0).to(tl.float32)
    tile = tl.minimum(tl.maximum(tile * tl.load(scale), -MOST), MOST).to(cast.dtype.element_ty)
    tl.store(cast + r[:, None] * columns + c[None, :], tile, mask=there)
    across = (c[:, None] < columns) & (r[None, :] < rows)
    tl.store(transposed + c[:, None] * rows + r[None, :], tl.trans(tile), mask=across)
