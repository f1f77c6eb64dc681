"""Softmax attention with grouped key and value heads: what it weighs and costs. `shoal.model.attention` computes it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.spec.mixers.weight import Weight, linear

if TYPE_CHECKING:
    from shoal.spec.shape import Shape

SHARES_SEQUENCES, IN_8_BITS = True, True
ROWS, COLUMNS = 0, 1


def weights(shape: Shape) -> list[Weight]:
    found = [
        *linear("q", shape.q_dim, shape.dim, ROWS, shape.qkv_bias),
        *linear("k", shape.kv_dim, shape.dim, ROWS, shape.qkv_bias),
        *linear("v", shape.kv_dim, shape.dim, ROWS, shape.qkv_bias),
        *linear("out", shape.dim, shape.q_dim, COLUMNS, shape.out_bias),
    ]
    # One for all heads, of which each process sees its own.
    norms = ("q_norm", "k_norm") if shape.qk_norm else ()
    return found + [Weight(f"{name}.weight", (shape.head_dim,), summed=True) for name in norms]


def flops_per_pair(shape: Shape) -> int:
    """Scores and their mixture: 2 products forwards, 4 backwards."""
    return 12 * shape.q_dim


def flops_per_token(shape: Shape) -> int:
    return 0


def gathered(shape: Shape) -> tuple[int, ...]:
    return (shape.dim,)


def widths(shape: Shape) -> dict[str, int]:
    return {"model.heads": shape.heads, "model.kv_heads": shape.kv_heads}
