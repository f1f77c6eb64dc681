"""Tensor and sequence parallelism: which part of each matrix a process holds, declared beside the model.

Heads, feed-forward channels and rows of the vocabulary are dealt out to the processes of the `tp` axis. Where all of a
token is needed (norms, residuals) each has a stretch of the sequence instead, so that between two parts of a block
hidden states are plain tensors [batch, seq / tp, dim]: gathered on the way in, summed and cut again on the way out
(arXiv:2205.05198). Every parameter becomes a DTensor on the axis, those held whole too: optimizers refuse a mixture.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from shoal.model.decoder import Block, Decoder
from shoal.model.head import Head
from shoal.model.mamba import Mamba
from shoal.model.mla import LatentAttention
from shoal.parallel import vocabulary
from shoal.parallel.place import Place

Plan = dict[str, ParallelStyle]
# Dimensions: hidden states are [batch, seq, dim], queries and keys [batch, seq, heads, head_dim].
SEQUENCE, HEADS = 1, 2
# What treats tokens one by one does not care how the processes' stretches are put together, and joining them along the
# first dimension copies nothing.
STACKED = 0


def split(decoder: Decoder, place: Place) -> None:
    """Cut a stretch of the model, still on the meta device, over the tensor-parallel axis."""
    if place.sizes.tp == 1:
        return
    assert place.dense is not None
    mesh = place.dense["tp"]
    decoder.stretch = partial(_stretch, size=place.sizes.tp, index=place.at["tp"])
    for block in decoder.blocks.values():
        assert isinstance(block, Block)
        parallelize_module(block, mesh, _block(block))
    if hasattr(decoder, "embed"):
        _cut_rows(decoder.embed, mesh)
        decoder.embed.forward = partial(vocabulary.embed, decoder.embed)  # type: ignore[method-assign]  # of this one
    if decoder.last:
        parallelize_module(decoder.norm, mesh, _whole(SEQUENCE))
        _cut_rows(decoder.head, mesh)
        decoder.head.loss, decoder.head.logits = vocabulary.summed_cross_entropy, vocabulary.logits


def _block(block: Block) -> Plan:
    kind, ffn = block.kind, block.ffn
    plan: Plan = {f"{kind}_norm": _whole(SEQUENCE), "ffn_norm": _whole(SEQUENCE)}
    if block.post_norms:
        plan |= {f"{kind}_post_norm": _whole(SEQUENCE), "ffn_post_norm": _whole(SEQUENCE)}
    plan |= {f"{kind}.{name}".rstrip("."): style for name, style in MIXERS[kind](block.mixer).items()}
    if not hasattr(ffn, "experts"):
        return plan | _feed_forward("ffn")
    # A mixture of experts routes the tokens of this process's stretch; `shoal.parallel.expert` deals out the experts.
    plan["ffn.router"] = _whole(STACKED)
    return plan | (_feed_forward("ffn.shared") if getattr(ffn, "shared", None) is not None else {})


def _attention(attention: nn.Module) -> Plan:
    plan: Plan = {"": _Gathered(SEQUENCE, beside=1), **{name: ColwiseParallel() for name in ("q", "k", "v")}}
    plan["out"] = RowwiseParallel(output_layouts=Shard(SEQUENCE))
    if attention.q_norm is not None:  # one weight for all heads, of which each process sees its own
        plan |= {"q_norm": _whole(HEADS), "k_norm": _whole(HEADS)}
    return plan


def _feed_forward(name: str) -> Plan:
    return {
        name: _Gathered(STACKED),
        f"{name}.gate": ColwiseParallel(),
        f"{name}.up": ColwiseParallel(),
        f"{name}.down": RowwiseParallel(output_layouts=Shard(STACKED)),
    }


def _whole(dim: int) -> ParallelStyle:
    """Parameters held whole by every process, which applies them to its part of `dim`; gradients are summed."""
    return SequenceParallel(sequence_dim=dim, use_local_output=True)


class _Gathered(PrepareModuleInput):
    """The first argument comes in parts along `dim` and is put together; `beside` others pass as they are."""

    def __init__(self, dim: int, beside: int = 0) -> None:
        rest = (None,) * beside
        super().__init__(input_layouts=(Shard(dim), *rest), desired_input_layouts=(Replicate(), *rest))

    def _prepare_input_fn(self, inputs: tuple[Any, ...], device_mesh: DeviceMesh) -> tuple[Any, ...]:
        x = inputs[0]
        if torch.is_autocast_enabled(x.device.type):  # to what the matrices inside would cast it to: half the bytes
            x = x.to(torch.get_autocast_dtype(x.device.type))
        gathered: tuple[Any, ...] = super()._prepare_input_fn((x, *inputs[1:]), device_mesh)
        return gathered


def _stretch(whole: Tensor, size: int, index: int) -> Tensor:
    """Of [batch, seq], what lies beside this process's hidden states."""
    return whole.chunk(size, SEQUENCE)[index]


def _cut_rows(module: nn.Embedding | Head, mesh: DeviceMesh) -> None:
    """Rows of the vocabulary. torch's style for embeddings gives every process the gradient of all rows."""
    if module.weight is not None:
        module.weight = nn.Parameter(distribute_tensor(module.weight, mesh, [Shard(0)]))


def _mamba(mamba: nn.Module) -> Plan:
    assert isinstance(mamba, Mamba)
    return {"": _State(mamba.cuts), "out": RowwiseParallel(output_layouts=Shard(SEQUENCE))}


class _State(_Gathered):
    """A state space whose heads are dealt out. It computes with plain tensors: what is here of each parameter. A single
    group serves all heads, so it is held whole, and each process has a part of its gradient."""

    def __init__(self, cuts: Mapping[str, int | None]) -> None:
        super().__init__(SEQUENCE, beside=1)
        self.cuts = cuts

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, Mamba)
        for name, cut in self.cuts.items():
            owner, _, last = name.rpartition(".")
            holder = module.get_submodule(owner)
            if owner != "out":  # which has a style of its own
                placement = Replicate() if cut is None else Shard(cut)
                parameter = distribute_tensor(holder.get_parameter(last), device_mesh, [placement])
                holder.register_parameter(last, nn.Parameter(parameter))
        module.part, module.total = _part, partial(_total, mesh=device_mesh)
        return super()._apply(module, device_mesh)

    def _prepare_input_fn(self, inputs: tuple[Any, ...], device_mesh: DeviceMesh) -> tuple[Any, ...]:
        x, *rest = super()._prepare_input_fn(inputs, device_mesh)
        return x.to_local(grad_placements=[Partial()]), *rest


def _mla(mla: nn.Module) -> Plan:
    """Short vectors are made of the tokens that are here and gathered afterwards: they are less than the stream."""
    have = {name for name, part in mla.named_children() if part is not None}
    plan: Plan = {name: _whole(SEQUENCE) for name in ("q_a", "q_norm", "kv_a", "kv_norm") if name in have}
    plan |= {name: ColwiseParallel(input_layouts=Shard(SEQUENCE)) for name in ("q", "q_b", "kv_b") if name in have}
    return plan | {"": _Shared(), "out": RowwiseParallel(output_layouts=Shard(SEQUENCE))}


class _Shared(ParallelStyle):
    """Of latent attention: the part of the keys that all heads share is gathered, and each process has a part of its
    gradient."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, LatentAttention)
        module.of_all = partial(_of_all, mesh=device_mesh)
        return module


def _of_all(part: Tensor, mesh: DeviceMesh) -> Tensor:
    joined = DTensor.from_local(part, mesh, [Shard(SEQUENCE)], run_check=False).redistribute(placements=[Replicate()])
    return joined.to_local(grad_placements=[Partial()])


def _part(parameter: Tensor) -> Tensor:
    assert isinstance(parameter, DTensor)
    if all(placement.is_replicate() for placement in parameter.placements):
        return parameter.to_local(grad_placements=[Partial()] * len(parameter.placements))
    return parameter.to_local()


def _total(part: Tensor, mesh: DeviceMesh) -> Tensor:
    """The sum over all processes; each has a part of its gradient."""
    summed = DTensor.from_local(part, mesh, [Partial()], run_check=False).redistribute(placements=[Replicate()])
    return summed.to_local(grad_placements=[Partial()])


MIXERS: dict[str, Callable[[nn.Module], Plan]] = {"attention": _attention, "mamba": _mamba, "mla": _mla}
