"""Training FLOPs of a decoder, counted from the documents that were trained on. No torch.

A product of matrices costs 2 FLOPs for each multiplication: 6 a token and matrix parameter, forwards and backwards.
Attention costs 12 FLOPs for each number of a query and each token that it sees: a token sees those before it in its own
document, itself included, and no more than a sliding window's. What lies between documents or after a token is not
computed for the model's sake, so it is not counted; a kernel may compute some of it (whole blocks at the edges of
documents, or the whole square where it reads a mask), which makes it slower and its utilisation lower, never higher.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shoal.spec.shape import Shape

CONVENTION = "causal, documents apart"


@dataclass(frozen=True)
class Flops:
    model: float  # what the model asks for: MFU
    hardware: float  # with what is computed a second time: HFU


def seen_pairs(shape: Shape, lengths: Any) -> int:
    """Pairs of a token and one that it sees, over all layers. `lengths` (an array of integers): of the stretches of one
    document that windows hold."""
    slides = shape.sliding_layers
    pairs = shape.attending_layers * int(_triangle(lengths).sum())
    if slides:
        beyond = lengths - shape.sliding_window
        pairs -= slides * int(_triangle(beyond * (beyond > 0)).sum())
    return pairs


def step_flops(shape: Shape, tokens: float, pairs: float, recompute: str = "none") -> Flops:
    """Of a step on so many tokens, with `seen_pairs` of them.

    Recomputed (`shoal.parallel.recompute`): `attention` and `full` do a block's products again, but for the last one,
    which no gradient needs (of routed experts the router's does, and a norm's where one follows); `full` does attention
    again. A fused attention kernel always computes its scores a second time backwards: five products, where the model's
    gradient has four.
    """
    pair, mixing = shape.flops_per_pair, shape.mixing_flops_per_token
    model = (6.0 * shape.matrix_params + mixing) * tokens + float(pair) * pairs
    again = pair / 6 * pairs
    if recompute in ("attention", "full"):
        again += 2.0 * tokens * sum(shape.layer_params(n) - _last_product(shape, n) for n in range(shape.layers))
        again += mixing / 3 * tokens
    if recompute == "full":
        again += pair / 3 * pairs
    return Flops(model, model + again)


def _last_product(shape: Shape, layer: int) -> int:
    if shape.about.post_norms:
        return 0
    if shape.experts is not None and shape.sparse(layer):
        return shape.dim * shape.experts.ffn_dim * shape.experts.shared
    return shape.dim * shape.ffn_dim


def _triangle(n: Any) -> Any:
    return n * (n + 1) // 2
