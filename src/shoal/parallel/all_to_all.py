"""Attention by exchange (DeepSpeed Ulysses, arXiv:2309.14509): between two all-to-alls a process has all tokens of a
share of the heads, instead of a share of the tokens of all heads.

So the attention in between is the ordinary one, with the ordinary mask. It needs key and value heads that divide by the
processes; each keeps whole groups of query heads with the key and value head that they share.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single_autograd

from shoal.model import attention


def mask(documents: Tensor | None, seq: int, window: int | None, device: torch.device, *, size: int) -> Tensor | None:
    """Takes the place of `attention_mask`: `seq` tokens are here, but every one of them is seen."""
    return attention.attention_mask(documents, seq * size, window, device)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, groups: int, *, group: str, size: int) -> Tensor:
    """Takes the place of the model's `attend`: its tokens [batch, seq, heads, head_dim] attend to the whole row."""
    device = q.device.type
    if torch.is_autocast_enabled(device):  # here rather than in the kernel: half the bytes to send
        q, k, v = (t.to(torch.get_autocast_dtype(device)) for t in (q, k, v))
    shares = [t.unflatten(2, (size, -1)) for t in (q, k, v)]  # [batch, seq, size, heads / size, head_dim]
    heads = [t.shape[3] for t in shares]
    mixed = _exchange(torch.cat(shares, dim=3).movedim(2, 0), group, size)  # [process, batch, seq, heads, head_dim]
    whole = mixed.movedim(0, 1).flatten(1, 2)  # [batch, whole sequence, heads, head_dim]: processes are in its order
    q, k, v = whole.split(heads, dim=2)
    out = attention.attend(q, k, v, mask, groups)
    back = _exchange(out.unflatten(1, (size, -1)).movedim(1, 0), group, size)  # [heads' process, batch, seq, …]
    return back.movedim(0, 2).flatten(2, 3)  # [batch, seq, heads, head_dim]


def _exchange(x: Tensor, group: str, size: int) -> Tensor:
    """Row i of x goes to process i; row i of the result comes from it. So do, backwards, the gradients."""
    x = x.contiguous()
    rows = [1] * size
    return all_to_all_single_autograd(x, rows, rows, group)  # type: ignore[arg-type]  # GroupName is a str
