"""Boxes: how tensors are cut, and how a manifest with a hole is told from a whole one."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.checkpoint.grids import Held, pieces, tiles

shapes = st.lists(st.integers(1, 5), max_size=3).map(tuple)
quick = settings(max_examples=60, deadline=None)  # the machine may be busy


@quick
@given(shapes, st.sampled_from([1, 2, 4, 8]), st.integers(1, 200))
def test_pieces_cover_a_box_once_within_the_limit(shape: tuple[int, ...], item_bytes: int, limit: int) -> None:
    zeros = (0,) * len(shape)
    cut = list(pieces(Held(zeros, shape, zeros), item_bytes, limit))
    assert tiles(shape, [(p.offset, p.shape) for p in cut])
    whole = torch.arange(math.prod(shape)).reshape(shape)
    for p in cut:
        assert math.prod(p.shape) * item_bytes <= max(limit, item_bytes)
        assert p.offset == p.start
        numbers = whole[tuple(slice(o, o + n) for o, n in zip(p.offset, p.shape, strict=True))].flatten()
        assert torch.equal(numbers, numbers[0] + torch.arange(numbers.numel())), "contiguous in the tensor"


@quick
@given(shapes, st.integers(1, 40), st.randoms(use_true_random=False))
def test_a_hole_or_an_overlap_is_noticed(shape: tuple[int, ...], limit: int, rng) -> None:  # type: ignore[no-untyped-def]
    zeros = (0,) * len(shape)
    boxes = [(p.offset, p.shape) for p in pieces(Held(zeros, shape, zeros), 1, limit)]
    rng.shuffle(boxes)
    assert tiles(shape, boxes)
    assert not tiles(shape, boxes[1:])
    assert not tiles(shape, [*boxes, boxes[0]])
    twice = [*boxes[1:], boxes[-1]]
    assert len(boxes) == 1 or not tiles(shape, twice)


def test_boxes_out_of_bounds_or_of_another_rank_are_no_cover() -> None:
    assert not tiles((4,), [((2,), (4,))])
    assert not tiles((4,), [((-1,), (4,))])
    assert not tiles((2, 2), [((0,), (4,))])
    assert tiles((0, 3), [])
    assert tiles((), [((), ())])
    assert not tiles((), [])
