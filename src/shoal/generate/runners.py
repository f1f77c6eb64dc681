"""Which way of computing fits a model and a machine."""

from __future__ import annotations

from shoal.errors import UsageError
from shoal.generate.dense import Dense
from shoal.generate.runner import Runner
from shoal.generate.whole import Whole
from shoal.model.decoder import Decoder
from shoal.model.exact import apply
from shoal.model.mixers import MIXERS
from shoal.model.own_model import OwnModel


def runner_for(model: Decoder, places: int, context: int | None, exact: bool, alone: bool = False) -> Runner:
    """`alone`: the model is nobody else's, and its weights may be laid out anew."""
    most = model.shape.max_seq_len
    if context is not None and not 1 <= context <= most:
        raise UsageError(f"context is {context:,}, but the model was made for 1 to {most:,} tokens.")
    context = context or most
    if exact:
        apply(model)  # which refuses what has no such mode
    if not cached(model):
        return Whole(model, context)
    return Dense(model, places, context, exact, alone)


def cached(model: Decoder) -> bool:
    """Whether what was computed of a text stays right when it goes on."""
    if isinstance(model, OwnModel):
        return False  # nothing is known of what it keeps
    if any(getattr(block, "kind", None) not in MIXERS for block in model.blocks.values()):
        return False
    scaling = model.shape.rope_scaling
    return scaling is None or scaling.kind != "dynamic"  # whose angles change with the length
