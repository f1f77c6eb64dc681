"""Causal self-attention with grouped key and value heads, and the masks that keep documents apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.model.norm import norm_of
from shoal.model.rope import rotate
from shoal.spec.shape import Shape

if TYPE_CHECKING:
    from shoal.model.decoder import Decoder


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        self.groups = shape.heads // shape.kv_heads  # query heads that share a key and value head
        self.q = nn.Linear(shape.dim, shape.q_dim, bias=shape.qkv_bias)
        self.k = nn.Linear(shape.dim, shape.kv_dim, bias=shape.qkv_bias)
        self.v = nn.Linear(shape.dim, shape.kv_dim, bias=shape.qkv_bias)
        self.out = nn.Linear(shape.q_dim, shape.dim, bias=shape.out_bias)
        self.q_norm = norm_of(shape, shape.head_dim) if shape.qk_norm else None
        self.k_norm = norm_of(shape, shape.head_dim) if shape.qk_norm else None
        self.score_scale = shape.score_scale
        self.project: Callable[[Attention, Tensor], Sequence[Tensor]] = project
        self.attend: Callable[..., Tensor] = attend

    def forward(self, x: Tensor, beside: tuple[Tensor, Tensor, Any]) -> Tensor:
        """x [batch, seq, dim]; mask as the Decoder's `mask` makes it for `attend`, None meaning plainly causal."""
        cos, sin, mask = beside
        # [batch, seq, heads, head_dim], and kv_heads of k and v
        q, k, v = (t.unflatten(-1, (-1, self.head_dim)) for t in self.project(self, x))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if self.score_scale != 1.0:  # on the queries: every kernel divides by the root of their width
            q = q * self.score_scale
        mixed = self.attend(q, k, v, mask, self.groups)  # [batch, seq, heads, head_dim]
        return self.out(mixed.flatten(-2))


def beside(decoder: Decoder, positions: Tensor, documents: Tensor | None) -> Callable[[int], tuple[Any, ...]]:
    """Rotary positions and masks, made once for all layers."""
    shape, seq, device = decoder.shape, positions.shape[1], positions.device
    full = (*decoder.rope(positions), decoder.mask(documents, seq, None, device))
    if shape.sliding_window is None:
        return lambda layer: full
    turned = full[:2] if decoder.sliding_rope is None else decoder.sliding_rope(positions)
    sliding = (*turned, decoder.mask(documents, seq, shape.sliding_window, device))
    return lambda layer: sliding if shape.slides(layer) else full


def project(attention: Attention, x: Tensor) -> Sequence[Tensor]:
    return attention.q(x), attention.k(x), attention.v(x)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, groups: int) -> Tensor:
    """Scaled dot-product attention over [batch, seq, heads, head_dim]; torch picks the kernel."""
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # heads first, as the kernels want them
    # Sharing key and value heads inside the kernel saves a tenth of the time (CPU, and H200 in bfloat16). In float32
    # CUDA has no such kernel and would hold the whole [seq, seq] matrix, so there they are copied.
    in_kernel = groups > 1 and not (q.is_cuda and q.dtype == torch.float32)
    if groups > 1 and not in_kernel:
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=in_kernel)
    return y.transpose(1, 2)


def attention_mask(documents: Tensor | None, seq: int, window: int | None, device: torch.device) -> Tensor | None:
    """Who may see whom, True meaning yes: [batch or 1, 1, seq, seq]; None when plain causality says it all.

    `documents` [batch, seq] numbers the documents of each row. A batch of single documents needs no mask, and the
    causal kernels are faster without one; but only the CPU is asked, as asking a GPU would stall its queue: there
    the caller, who has the numbers on the host, passes None.
    """
    if documents is not None and documents.device.type == "cpu" and not documents.any():
        documents = None
    return one_kind_of_mask(documents, seq, window, device)


def one_kind_of_mask(documents: Tensor | None, seq: int, window: int | None, device: torch.device) -> Tensor | None:
    """The same without a look at the numbers: with documents there always is a mask."""
    if window is not None and window >= seq:
        window = None
    if documents is None and window is None:
        return None
    at = torch.arange(seq, device=device)
    back = at[:, None] - at[None, :]  # [seq, seq]: how far key j lies behind query i
    seen = back >= 0
    if window is not None:
        seen = seen & (back < window)
    if documents is None:
        return seen[None, None]
    return (seen & (documents[:, :, None] == documents[:, None, :]))[:, None]
