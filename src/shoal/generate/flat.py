"""A decoder of a CPU, with as few kernels a layer as torch has, over weights that lie as these read them fastest.

A token alone reads each weight once and computes next to nothing, so it takes as long as the reading: products that
read the same are one (queries, keys and values; gate and up), and in float32 a matrix lies across, [in, out], where a
product with one row reads it a third faster. The model's parameters become views of that, so the weights lie in memory
once. Products of several rows want them packed as oneDNN packs them (what torch's compiler does, too): that is a second
copy, made once it pays and where there is room.

What is not of this kind is computed by the model's own modules (`fits`). The bits are not those of the modules; `exact`
never comes here.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.model.attention import Attention, project
from shoal.model.decoder import Block, Decoder
from shoal.model.feed_forward import FeedForward, widen
from shoal.model.norm import CentredRMSNorm, RMSNorm

PACKED_FOR = 64  # rows; what is packed for so many is fast for all
PAYS_AFTER = 8  # products of several rows: packing takes as long as some of them
SPARE = 0.25  # of the memory that is free stays free

Attend = Callable[[int, Tensor, Tensor, Tensor, int | None, int], Tensor]


class Product:
    """x @ weight.T of one weight, or of several side by side that read the same."""

    def __init__(self, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> None:
        found = [b.detach() for b in biases if b is not None]
        self.bias = torch.cat(found) if found else None
        whole = torch.cat([w.detach() for w in weights])  # [out, in]
        # A narrow matrix is read as fast as it lies.
        lies_across = whole.dtype == torch.float32 and whole.shape[0] >= whole.shape[1]
        self.across = whole.t().contiguous() if lies_across else None  # [in, out]
        self.matrix = whole if self.across is None else self.across.t()
        begin = 0
        for weight in weights:
            rows = len(weight)
            weight.data = self.matrix[begin : begin + rows]
            begin += rows
        self._packed: Tensor | None = None
        self._used = 0

    def __call__(self, x: Tensor, add: Tensor | None = None) -> Tensor:
        """x [rows, in], and what is added to its product."""
        if len(x) == 1 and self.across is not None:
            return self.scaled(x, 1.0, add)
        if self._packed is None and self._used < PAYS_AFTER:
            self._used += 1
            if self._used == PAYS_AFTER:
                self._packed = packed(self.matrix)
        if self._packed is None:
            y = F.linear(x, self.matrix, self.bias)
        else:
            y = torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
        return y if add is None else y.add_(add)

    def scaled(self, x: Tensor, scale: float, add: Tensor | None = None) -> Tensor:
        """The same of one row in float32, times a number before anything is added: in one kernel."""
        across = self.matrix.t()
        if self.bias is not None:
            y = torch.addmm(self.bias, x, across, alpha=scale)
            return y if add is None else y.add_(add)
        if add is not None:
            return torch.addmm(add, x, across, alpha=scale)
        return torch.addmm(x[:, :1], x, across, beta=0, alpha=scale) if scale != 1.0 else torch.mm(x, across)


def packed(matrix: Tensor) -> Tensor | None:
    """As oneDNN wants it; None where there is no such thing, no room, or it does not compute what it should."""
    if not torch.backends.mkldnn.is_available() or matrix.dtype not in (torch.float32, torch.bfloat16):
        return None
    if matrix.nbytes > (1 - SPARE) * os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"):
        return None
    try:
        found: Tensor = torch.ops.mkldnn._reorder_linear_weight(matrix.contiguous(), PACKED_FOR)
        x = torch.linspace(-1, 1, 2 * matrix.shape[1], dtype=matrix.dtype).view(2, -1)
        y = torch.ops.mkldnn._linear_pointwise(x, found, None, "none", [], "")
    except (RuntimeError, AttributeError, NotImplementedError):  # of another build, or another processor
        return None
    wanted = F.linear(x, matrix).float()
    digits = 1e-4 if matrix.dtype == torch.float32 else 2e-2
    return found if (y.float() - wanted).abs().max() <= digits * max(1.0, float(wanted.abs().max())) else None


class Norm:
    def __init__(self, norm: nn.Module) -> None:
        assert isinstance(norm, nn.RMSNorm)
        assert norm.eps is not None
        self._module, self._eps = norm, norm.eps
        weight = norm.weight.detach()
        self.weight = weight.float() + 1.0 if isinstance(norm, CentredRMSNorm) else weight

    def __call__(self, x: Tensor) -> Tensor:
        if type(self._module) is not RMSNorm:
            y: Tensor = self._module(x)
            return y
        # Without the way through a module, which takes as long as the kernel.
        return F.rms_norm(x, (x.shape[-1],), self.weight, self._eps)

    def scale(self, x: Tensor) -> float:
        """What one row is multiplied by. A product can do that in passing: torch's norm is six kernels."""
        row = x.view(-1)
        return 1.0 / math.sqrt(float(torch.dot(row, row)) / len(row) + self._eps)


@dataclass(frozen=True)
class Layer:
    block: Block
    mixer: Attention
    norm: Norm
    qkv: Product
    window: int | None
    out: Product
    ffn_norm: Norm
    gate_up: Product | None  # None: a mixture of experts
    down: Product | None


class Flat:
    def __init__(self, model: Decoder) -> None:
        """The model's parameters are views of what lies here from now on: it is the engine's alone."""
        assert fits(model)
        shape = model.shape
        self.model, self.shape = model, shape
        self._heads, self._key_heads, self._width = shape.heads, shape.kv_heads, shape.head_dim
        self.layers = [
            _layer(shape.sliding_window if shape.slides(i) else None, block)
            for i, block in zip(model.layers, model.blocks.values(), strict=True)
        ]
        self.norm = Norm(model.norm)
        head = model.embed.weight if shape.tie_embeddings else model.head.weight
        assert head is not None
        self.head = Product([head], [])

    def __call__(self, tokens: Tensor, at: Tensor, attend: Attend) -> Tensor:
        """Tokens [rows, n] that stand `at` those places to what the head reads, [rows * n, dim]."""
        full = self._angles(self.model.rope(at))
        slid = full if self.model.sliding_rope is None else self._angles(self.model.sliding_rope(at))
        x = self.model.embed.weight[tokens.flatten()]  # [rows * n, dim]
        if self.model.embed_scale != 1.0:
            x = x * self.model.embed_scale
        for number, layer in enumerate(self.layers):
            mixed = self._mixed(number, layer, x, full if layer.window is None else slid, tokens.shape, attend)
            if layer.block.post_norms:
                x = x + layer.block.mixer_post_norm(layer.out(mixed))
                x = x + layer.block.ffn_post_norm(_fed(layer, x))
            else:
                x = layer.out(mixed, x)
                x = _fed(layer, x, x)
        return self.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.head(hidden)

    def _mixed(
        self, number: int, layer: Layer, x: Tensor, angles: tuple[Tensor, Tensor], size: torch.Size, attend: Attend
    ) -> Tensor:
        mixer, turned = layer.mixer, self._heads + self._key_heads
        qkv = _normed(layer.norm, x, layer.qkv).view(len(x), -1, self._width)
        qk, v = qkv[:, :turned], qkv[:, turned:]
        if mixer.q_norm is not None and mixer.k_norm is not None:
            qk = torch.cat((mixer.q_norm(qk[:, : self._heads]), mixer.k_norm(qk[:, self._heads :])), 1)
        qk = _turned(qk, *angles)
        q, k = qk[:, : self._heads], qk[:, self._heads :]
        if mixer.score_scale != 1.0:
            q = q * mixer.score_scale
        q, k, v = (t.unflatten(0, size) for t in (q, k, v))  # [rows, n, heads, width]
        return attend(number, q, k, v, layer.window, mixer.groups).reshape(len(x), -1)

    def _angles(self, found: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """As `_turned` reads them, [rows * n, 1, rotary width]."""
        dtype = self.model.embed.weight.dtype
        cos, sin = (t.flatten(0, 1).to(dtype) for t in found)
        return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As `shoal.model.rope.rotate`, of [rows, heads, width], in three kernels."""
    width = cos.shape[-1]
    if width == x.shape[-1]:
        return (x * cos).addcmul_(x.roll(width // 2, -1), sin)
    part = x[..., :width]
    return torch.cat(((part * cos).addcmul_(part.roll(width // 2, -1), sin), x[..., width:]), -1)


def _normed(norm: Norm, x: Tensor, product: Product) -> Tensor:
    """A product of what is normed first."""
    if len(x) == 1 and product.across is not None:
        return product.scaled(x * norm.weight, norm.scale(x))
    return product(norm(x))


def _fed(layer: Layer, x: Tensor, add: Tensor | None = None) -> Tensor:
    ffn: Any = layer.block.ffn
    if layer.gate_up is None or layer.down is None:
        y: Tensor = ffn(layer.ffn_norm(x)[:, None])[:, 0]
        return y if add is None else y + add
    gate, up = _normed(layer.ffn_norm, x, layer.gate_up).chunk(2, -1)
    mixed = ffn.act(gate).mul_(up)
    if len(x) == 1 and layer.down.matrix.dtype == torch.float32:
        return layer.down.scaled(mixed, 1.0, add)
    return layer.down(mixed, add)


def fits(model: Decoder) -> bool:
    """Whether every layer is of this kind, and nothing stands in the place of its parts."""
    return (
        model.first
        and model.last
        and all(_known(block) for block in model.blocks.values())
        and {p.device.type for p in model.parameters()} == {"cpu"}
        and len({p.dtype for p in model.parameters()}) == 1
    )


def _known(block: nn.Module) -> bool:
    if type(block) is not Block or type(block.mixer) is not Attention:
        return False
    mixer, ffn = block.mixer, block.ffn
    linears = [mixer.q, mixer.k, mixer.v, mixer.out]
    if isinstance(ffn, FeedForward):
        if ffn.widen is not widen:
            return False
        linears += [ffn.gate, ffn.up, ffn.down]
    return (
        mixer.project is project
        and all(type(one) is nn.Linear for one in linears)
        and type(block.mixer_norm) in (RMSNorm, CentredRMSNorm)
    )


def _layer(window: int | None, block: nn.Module) -> Layer:
    assert isinstance(block, Block)
    mixer, ffn = block.mixer, block.ffn
    assert isinstance(mixer, Attention)
    gate_up, down = (_of(ffn.gate, ffn.up), _of(ffn.down)) if isinstance(ffn, FeedForward) else (None, None)
    return Layer(
        block,
        mixer,
        Norm(block.mixer_norm),
        _of(mixer.q, mixer.k, mixer.v),
        window,
        _of(mixer.out),
        Norm(block.ffn_norm),
        gate_up,
        down,
    )


def _of(*linears: nn.Linear) -> Product:
    return Product([one.weight for one in linears], [one.bias for one in linears])
