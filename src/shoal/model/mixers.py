"""The mixers that a block can have, by the kinds of `shoal.spec.mixers`: how each is built, and what it reads.

A mixer is a module that turns x [batch, seq, dim] into as much again, in which tokens know of those before them in
their own document:

    y = mixer(x, beside)

`beside` is a tuple of what it reads besides x; it is made once in a forward pass for all layers of the kind. A mixer
ends with a product called `out`, which writes to the residual stream. It says nothing of processes: its sharding stands
in `shoal.parallel.tensor`, its counts and sizes in `shoal.spec.mixers`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from shoal.model import attention, mamba
from shoal.model.attention import Attention
from shoal.model.mamba import Mamba
from shoal.model.mla import LatentAttention
from shoal.spec.shape import Shape

if TYPE_CHECKING:
    from shoal.model.decoder import Decoder

OfLayer = Callable[[int], tuple[Any, ...]]  # what the mixer of a layer reads beside its input


@dataclass(frozen=True)
class Mixer:
    build: Callable[[Shape], nn.Module]
    beside: Callable[[Decoder, Tensor, Tensor | None], OfLayer]  # of positions and documents, [batch, seq] of all
    starts: Mapping[str, Callable[[Tensor], Tensor]]  # of parameters that no rule of `model.init` is about


MIXERS = {
    "attention": Mixer(Attention, attention.beside, {}),
    "mamba": Mixer(Mamba, mamba.beside, mamba.STARTS),
    "mla": Mixer(LatentAttention, attention.beside, {}),
}


def attentions(decoder: Decoder) -> Iterator[Attention | LatentAttention]:
    """Those of its mixers that attend."""
    for block in decoder.blocks.values():
        if isinstance(block.mixer, Attention | LatentAttention):
            yield block.mixer
