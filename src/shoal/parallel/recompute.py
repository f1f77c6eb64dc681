"""Activation recomputation: a block keeps less for the backward pass and computes it again there.

    none       keeps all that autograd asks for
    selective  keeps its input and what is dear: results of matrix products, of attention, and of the collectives
               that bring other ranks' work; norms, rotary positions and the SwiGLU product are computed again
    full       keeps its input only, and computes the whole block again

It is the same computation, so losses and gradients are those of `none`, bit for bit where the kernels are
deterministic. What each mode keeps, in numbers a token, is written down in `shoal.plan.memory`, with the reasons.

Only `forward` of the block's instance changes: no module is wrapped and no parameter gets another name. FSDP's hooks
and `block.compile()` stand outside it, so a recomputation finds the parameters that backward has gathered anyway, and
the compiler sees the recomputation and fuses it. Nothing random happens in a block, so no RNG state is kept. torch runs
the recomputation under the forward's own autocast state.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from shoal.model.decoder import Decoder

Mode = Literal["none", "selective", "full"]
Contexts = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]

aten, funcol = torch.ops.aten, torch.ops._c10d_functional
PRODUCTS = {aten.mm.default, aten.addmm.default}
ATTENTION = {
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
}
# Not all-gathers: their results are as many times larger as there are ranks, and with tensor parallelism they alone
# would outweigh everything else that is kept.
COLLECTIVES = {
    funcol.reduce_scatter_tensor.default,
    funcol.all_to_all_single.default,
    funcol.all_reduce.default,
}


def apply(decoder: Decoder, mode: Mode) -> None:
    """Make every block recompute. Before compiling and sharding; once."""
    if mode == "none":
        return
    for block in decoder.blocks.values():
        contexts = _selective(decoder.shape.ffn_dim) if mode == "selective" else None
        block.forward = _recomputed(block, contexts)


def _recomputed(block: nn.Module, contexts: Contexts | None) -> Callable[..., Tensor]:
    settings: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    if contexts is not None:
        settings["context_fn"] = contexts
    plain = block.forward

    def forward(x: Tensor, cos: Tensor, sin: Tensor, mask: Any) -> Tensor:
        return checkpoint(plain, x, cos, sin, mask, **settings)

    return forward


def _selective(ffn_dim: int) -> Contexts:
    return partial(create_selective_checkpoint_contexts, partial(_policy, ffn_dim))


def _policy(ffn_dim: int, context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    keep = op in ATTENTION or op in COLLECTIVES or (op in PRODUCTS and not _ends_block(ffn_dim, op, args))
    # MUST: the compiler would otherwise decide by its own estimate of cost.
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


def _ends_block(ffn_dim: int, op: Any, args: tuple[Any, ...]) -> bool:
    """Whether this is the product with `down`, told by its width: what it gives is added to the residual stream and
    needed by nothing in the block, and recomputation stops before it. An attention that happens to be as wide as the
    MLP has its output product computed again, which is slower and no less right."""
    left = args[1] if op is aten.addmm.default else args[0]
    return bool(left.shape[-1] == ffn_dim)
