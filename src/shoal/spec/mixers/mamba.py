"""A selective state space, Mamba-2 (arXiv:2405.21060): what it weighs and costs. `shoal.model.mamba` computes it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.spec.mixers.weight import Weight, linear
from shoal.spec.model import Mamba

if TYPE_CHECKING:
    from shoal.spec.shape import Shape

SHARES_SEQUENCES, IN_8_BITS = False, False
ROWS, COLUMNS = 0, 1
CHUNK = 128  # tokens that are computed as one product: what is held grows with it, and the states with its inverse


def weights(shape: Shape) -> list[Weight]:
    m = of(shape)
    inner, states, heads = inner_dim(m), m.groups * m.state_dim, m.heads
    # One group serves the heads of all processes, so each holds it whole; several are dealt out with their heads.
    one = m.groups == 1
    groups = None if one else ROWS
    products = [
        *linear("gate", inner, shape.dim, ROWS, m.proj_bias),
        *linear("x", inner, shape.dim, ROWS, m.proj_bias),
        *linear("b", states, shape.dim, groups, m.proj_bias),
        *linear("c", states, shape.dim, groups, m.proj_bias),
        *linear("dt", heads, shape.dim, ROWS, m.proj_bias),
    ]
    convolutions = []
    for name, channels, cut in (("x_conv", inner, ROWS), ("b_conv", states, groups), ("c_conv", states, groups)):
        convolutions.append(Weight(f"{name}.weight", (channels, m.conv_width), cut))
        convolutions += [Weight(f"{name}.bias", (channels,), cut)] if m.conv_bias else []
    shared = ("b.", "c.", "b_conv.", "c_conv.")
    found = [
        Weight(w.name, w.dims, w.cut, summed=one and w.name.startswith(shared), product=w.product)
        for w in [*products, *convolutions]
    ]
    per_head = [Weight(name, (heads,), ROWS) for name in ("dt_bias", "a_log", "d")]
    norm = Weight("norm.weight", (inner,), ROWS)
    return [*per_head, *found, norm, *linear("out", shape.dim, inner, COLUMNS, m.proj_bias)]


def flops_per_pair(shape: Shape) -> int:
    return 0


def flops_per_token(shape: Shape) -> int:
    """The state's update and reading, 7 for each number of it as Megatron counts them, and the convolution; three times
    that with the backward pass."""
    m = of(shape)
    inner = inner_dim(m)
    return 3 * (7 * inner * m.state_dim + 2 * m.conv_width * (inner + 2 * m.groups * m.state_dim))


def gathered(shape: Shape) -> tuple[int, ...]:
    return (shape.dim,)


def widths(shape: Shape) -> dict[str, int]:
    m = of(shape)
    return {"model.mamba.heads": m.heads} | ({"model.mamba.groups": m.groups} if m.groups > 1 else {})


def of(shape: Shape) -> Mamba:
    assert shape.mamba is not None, "a layer with this mixer is in a shape that has one"
    return shape.mamba


def inner_dim(m: Mamba) -> int:
    return m.heads * int(m.head_dim)
