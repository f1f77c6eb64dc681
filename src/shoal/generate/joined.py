"""A decoder of a GPU's decode step: a layer is five kernels.

Products that read the same are one (queries, keys and values; gate and up), a norm is computed in the product that
follows it and a sum in the one before it (`shoal.kernels.decode_products`), positions turn queries and keys where they
attend (`shoal.kernels.paged_decode`). The parts of the model become views of the joined weights, so they lie in memory
once. What is not of this kind (experts, norms after a mixer) is computed by the module itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal import kernels
from shoal.generate.eight_bits import quantised
from shoal.kernels.decode_products import Norm, Weight, gated, product
from shoal.kernels.paged_decode import Pages, Room, Turn, attend_one
from shoal.model.attention import Attention
from shoal.model.decoder import Block, Decoder
from shoal.model.feed_forward import ACTS, FeedForward
from shoal.model.norm import CentredRMSNorm, RMSNorm


@dataclass(frozen=True)
class Layer:
    block: Block
    norm: Norm
    qkv: Weight
    turn: Turn
    window: int | None
    out: Weight
    ffn_norm: Norm
    gate_up: Weight | None  # None: a mixture of experts
    down: Weight | None
    act: str


class Joined:
    def __init__(self, model: Decoder, context: int, eight_bits: bool = False) -> None:
        """`eight_bits`: products of a single text with weights of 8 bits (`shoal.generate.eight_bits`). The model then
        has the same values, with which prompts and batches are computed."""
        assert fits(model)
        self.model, self.shape, self._eight_bits = model, model.shape, eight_bits
        self.summed: Callable[[Tensor], Tensor] | None = None  # over the processes that have parts of each product
        first = next(model.parameters())
        at = torch.arange(context, device=first.device)[None]
        full = [t[0, :, 0].contiguous() for t in model.rope(at)]
        slid = full if model.sliding_rope is None else [t[0, :, 0].contiguous() for t in model.sliding_rope(at)]
        blocks = [block for block in model.blocks.values() if isinstance(block, Block)]
        self.layers = [self._layer(i, block, full, slid) for i, block in zip(model.layers, blocks, strict=True)]
        self.norm = _norm(model.norm)
        head = model.embed.weight if self.shape.tie_embeddings else model.head.weight
        assert head is not None
        self.head = self._weight([head], []) if not self.shape.tie_embeddings or not eight_bits else Weight(head.data)

    def __call__(self, x: Tensor, pages: Sequence[Pages], tables: Tensor, positions: Tensor, room: Room) -> Tensor:
        """Hidden states [rows, dim] of one token each to their logits."""
        width, heads = self.shape.head_dim, pages[0].keys.shape[1]
        for layer, page in zip(self.layers, pages, strict=True):
            qkv = self._product(x, layer.qkv, layer.norm).unflatten(-1, (-1, width))
            q, k, v = qkv.split((qkv.shape[1] - 2 * heads, heads, heads), dim=1)
            scale = layer.block.mixer.score_scale
            assert isinstance(scale, float)
            mixed = attend_one(q, k, v, page, tables, positions, room, scale, layer.window, layer.turn).flatten(1)
            x = self._added(x, mixed, layer.out, layer.block.mixer_post_norm if layer.block.post_norms else None)
            post = layer.block.ffn_post_norm if layer.block.post_norms else None
            if layer.gate_up is None or layer.down is None:
                y = layer.block.ffn(layer.ffn_norm.by_torch(x)[:, None])[:, 0]
                x = x + (y if post is None else post(y))
            else:
                x = self._added(x, self._product(x, layer.gate_up, layer.ffn_norm, layer.act), layer.down, post)
        return self._product(x, self.head, self.norm)

    def _product(self, x: Tensor, weight: Weight, norm: Norm | None = None, act: str = "") -> Tensor:
        if len(x) == 1:
            return product(x, weight, norm, act)
        y = F.linear(norm.by_torch(x) if norm is not None else x, weight.whole(x.dtype), weight.bias)
        return gated(y, act) if act else y

    def _added(self, x: Tensor, part: Tensor, weight: Weight, post: nn.Module | None) -> Tensor:
        """x and a product, summed over processes and normed where the model has it so."""
        if self.summed is None and post is None:
            if len(x) == 1:
                return product(part, weight, residual=x)
            if weight.bias is None:
                return torch.addmm(x, part, weight.whole(x.dtype).t())
        y = self._product(part, weight)
        if self.summed is not None:
            y = self.summed(y)
        y = y if post is None else post(y)
        return x + y

    def _layer(self, i: int, block: Block, full: Sequence[Tensor], slid: Sequence[Tensor]) -> Layer:
        mixer, ffn = block.mixer, block.ffn
        assert isinstance(mixer, Attention)
        slides = self.shape.slides(i)
        norms = [None if n is None else n.weight.data for n in (mixer.q_norm, mixer.k_norm)]
        eps = self.shape.norm_eps
        cos, sin = slid if slides else full
        turn = Turn(cos, sin, norms[0], norms[1], eps, self.shape.about.centred_norms)
        dense = ffn if isinstance(ffn, FeedForward) else None
        return Layer(
            block,
            _norm(block.mixer_norm),
            self._of(mixer.q, mixer.k, mixer.v),
            turn,
            self.shape.sliding_window if slides else None,
            self._of(mixer.out),
            _norm(block.ffn_norm),
            self._of(dense.gate, dense.up) if dense is not None else None,
            self._of(dense.down) if dense is not None else None,
            _act(dense) if dense is not None else "",
        )

    def _of(self, *linears: nn.Linear) -> Weight:
        return self._weight([one.weight for one in linears], [one.bias for one in linears])

    def _weight(self, parts: Sequence[Tensor], biases: Sequence[Tensor | None]) -> Weight:
        whole = torch.cat([part.data for part in parts]) if len(parts) > 1 else parts[0].data.contiguous()
        bias = torch.cat([b.data for b in biases if b is not None]) if any(b is not None for b in biases) else None
        weight = Weight(whole, bias)
        if self._eight_bits:
            weight = quantised(weight)
            whole.copy_(weight.whole(whole.dtype))
            weight = replace(weight, kept=whole)
        begin = 0
        for part in parts:
            part.data = whole[begin : begin + len(part)]
            begin += len(part)
        return weight


def fits(model: Decoder) -> bool:
    """Whether every layer is of this kind."""
    known = (RMSNorm, CentredRMSNorm)
    return all(
        type(block) is Block and isinstance(block.mixer, Attention) and type(block.mixer_norm) in known
        for block in model.blocks.values()
    )


def runs_here(model: Decoder) -> bool:
    """Whether Triton's kernels take its weights."""
    return kernels.fit(model.parameters())


def _norm(norm: nn.Module) -> Norm:
    assert isinstance(norm, nn.RMSNorm)
    assert norm.eps is not None
    return Norm(norm.weight.data, norm.eps, isinstance(norm, CentredRMSNorm))


def _act(ffn: FeedForward) -> str:
    return next(name for name, act in ACTS.items() if act is ffn.act)
