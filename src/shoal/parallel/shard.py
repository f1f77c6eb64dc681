"""Data parallelism of a plain decoder: DDP when only replicated, FSDP2 when sharded, HSDP when both.

Gradients come out summed over all processes that read other tokens: data-parallel ones and those that share a sequence.
DDP alone divides by their number; `Laid` takes that back.
"""

from __future__ import annotations

import contextlib
import inspect
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from shoal.model.decoder import Decoder
from shoal.parallel import expert
from shoal.parallel.place import Place

# torch 2.13 gave the old name a warning and a new name.
_OWN_BUFFERS: dict[str, Any] = {
    name: False
    for name in ("forward_sync_buffers", "broadcast_buffers")
    if name in inspect.signature(DistributedDataParallel).parameters
}
if len(_OWN_BUFFERS) > 1:
    del _OWN_BUFFERS["broadcast_buffers"]


def sharded(place: Place) -> bool:
    """Whether FSDP2 carries the gradients."""
    return place.dense is not None and place.sizes.fsdp


def shard(decoder: Decoder, place: Place, bf16: bool) -> None:
    """FSDP2 over a decoder that is still on the meta device: no process ever holds weights that are not its own."""
    policy = (
        MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if bf16 else MixedPrecisionPolicy()
    )
    left_out = expert.shard(decoder, place, policy)
    if sharded(place):
        assert place.dense is not None
        mesh = place.dense["shard"] if place.sizes.dp_replicate == 1 else place.dense["replicate", "shard"]
        blocks = list(decoder.blocks.values())
        for block in blocks:
            # The last one's backward pass comes next: what would be thrown away is gathered again at once.
            again = block is not blocks[-1]
            fully_shard(block, mesh=mesh, mp_policy=policy, ignored_params=left_out, reshard_after_forward=again)
        if decoder.last and not decoder.shape.tie_embeddings and isinstance(getattr(decoder, "head", None), nn.Module):
            # Gathered while blocks compute, and their gradients leave while they do: what is left to the whole decoder
            # is gathered before the first block and reduced after it, beside nothing. A tied head stays there, with the
            # embedding that it reads.
            fully_shard([decoder.norm, decoder.head], mesh=mesh, mp_policy=policy, reshard_after_forward=False)
        fully_shard(decoder, mesh=mesh, mp_policy=policy, ignored_params=left_out)
    for part in sharded_parts(decoder):
        part.set_force_sum_reduction_for_comms(True)
        part.set_gradient_divide_factor(1.0)


def replicate(decoder: Decoder, place: Place) -> nn.Module:
    """DDP, where nothing but dp_replicate is above one."""
    if place.dense is None or place.sizes.dp_replicate != place.world or sharded(place):
        return decoder
    # Buckets are views of the gradients: no second copy of them, no copy after the reduction. Buffers are the routers'
    # counts, which differ between processes until they are summed.
    return DistributedDataParallel(
        decoder,
        process_group=place.dense.get_group("replicate"),
        gradient_as_bucket_view=True,
        **_OWN_BUFFERS,
    )


def sharded_parts(module: nn.Module) -> list[FSDPModule]:
    return [part for part in module.modules() if isinstance(part, FSDPModule)]


def reduce_on(module: nn.Module, last: bool, each: bool) -> AbstractContextManager[None]:
    """Gradients travel once a step, with the last micro-batch; or (`each`) to their shards with every one, so that
    nobody holds them whole. Copies of a shard are summed with the last one in either case."""
    for part in sharded_parts(module):
        part.set_requires_gradient_sync(last or each, recurse=False)
        part.set_requires_all_reduce(last, recurse=False)
    if isinstance(module, DistributedDataParallel) and not last:
        return module.no_sync()
    return contextlib.nullcontext()


def reshard(module: nn.Module) -> None:
    """Back to shards after a forward pass that no backward follows.

    FSDP2 leaves the root's parameters gathered after forward, for the backward that usually comes. After evaluation
    none comes: a checkpoint would then save the gathered copy, in its compute type, and the next step would fail.
    """
    for part in sharded_parts(module):
        part.reshard()
