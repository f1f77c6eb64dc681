"""Lays a plain decoder over the mesh: DDP when only replicated, FSDP2 when sharded, HSDP when both.

The model knows nothing of it. Gradients come out averaged over the data-parallel processes whatever the layout,
which is why the loop multiplies its loss by their number.
"""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from shoal.model.decoder import Decoder
from shoal.parallel.place import Place
from shoal.spec.run import Run


def build(run: Run, model_on_meta: Decoder, place: Place) -> nn.Module:
    """Shard first, allocate second: no process ever holds weights that are not its own."""
    bf16 = run.train.precision == "bf16"
    if run.train.compile:
        for block in model_on_meta.blocks.values():
            block.compile()
    sharded = place.mesh is not None and int(run.mesh.dp_shard) > 1
    if place.mesh is not None and sharded:
        mesh = place.mesh["shard"] if int(run.mesh.dp_replicate) == 1 else place.mesh
        policy = (
            MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            if bf16
            else MixedPrecisionPolicy()
        )
        for block in model_on_meta.blocks.values():
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(model_on_meta, mesh=mesh, mp_policy=policy)
    model_on_meta.to_empty(device=place.device)
    model_on_meta.init_weights(run.seed)
    if place.mesh is None or sharded:
        return model_on_meta
    # Buckets are views of the gradients: no second copy of them, no copy after the reduction.
    return DistributedDataParallel(
        model_on_meta, process_group=place.mesh.get_group("replicate"), gradient_as_bucket_view=True
    )


def plain(module: nn.Module) -> Decoder:
    """The decoder itself, whose parameter names are those of the checkpoint."""
    inner = module.module if isinstance(module, DistributedDataParallel) else module
    assert isinstance(inner, Decoder)
    return inner


def precision(run: Run, module: nn.Module, place: Place) -> AbstractContextManager[None]:
    """Compute type of forward. FSDP2 casts its own shards; elsewhere autocast reads the float32 master weights."""
    if run.train.precision != "bf16" or isinstance(module, FSDPModule):
        return contextlib.nullcontext()
    return torch.autocast(place.device.type, dtype=torch.bfloat16)


def reduce_on(module: nn.Module, last: bool) -> AbstractContextManager[None]:
    """Gradients travel once a step: with the last micro-batch."""
    if isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(last)
        return contextlib.nullcontext()
    if isinstance(module, DistributedDataParallel) and not last:
        return module.no_sync()
    return contextlib.nullcontext()


def reshard(module: nn.Module) -> None:
    """Back to shards after a forward pass that no backward follows.

    FSDP2 leaves the root's parameters gathered after forward, for the backward that usually comes. After evaluation
    none comes: a checkpoint would then save the gathered copy, in its compute type, and the next step would fail.
    """
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()
