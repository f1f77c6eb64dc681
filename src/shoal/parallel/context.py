"""Context parallelism: several processes share each sequence, for sequences too long for one.

Everything but attention looks at tokens one by one and needs no change. Two ways of attention are offered:

    all_to_all   a process attends with a share of the heads to all tokens; two exchanges a block; key and value heads
                 must divide by the processes
    ring         a process attends with its tokens to all others', as they come around; any number of heads, and
                 memory for a share of the sequence only

`split` puts either in the place of the decoder's seams, `cut` takes a process's part of a batch. `documents` stay
whole: who may see whom needs the whole row.
"""

from __future__ import annotations

from functools import partial
from typing import Literal, TypeVar

import numpy as np
import torch

from shoal.errors import SpecError
from shoal.model.decoder import Decoder
from shoal.model.mixers import attentions
from shoal.parallel import all_to_all, pairs, ring
from shoal.parallel.place import Place

Method = Literal["ring", "all_to_all"]
Array = TypeVar("Array", np.ndarray, torch.Tensor)


def split(decoder: Decoder, place: Place, method: Method) -> None:
    """Make a decoder attend over the sequence it shares; nothing happens where nobody shares one."""
    size, index = place.sizes.cp, place.at["cp"]
    if size == 1:
        return
    _check(decoder, place, method)
    assert place.context is not None, "a place with cp above 1 has a group for it"
    group = place.context.group_name  # operators know groups by name
    if method == "ring":
        decoder.mask = partial(pairs.plan, size=size, index=index)
        attend = partial(ring.attend, group=group)
    else:
        decoder.mask = partial(all_to_all.mask, size=size)
        attend = partial(all_to_all.attend, group=group, size=size)
    for attention in attentions(decoder):
        attention.attend = attend


def cut(whole: Array, place: Place, method: Method, dim: int = 1) -> Array:
    """This process's part of tokens, targets or positions [batch, seq]."""
    size, index = place.sizes.cp, place.at["cp"]
    if size == 1:
        return whole
    at = indices(whole.shape[dim], size, index, method)
    if isinstance(whole, np.ndarray):
        return whole.take(at, axis=dim)
    return whole.index_select(dim, torch.from_numpy(at).to(whole.device))


def indices(seq: int, size: int, index: int, method: Method) -> np.ndarray:
    """Which tokens of a sequence process `index` of `size` holds, in its order."""
    pieces = 2 * size if method == "ring" else size
    if seq % pieces:
        raise SpecError(
            f"data.seq_len ({seq}) is no multiple of {pieces}, into which mesh.cp {size} with {method} cuts it: "
            f"set it to {max(1, round(seq / pieces)) * pieces}."
        )
    parts = np.arange(seq).reshape(pieces, -1)
    return parts[list(pairs.chunks(size, index))].reshape(-1) if method == "ring" else parts[index]


def _check(decoder: Decoder, place: Place, method: Method) -> None:
    shape, size, tp = decoder.shape, place.sizes.cp, place.sizes.tp
    if method == "all_to_all" and shape.kv_heads // tp % size:
        raise SpecError(
            f"mesh.cp {size} with all_to_all deals out the {shape.kv_heads // tp} key and value heads of a process, "
            "which do not divide: set mesh.cp_method to ring."
        )
    if shape.rope_scaling is not None and shape.rope_scaling.kind == "dynamic":
        raise SpecError(
            "model.rope_scaling dynamic stretches by the length of a row, which no process knows that shares it: "
            "set mesh.cp to 1, or scale by yarn."
        )
