"""FLOPs are those that the model's own operations have: no more, so that no utilisation is above 100%."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from shoal.data.windows import Batch
from shoal.model.attention import attention_mask
from shoal.model.decoder import Decoder
from shoal.spec.flops import seen_pairs, step_flops
from shoal.spec.model import Model
from shoal.spec.shape import Shape, shape_of

SEQ = 48
MODES = ("none", "selective", "attention", "full")
SMALL = {"dim": 32, "layers": 3, "heads": 4, "kv_heads": 4, "ffn_dim": 64, "vocab_size": 128}
SHAPES: dict[str, dict[str, Any]] = {
    "dense": {},
    "grouped heads": {"kv_heads": 2, "head_dim": 16},
    "tied head": {"tie_embeddings": True},
    "experts": {"experts": {"count": 4, "top_k": 2, "ffn_dim": 32, "shared": 1, "dense_layers": 1}},
    "sliding window": {"sliding_window": 7, "full_attention_layers": 1},
}


def shape(name: str) -> Shape:
    return shape_of(Model.model_validate({**SMALL, **SHAPES[name]}))


def packed(rows: int = 3, seed: int = 0) -> Batch:
    """Windows of several documents each, one of them a single document."""
    rng = np.random.default_rng(seed)
    positions, documents = np.empty((rows, SEQ), np.int64), np.empty((rows, SEQ), np.int32)
    for row in range(rows):
        cuts = [] if row == 0 else sorted(rng.choice(np.arange(1, SEQ), 4, replace=False).tolist())
        for number, (a, b) in enumerate(zip([0, *cuts], [*cuts, SEQ], strict=True)):
            positions[row, a:b], documents[row, a:b] = np.arange(b - a), number
    tokens = rng.integers(0, 128, (rows, SEQ))
    return Batch(tokens, tokens, positions, documents)


@pytest.mark.parametrize("name", SHAPES)
def test_pairs_are_those_that_the_masks_let_through(name: str) -> None:
    batch, of = packed(), shape(name)
    assert sorted(batch.lengths.tolist())[-1] == SEQ
    assert batch.lengths.sum() == batch.tokens.size
    let_through = 0
    for layer in range(of.layers):
        window = of.sliding_window if layer >= of.full_attention_layers else None
        mask = attention_mask(torch.from_numpy(batch.documents), SEQ, window, torch.device("cpu"))
        assert mask is not None
        let_through += int(mask.sum())
    assert seen_pairs(of, batch.lengths) == let_through


@pytest.mark.parametrize("name", SHAPES)
def test_flops_are_those_that_torch_counts_and_attention_never_more(name: str) -> None:
    """The products to the number. Of attention torch counts whole squares: of a document by itself twice our triangle
    but for the diagonal, and of packed documents far more than there is to do."""
    batch, of = packed(), shape(name)
    pairs = seen_pairs(of, batch.lengths)
    products, squares = _counted_by_torch(of, [batch])
    flops, attention = step_flops(of, batch.tokens.size, pairs), 12 * of.q_dim * pairs
    assert flops.model - attention == products
    alone = [_window(batch, row, a, b) for row, a, b in _stretches(batch)]
    _, own_squares = _counted_by_torch(of, alone)
    assert attention < own_squares < squares
    if of.sliding_window is None:
        assert own_squares == 2 * attention - 12 * of.q_dim * of.layers * batch.tokens.size
    assert flops.model < flops.hardware < products + squares


def test_recomputation_is_in_hfu_alone() -> None:
    batch, of = packed(), shape("dense")
    pairs = seen_pairs(of, batch.lengths)
    modes = {
        mode: step_flops(of, batch.tokens.size, pairs, mode) for mode in ("none", "selective", "attention", "full")
    }
    assert len({flops.model for flops in modes.values()}) == 1
    assert modes["none"].hardware == modes["selective"].hardware < modes["attention"].hardware < modes["full"].hardware


@pytest.mark.parametrize("name", ["dense", "experts"])
def test_what_full_recomputation_does_again_is_what_torch_counts(name: str) -> None:
    from shoal.parallel.recompute import apply

    batch, of = packed(), shape(name)
    plain, _ = _counted_by_torch(of, [batch])
    again, _ = _counted_by_torch(of, [batch], lambda decoder: apply(decoder, "full"))
    pairs = seen_pairs(of, batch.lengths)
    full, attention = (step_flops(of, batch.tokens.size, pairs, mode) for mode in ("full", "attention"))
    none = step_flops(of, batch.tokens.size, pairs)
    assert again - plain == attention.hardware - none.hardware
    assert full.hardware - attention.hardware == 4 * of.q_dim * pairs


def test_a_long_window_of_short_documents_is_a_small_part_of_its_square() -> None:
    """128k tokens of documents of 1,000: counting the square would say 40 times as much attention."""
    of = shape("dense")
    whole = seen_pairs(of, np.array([131_072]))
    short = seen_pairs(of, np.full(131, 1000))
    assert 120 < whole / short < 140


def _counted_by_torch(of: Shape, batches: list[Batch], change: Any = lambda decoder: None) -> tuple[int, int]:
    """FLOPs of products, and of attention, forwards and backwards."""
    decoder = Decoder(of)
    decoder.init_weights(0)
    change(decoder)
    # Plain products for attention: torch does not count the CPU's fused kernel.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        for batch in batches:
            tokens, positions, documents, targets = (
                torch.from_numpy(a) for a in (batch.tokens, batch.positions, batch.documents, batch.targets)
            )
            decoder(tokens, positions, documents, targets).backward()
    by_operator = counter.get_flop_counts()["Global"]
    tokens = sum(batch.tokens.size for batch in batches)
    sparse = sum(of.sparse(layer) for layer in range(of.layers))
    # Results of experts are weighed by a product with the router's scores, which is no matrix of the model.
    weighed = 6 * tokens * of.dim * of.experts.top_k * sparse if of.experts else 0
    return by_operator[torch.ops.aten.mm], by_operator[torch.ops.aten.bmm] - weighed


def _stretches(batch: Batch) -> list[tuple[int, int, int]]:
    found = []
    for row in range(len(batch.tokens)):
        cuts = [*np.flatnonzero(batch.positions[row] == 0).tolist(), SEQ]
        found += [(row, a, b) for a, b in pairwise(cuts)]
    return found


def _window(batch: Batch, row: int, a: int, b: int) -> Batch:
    tokens, targets, positions = (x[row : row + 1, a:b] for x in (batch.tokens, batch.targets, batch.positions))
    return Batch(tokens, targets, positions, np.zeros((1, b - a), np.int32))
