"""Casting to 8 bits with a scale for each row, and the transposed copy with one for each column: two readings, one to
find the largest numbers of both and one to cast both ways."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from shoal.kernels.cast import sides

TILE = 128
WARPS = 8  # a tile waits in registers until its second use


@torch.library.triton_op("shoal::largest_joined", mutates_args=())
def largest_joined(pieces: list[Tensor], along: int) -> tuple[Tensor, Tensor]:
    """The largest absolute number (float32) of each row and of each column of the pieces (matrices) put together
    `along` rows (0) or columns (1). What is NaN counts as infinite."""
    rows, columns = sides(pieces, along)
    down = [triton.cdiv(piece.shape[0], TILE) for piece in pieces]
    across = [triton.cdiv(piece.shape[1], TILE) for piece in pieces]
    # One number a row, or column, of each tile: the little that is left is for the compiler to reduce.
    by_row = torch.empty(across[0] if along == 0 else sum(across), rows, dtype=torch.float32, device=pieces[0].device)
    by_column = torch.empty(sum(down) if along == 0 else down[0], columns, dtype=torch.float32, device=pieces[0].device)
    row = column = tile = 0  # where the next piece begins, and its tiles
    for i, piece in enumerate(pieces):
        x = piece if piece.stride(1) == 1 else piece.contiguous()
        torch.library.wrap_triton(_largest_piece)[down[i], across[i]](
            x,
            by_row,
            by_column,
            x.shape[0],
            x.shape[1],
            x.stride(0),
            rows,
            columns,
            row if along == 0 else tile * rows,
            tile * columns if along == 0 else column,
            TILE=TILE,
            num_warps=WARPS,
        )
        row, column, tile = row + x.shape[0], column + x.shape[1], tile + (down if along == 0 else across)[i]
    return by_row.amax(0), by_column.amax(0)


@torch.library.triton_op("shoal::cast_joined_by_rows", mutates_args=())
def cast_joined_by_rows(
    pieces: list[Tensor], by_row: Tensor, by_column: Tensor, dtype: torch.dtype, along: int
) -> tuple[Tensor, Tensor]:
    """The pieces put together, each row times its scale (float32), in an 8-bit type; and the transpose of them with
    each column times its scale, both contiguous."""
    rows, columns = sides(pieces, along)
    joined = torch.empty(rows, columns, dtype=dtype, device=pieces[0].device)
    transposed = torch.empty(columns, rows, dtype=dtype, device=pieces[0].device)
    row = column = 0  # where the next piece begins
    for piece in pieces:
        x = piece if piece.stride(1) == 1 else piece.contiguous()
        # Where it begins is a number beside the whole: the compiler copies what is written to through a view.
        torch.library.wrap_triton(_cast_piece)[triton.cdiv(x.shape[0], TILE), triton.cdiv(x.shape[1], TILE)](
            x,
            by_row,
            by_column,
            joined,
            transposed,
            x.shape[0],
            x.shape[1],
            x.stride(0),
            rows,
            columns,
            row,
            column,
            MOST=torch.finfo(dtype).max,
            TILE=TILE,
            num_warps=WARPS,
        )
        row, column = (row + x.shape[0], 0) if along == 0 else (0, column + x.shape[1])
    return joined, transposed


@triton.jit
def _largest_piece(  # type: ignore[no-untyped-def]
    x, by_row, by_column, rows, columns, stride, all_rows, all_columns, row_at, column_at, TILE: tl.constexpr,
):  # fmt: skip
    i, j = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    r = i * TILE + tl.arange(0, TILE)
    c = j * TILE + tl.arange(0, TILE)
    there = (r[:, None] < rows) & (c[None, :] < columns)
    tile = tl.abs(tl.load(x + r[:, None] * stride + c[None, :], mask=there, other=0.0).to(tl.float32))
    # A maximum passes over what is not finite, and the product would come out as if nothing were wrong.
    tile = tl.where(tile == tile, tile, float("inf"))
    tl.store(by_row + row_at + j * all_rows + r, tl.max(tile, 1), mask=r < rows)
    tl.store(by_column + column_at + i * all_columns + c, tl.max(tile, 0), mask=c < columns)


@triton.jit
def _cast_piece(  # type: ignore[no-untyped-def]
    x, by_row, by_column, cast, transposed, rows, columns, stride, all_rows, all_columns, row, column,
    MOST: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    c = tl.program_id(1).to(tl.int64) * TILE + tl.arange(0, TILE)
    there = (r[:, None] < rows) & (c[None, :] < columns)
    tile = tl.load(x + r[:, None] * stride + c[None, :], mask=there, other=0.0).to(tl.float32)
    scaled = tile * tl.load(by_row + row + r, mask=r < rows, other=0.0)[:, None]
    scaled = tl.minimum(tl.maximum(scaled, -MOST), MOST).to(cast.dtype.element_ty)
    tl.store(cast + (row + r[:, None]) * all_columns + column + c[None, :], scaled, mask=there)
    across = (c[:, None] < columns) & (r[None, :] < rows)
    of_column = tl.load(by_column + column + c, mask=c < columns, other=0.0)
    if x.dtype.element_ty == tl.float32:  # as in shoal.kernels.cast
        scaled = tl.load(x + r[None, :] * stride + c[:, None], mask=across, other=0.0) * of_column[:, None]
        turned = tl.minimum(tl.maximum(scaled, -MOST), MOST).to(cast.dtype.element_ty)
    else:
        scaled = tile * of_column[None, :]
        turned = tl.trans(tl.minimum(tl.maximum(scaled, -MOST), MOST).to(cast.dtype.element_ty))
    tl.store(transposed + (column + c[:, None]) * all_rows + row + r[None, :], turned, mask=across)
