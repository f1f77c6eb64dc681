"""Multi-head latent attention (arXiv:2405.04434): what it weighs and costs. `shoal.model.mla` computes it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shoal.spec.mixers.weight import Weight, linear
from shoal.spec.model import Mla

if TYPE_CHECKING:
    from shoal.spec.shape import Shape

SHARES_SEQUENCES, IN_8_BITS = True, False
ROWS, COLUMNS = 0, 1


def weights(shape: Shape) -> list[Weight]:
    """What makes the short vectors is held whole: each process applies it to its own stretch of the tokens."""
    m, bias = of(shape), shape.qkv_bias
    queries = linear("q", shape.q_dim, shape.dim, ROWS)
    if m.q_lora_rank is not None:
        queries = _whole([*linear("q_a", m.q_lora_rank, shape.dim, None, bias), _norm("q_norm", m.q_lora_rank)])
        queries += linear("q_b", shape.q_dim, m.q_lora_rank, ROWS)
    short = linear("kv_a", m.kv_lora_rank + m.qk_rope_head_dim, shape.dim, None, bias)
    return [
        *queries,
        *_whole([*short, _norm("kv_norm", m.kv_lora_rank)]),
        *linear("kv_b", shape.heads * (m.qk_nope_head_dim + m.v_head_dim), m.kv_lora_rank, ROWS),
        *linear("out", shape.dim, shape.heads * m.v_head_dim, COLUMNS, shape.out_bias),
    ]


def _norm(name: str, width: int) -> Weight:
    return Weight(f"{name}.weight", (width,))


def _whole(weights: list[Weight]) -> list[Weight]:
    return [replace(weight, summed=True) for weight in weights]


def flops_per_pair(shape: Shape) -> int:
    """Scores, and the mixture of values that are narrower: 2 products forwards, 4 backwards."""
    return 6 * shape.heads * (shape.head_dim + of(shape).v_head_dim)


def flops_per_token(shape: Shape) -> int:
    return 0


def widths(shape: Shape) -> dict[str, int]:
    return {"model.heads": shape.heads}


def gathered(shape: Shape) -> tuple[int, ...]:
    m = of(shape)
    return (m.q_lora_rank or shape.dim, m.kv_lora_rank, m.qk_rope_head_dim)


def of(shape: Shape) -> Mla:
    assert shape.mla is not None, "a layer with this mixer is in a shape that has one"
    return shape.mla
