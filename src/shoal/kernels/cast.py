"""Casting to 8 bits, and the transposed copy with it, in one reading."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 128


@torch.library.triton_op("shoal::cast_joined", mutates_args=())
def cast_joined(pieces: list[Tensor], scales: list[Tensor], dtype: torch.dtype, along: int) -> tuple[Tensor, Tensor]:
    """The pieces (matrices) put together `along` rows (0) or columns (1), each times its scale (float32, one number),
    in an 8-bit type; and the transpose of that, both contiguous."""
    rows, columns = sides(pieces, along)
    joined = torch.empty(rows, columns, dtype=dtype, device=pieces[0].device)
    transposed = torch.empty(columns, rows, dtype=dtype, device=pieces[0].device)
    row = column = 0  # where the next piece begins
    for piece, scale in zip(pieces, scales, strict=True):
        x = piece if piece.stride(1) == 1 else piece.contiguous()
        grid = (triton.cdiv(x.shape[0], TILE), triton.cdiv(x.shape[1], TILE))
        # Where it begins is a number beside the whole result: the compiler copies what is written to through a view.
        torch.library.wrap_triton(_cast_piece)[grid](
            x,
            scale,
            joined,
            transposed,
            x.shape[0],
            x.shape[1],
            x.stride(0),
            columns,
            rows,
            row * columns + column,
            column * rows + row,
            MOST=torch.finfo(dtype).max,
            TILE=TILE,
            num_warps=4,
        )
        row, column = (row + x.shape[0], 0) if along == 0 else (0, column + x.shape[1])
    return joined, transposed


def sides(pieces: list[Tensor], along: int) -> tuple[int, int]:
    """Rows and columns of the pieces put together."""
    rows, columns = pieces[0].shape
    if along == 0:
        return sum(piece.shape[0] for piece in pieces), columns
    return rows, sum(piece.shape[1] for piece in pieces)


@triton.jit
def _cast_piece(  # type: ignore[no-untyped-def]
    x, scale, cast, transposed, rows, columns, stride, cast_stride, transposed_stride, at, transposed_at,
    MOST: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    c = tl.program_id(1).to(tl.int64) * TILE + tl.arange(0, TILE)
    there = (r[:, None] < rows) & (c[None, :] < columns)
    tile = tl.load(x + r[:, None] * stride + c[None, :], mask=there, other=0.0).to(tl.float32)
    tile = tl.minimum(tl.maximum(tile * tl.load(scale), -MOST), MOST).to(cast.dtype.element_ty)
    tl.store(cast + at + r[:, None] * cast_stride + c[None, :], tile, mask=there)
    across = (c[:, None] < columns) & (r[None, :] < rows)
    if x.dtype.element_ty == tl.float32:
        # Turned, such a tile came out wrong (Triton 3.6, launched alone, rows a multiple of 16): it is read again.
        turned = tl.load(x + r[None, :] * stride + c[:, None], mask=across, other=0.0)
        turned = tl.minimum(tl.maximum(turned * tl.load(scale), -MOST), MOST).to(cast.dtype.element_ty)
    else:
        turned = tl.trans(tile)
    tl.store(transposed + transposed_at + c[:, None] * transposed_stride + r[None, :], turned, mask=across)
