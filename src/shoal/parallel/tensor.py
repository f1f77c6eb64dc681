"""Tensor and sequence parallelism: which part of each matrix a process holds, declared beside the model.

Heads, feed-forward channels and rows of the vocabulary are dealt out to the processes of the `tp` axis. Where all of a
token is needed (norms, residuals) each has a stretch of the sequence instead, so that between two parts of a block
hidden states are plain tensors [batch, seq / tp, dim]: gathered on the way in, summed and cut again on the way out
(arXiv:2205.05198). Every parameter becomes a DTensor on the axis, those held whole too: optimizers refuse a mixture.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from shoal.errors import UsageError
from shoal.model.decoder import Decoder
from shoal.model.head import Head
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
    parallelize_module(decoder, mesh, _ends(decoder))
    for block in decoder.blocks.values():
        parallelize_module(block, mesh, _block(block))
    if decoder.last:
        _split_head(decoder.head, mesh)
    if decoder.first:
        decoder.embed.register_forward_pre_hook(_refuse_uneven(mesh.size()), prepend=True)


def _ends(decoder: Decoder) -> Plan:
    plan: Plan = {}
    if hasattr(decoder, "embed"):
        plan["embed"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(SEQUENCE))
    if decoder.last:
        plan["norm"] = _whole(SEQUENCE)
    return plan


def _block(block: nn.Module) -> Plan:
    attention, ffn = block.get_submodule("attention"), block.get_submodule("ffn")
    plan: Plan = {
        "attention_norm": _whole(SEQUENCE),
        "attention": _gathered(SEQUENCE, beside=3),  # cos, sin and mask are those of the whole sequence
        "attention.q": ColwiseParallel(),
        "attention.k": ColwiseParallel(),
        "attention.v": ColwiseParallel(),
        "attention.out": RowwiseParallel(output_layouts=Shard(SEQUENCE)),
        "ffn_norm": _whole(SEQUENCE),
    }
    if attention.q_norm is not None:  # one weight for all heads, of which each process sees its own
        plan |= {"attention.q_norm": _whole(HEADS), "attention.k_norm": _whole(HEADS)}
    if not hasattr(ffn, "experts"):
        return plan | _feed_forward("ffn")
    # A mixture of experts routes the tokens of this process's stretch; `shoal.parallel.expert` deals out the experts.
    plan["ffn.router"] = _whole(STACKED)
    return plan | (_feed_forward("ffn.shared") if getattr(ffn, "shared", None) is not None else {})


def _feed_forward(name: str) -> Plan:
    return {
        name: _gathered(STACKED),
        f"{name}.gate": ColwiseParallel(),
        f"{name}.up": ColwiseParallel(),
        f"{name}.down": RowwiseParallel(output_layouts=Shard(STACKED)),
    }


def _whole(dim: int) -> ParallelStyle:
    """Parameters held whole by every process, which applies them to its part of `dim`; gradients are summed."""
    return SequenceParallel(sequence_dim=dim, use_local_output=True)


def _gathered(dim: int, beside: int = 0) -> ParallelStyle:
    """The first argument comes in parts along `dim` and is put together; `beside` others pass as they are."""
    rest = (None,) * beside
    return PrepareModuleInput(input_layouts=(Shard(dim), *rest), desired_input_layouts=(Replicate(), *rest))


def _split_head(head: Head, mesh: DeviceMesh) -> None:
    """No style of torch's fits a module that is no Linear and whose matrix may be the embedding's."""
    if head.weight is not None:
        head.weight = nn.Parameter(distribute_tensor(head.weight, mesh, [Shard(0)]))
    head.loss, head.logits = vocabulary.summed_cross_entropy, vocabulary.logits


def _refuse_uneven(tp: int) -> Callable[[nn.Module, tuple[Tensor]], None]:
    """Stretches of unequal length would be taken for equal ones by the styles, and the collectives would hang."""

    def check(_: nn.Module, inputs: tuple[Tensor]) -> None:
        if inputs[0].shape[1] % tp:
            raise UsageError(
                f"a sequence of {inputs[0].shape[1]} tokens cannot be shared equally by mesh.tp = {tp} processes: "
                "pad it to a multiple."
            )

    return check
