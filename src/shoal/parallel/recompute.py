"""Activation recomputation: a block keeps less for the backward pass and computes it again there.

    none       keeps all that autograd asks for
    selective  keeps its input and what is dear: results of matrix products, of attention, and of the collectives
               that bring other ranks' work; norms, rotary positions and the SwiGLU product are computed again
    attention  keeps its input and attention's result, which is all that grows with the square of the window
    full       keeps its input only, and computes the whole block again

It is the same computation, so losses and gradients are those of `none`, bit for bit where the kernels are
deterministic. What each mode keeps, in numbers a token, is written down in `shoal.plan.activations`, with the reasons.

Only `forward` of the block's instance changes: no module is wrapped and no parameter gets another name. FSDP's hooks
and `block.compile()` stand outside it, so a recomputation finds the parameters that backward has gathered anyway, and
the compiler sees the recomputation and fuses it. Nothing random happens in Shoal's blocks, so no RNG state is kept for
them. torch runs the recomputation under the forward's own autocast state.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import shoal.parallel.ring  # noqa: F401  # its operator is named below
from shoal.model.decoder import Decoder

Mode = Literal["none", "selective", "attention", "full"]
Contexts = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]

aten, funcol = torch.ops.aten, torch.ops._c10d_functional
PRODUCTS = {aten.mm.default, aten.addmm.default, aten._grouped_mm.default, aten._scaled_mm.default}
ATTENTION = {
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.shoal.ring_attention.default,
    torch.ops.higher_order.flex_attention,  # packed documents; where the block is compiled
}
# Not all-gathers: their results are as many times larger as there are ranks, and with tensor parallelism they alone
# would outweigh everything else that is kept.
COLLECTIVES = {
    funcol.reduce_scatter_tensor.default,
    funcol.all_to_all_single.default,
    funcol.all_reduce.default,
}


def apply(decoder: Decoder, mode: Mode, random: bool = False) -> None:
    """Make every block recompute. After tensor, expert and context parallelism, before compiling and sharding; once.
    `random`: something in a block of somebody's own may be, such as dropout; what it drew is drawn again."""
    if mode == "none":
        return
    for block in decoder.blocks.values():
        block.forward = _recomputed(block, _contexts(block, mode), random)


def _contexts(block: nn.Module, mode: Mode) -> Contexts | None:
    if mode == "selective":
        return partial(_selective, _last_width(block))
    return _attention_alone if mode == "attention" else None


def _recomputed(block: nn.Module, contexts: Contexts | None, random: bool) -> Callable[..., Any]:
    plain = block.forward
    tensor_parallel = any(isinstance(p, DTensor) for p in block.parameters())

    def forward(*args: Any, **kwargs: Any) -> Any:
        settings: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": random}
        if contexts is not None:
            settings["context_fn"] = contexts
        elif tensor_parallel and torch.compiler.is_compiling():
            # The compiler keeps RNG state for attention that it computes again, dropout or not, and torch 2.13 then
            # loses count of what a graph with DTensors has saved.
            settings["context_fn"] = _attention_alone
        return checkpoint(plain, *args, **kwargs, **settings)

    return forward


def _attention_alone() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    return create_selective_checkpoint_contexts(_keep_attention)  # a list of operators may not name flex


def _keep_attention(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in ATTENTION else CheckpointPolicy.PREFER_RECOMPUTE


def _selective(last_width: int | None) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    return create_selective_checkpoint_contexts(_Policy(last_width))


class _Policy:
    """What one pass through a block keeps.

    Nothing from the product with `down` on: its result goes to the residual stream and no gradient in the block needs
    it, so a recomputation ends before it. It is told by the width of what it multiplies; an attention that happens to
    be as wide has its output product computed again, and what follows with it: slower, and no less right.
    """

    def __init__(self, last_width: int | None) -> None:
        self.last_width = last_width
        self.ended = {False: False, True: False}  # of the first pass and of its repetition: torch 2.11 asks in both

    def __call__(self, context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        # MUST: the compiler would otherwise go by its own estimate of cost.
        return (
            CheckpointPolicy.MUST_SAVE
            if self._keeps(op, args, context.is_recompute)
            else CheckpointPolicy.PREFER_RECOMPUTE
        )

    def _keeps(self, op: Any, args: tuple[Any, ...], again: bool) -> bool:
        if op in PRODUCTS:
            left = args[1] if op is aten.addmm.default else args[0]
            self.ended[again] |= left.shape[-1] == self.last_width
            return not (self.ended[again] or _partial(left))
        return not self.ended[again] and (op in ATTENTION or op in COLLECTIVES)


def _partial(left: Tensor) -> bool:
    """Whether a product with this is a partial sum (row-wise tensor parallelism): that of all tokens, to be reduced to
    those of this rank. The sum is kept, the `tp` times larger summand is not."""
    return isinstance(left, DTensor) and any(p.is_shard(left.ndim - 1) for p in left.placements)


def _last_width(block: nn.Module) -> int | None:
    """Rows of the matrix that ends the block. None where its result is needed: by the gradient of a norm that follows,
    or of a router, which weighs the experts of a mixture."""
    if getattr(block, "post_norms", False):
        return None
    down = getattr(getattr(block, "ffn", None), "down", None)
    return down.in_features if isinstance(down, nn.Linear) else None
