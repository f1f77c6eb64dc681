"""The decoder: Llama 2 and 3, Qwen 2 and 3, Mistral and the others of `shoal.spec.families` are settings of this one.

Plain PyTorch: no parallelism here. FSDP and DDP wrap it from outside and fire on `forward`, which is therefore the
only way in: tokens to logits, or tokens and targets to the summed loss. What cannot be wrapped has a seam, a plain
function that `shoal.parallel` may put another in the place of: `Decoder.mask`, `Attention.attend`, `Head.loss`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from shoal.errors import SpecError
from shoal.model.attention import attention_mask
from shoal.model.feed_forward import FeedForward
from shoal.model.head import Head
from shoal.model.init import init_weights
from shoal.model.mixers import MIXERS
from shoal.model.moe import MixtureOfExperts
from shoal.model.norm import norm_of
from shoal.model.rope import Rope, sliding_rope
from shoal.spec.shape import Shape


class Block(nn.Module):
    """A mixer, in which tokens learn of each other, and a feed-forward, which looks at them one by one.

    The mixer is held under the name of its kind, so that parameters in checkpoints say what they are of.
    """

    starts: ClassVar[Mapping[str, Callable[[Tensor], Tensor]]] = {}
    """Of a block of somebody's own: start values by the last part of a parameter's name, each made of numbers spread
    evenly over [0, 1). Matrices that are not named here are drawn as `up` is, biases are zero and norms one."""

    def __init__(self, shape: Shape, layer: int) -> None:
        super().__init__()
        self.kind = shape.mixer(layer)
        self.add_module(f"{self.kind}_norm", norm_of(shape, shape.dim))
        self.add_module(self.kind, MIXERS[self.kind].build(shape))
        self.ffn_norm = norm_of(shape, shape.dim)
        self.ffn = (
            MixtureOfExperts(shape)
            if shape.sparse(layer)
            else FeedForward(shape.dim, shape.ffn_dim, shape.mlp_bias, shape.about.act)
        )
        self.post_norms = shape.about.post_norms
        if self.post_norms:
            self.add_module(f"{self.kind}_post_norm", norm_of(shape, shape.dim))
            self.ffn_post_norm = norm_of(shape, shape.dim)

    @property
    def mixer(self) -> nn.Module:
        found: nn.Module = getattr(self, self.kind)
        return found

    @property
    def mixer_norm(self) -> nn.Module:
        found: nn.Module = getattr(self, f"{self.kind}_norm")
        return found

    @property
    def mixer_post_norm(self) -> nn.Module:
        found: nn.Module = getattr(self, f"{self.kind}_post_norm")
        return found

    def forward(self, x: Tensor, beside: tuple[Any, ...], *padding: Tensor) -> Tensor:
        """`beside`: what the mixer reads (`shoal.model.mixers`). `padding`: for a mixture of experts, where some tokens
        are."""
        if self.post_norms:
            x = x + self.mixer_post_norm(self.mixer(self.mixer_norm(x), beside))
            return x + self.ffn_post_norm(self.ffn(self.ffn_norm(x), *padding))
        x = x + self.mixer(self.mixer_norm(x), beside)
        return x + self.ffn(self.ffn_norm(x), *padding)  # [batch, seq, dim]


class BlockTimer(Protocol):
    """Told when a block begins and when it has ended."""

    def enter(self) -> None: ...
    def leave(self) -> None: ...


class Decoder(nn.Module):
    """The whole model, or the stretch of it that one pipeline stage holds.

    A stretch's parameters have the names that they have in the whole. Block 0 brings the embedding with it, the last
    block the norm and the head; where the head is tied, a last stretch has a copy of the embedding for it.
    """

    def __init__(self, shape: Shape, layers: range | None = None, block: type[Block] = Block) -> None:
        """`block`: what it is made of, of somebody's own."""
        super().__init__()
        _check(shape)
        layers = range(shape.layers) if layers is None else layers
        self.shape, self.layers = shape, layers
        self.kinds = tuple(dict.fromkeys(shape.mixer(i) for i in layers))
        self.first, self.last = 0 in layers, shape.layers - 1 in layers
        self.rope, self.sliding_rope = Rope(shape), sliding_rope(shape)
        self.embed_scale = math.sqrt(shape.dim) if shape.about.scaled_embedding else 1.0
        self.mask: Callable[..., Any] = attention_mask
        self.stretch: Callable[[Tensor], Tensor] = whole  # of [batch, seq]: the tokens whose hidden states are here
        self.passes: Callable[[Tensor], None] | None = None  # told of what each block gives
        self.timer: BlockTimer | None = None
        if self.first or (self.last and shape.tie_embeddings):
            self.embed = nn.Embedding(shape.vocab_size, shape.dim)
        self.blocks = nn.ModuleDict({str(i): block(shape, i) for i in layers})
        if self.last:
            self.norm = norm_of(shape, shape.dim)
            self.head = Head(shape)

    def forward(
        self,
        x: Tensor,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        targets: Tensor | None = None,
        padding: Tensor | None = None,
    ) -> Tensor:
        """Tokens [batch, seq] to logits [batch, seq, vocab], or with targets to the sum of cross-entropy over those
        that are not -100.

        Without positions a row counts from 0; without documents it is one document. `padding` [batch, seq] says which
        tokens only fill a row: a mixture of experts leaves them out of its counts. A stretch that does not begin the
        model takes the hidden states [batch, seq, dim] of the one before it; one that does not end it gives its own.
        """
        hidden = self.hidden(x, positions, documents, padding)
        if not self.last:
            return hidden
        tied = self.embed.weight if self.shape.tie_embeddings else None
        return self.head(hidden, tied, targets)

    def hidden(
        self,
        x: Tensor,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        padding: Tensor | None = None,
    ) -> Tensor:
        """What the head, or the next stretch, reads: [batch, seq, dim]."""
        # Tensor parallelism cuts hidden states along the sequence, so between stretches only positions know its length.
        seq, device = x.shape[1] if positions is None else positions.shape[1], x.device
        if positions is None:
            positions = torch.arange(seq, device=device)[None]
        # Made once and shared by all blocks of a kind.
        beside = {kind: MIXERS[kind].beside(self, positions, documents) for kind in self.kinds}
        if self.first:
            x = self.embed(x)  # [batch, seq, dim]
            if self.embed_scale != 1.0:
                x = x * self.embed_scale
            if torch.is_autocast_enabled(device.type):
                x = x.to(torch.get_autocast_dtype(device.type))  # and so all that is added to it
        fill = () if padding is None else (self.stretch(padding),)
        for i, block in zip(self.layers, self.blocks.values(), strict=True):
            if self.timer is not None:
                self.timer.enter()
            x = block(x, beside[self.shape.mixer(i)](i), *(fill if self.shape.sparse(i) else ()))
            if self.timer is not None:
                self.timer.leave()
            if self.passes is not None:
                self.passes(x)
        return self.norm(x) if self.last else x

    def init_weights(self, seed: int) -> None:
        """Fill every parameter, sharded or not, with numbers that depend on the seed and its name alone."""
        init_weights(self, self.shape, seed)


def whole(part: Tensor) -> Tensor:
    return part


def _check(shape: Shape) -> None:
    """What no Decoder can be built from. The spec says the same earlier; a Shape may come from elsewhere."""
    if shape.heads % shape.kv_heads:
        raise SpecError(f"model.heads ({shape.heads}) is no multiple of model.kv_heads ({shape.kv_heads}).")
    if shape.mla is None and shape.head_dim % 2:
        raise SpecError(f"model.head_dim ({shape.head_dim}) is odd, and rotary positions turn pairs.")
