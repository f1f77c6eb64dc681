"""Which way of computing fits a model and a machine."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.errors import UsageError
from shoal.generate.dense import Dense
from shoal.generate.paged import unfit
from shoal.generate.runner import Runner
from shoal.generate.whole import Whole
from shoal.model.decoder import Decoder
from shoal.model.exact import apply
from shoal.model.mixers import MIXERS
from shoal.model.own_model import OwnModel


@dataclass(frozen=True)
class Wanted:
    places: int
    context: int | None = None
    """None: what the model was made for."""
    exact: bool = False
    eight_bits: bool = False
    vocabulary: int | None = None
    """So many tokens may be drawn."""
    alone: bool = False
    """The model is nobody else's, and its weights may be laid out anew."""


def runner_for(model: Decoder, wanted: Wanted) -> Runner:
    most = model.shape.max_seq_len
    if wanted.context is not None and not 1 <= wanted.context <= most:
        raise UsageError(f"context is {wanted.context:,}, but the model was made for 1 to {most:,} tokens.")
    context = wanted.context or most
    if wanted.eight_bits and (why := no_eight_bits(model, wanted.exact)):
        raise UsageError(f"weights of 8 bits are {why}.")
    if wanted.exact:
        apply(model)  # which refuses what has no such mode
    if not cached(model):
        return Whole(model, context)
    if next(model.parameters()).is_cuda and unfit(model) is None:
        from shoal.generate.graphs import Graphed

        return Graphed(
            model,
            wanted.places,
            context,
            exact=wanted.exact,
            vocabulary=wanted.vocabulary,
            eight_bits=wanted.eight_bits,
        )
    return Dense(model, wanted.places, context, wanted.exact, wanted.alone)


def no_eight_bits(model: Decoder, exact: bool) -> str | None:
    """What stands against them; None: nothing."""
    from shoal.generate.joined import fits, runs_here

    if not next(model.parameters()).is_cuda:
        return "for a GPU, and nothing here computes with them on a processor: leave eight_bits out"
    if exact:
        return "other weights than the trainer's, so nothing is exact with them: leave one of the two out"
    if not fits(model) or not runs_here(model):
        return "for models whose layers all attend, with Triton's kernels"
    return None


def cached(model: Decoder) -> bool:
    """Whether what was computed of a text stays right when it goes on."""
    if isinstance(model, OwnModel):
        return False  # nothing is known of what it keeps
    if any(getattr(block, "kind", None) not in MIXERS for block in model.blocks.values()):
        return False
    scaling = model.shape.rope_scaling
    return scaling is None or scaling.kind != "dynamic"  # whose angles change with the length
