"""Expert parallelism: every process of the `ep` axis holds some experts of each layer, and tokens travel to theirs.

The axis lies over processes that all hold other tokens anyway (data, context and, as hidden states are cut along the
sequence, tensor parallel ones), so it adds none: a layer's tokens are sent out by one all-to-all and come back by
another. Whatever the routing, every process takes part in both, with nothing to send if need be.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode, _pop_mode, _push_mode
from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

from shoal.errors import SpecError
from shoal.model.decoder import Decoder
from shoal.model.loads import sparse_layers
from shoal.model.moe import Experts, counted, inverse, spread, swiglu
from shoal.parallel.place import Place


def split(decoder: Decoder, place: Place) -> None:
    """Deal the experts of a stretch of the model, still on the meta device, out to the expert-parallel axis."""
    if place.expert is None or place.sizes.ep == 1:
        return
    mesh = place.expert["ep"]
    for _, layer in sparse_layers([decoder]):
        experts = layer.experts
        if experts.gate.shape[0] % mesh.size():
            raise SpecError(
                f"{experts.gate.shape[0]} experts cannot be shared equally by mesh.ep = {mesh.size()} processes: "
                "set mesh.ep to a divisor of model.experts.count."
            )
        for name, parameter in list(experts.named_parameters()):
            setattr(experts, name, nn.Parameter(distribute_tensor(parameter, mesh, [Shard(0)])))
        experts.compute = _on_own_part
        layer.exchange = partial(through_peers, group=mesh.get_group())


def shard(decoder: Decoder, place: Place, policy: MixedPrecisionPolicy) -> set[nn.Parameter]:
    """FSDP2 over the processes that hold the same experts. Before the blocks around them are sharded.

    Returns what those blocks must leave alone: experts that no other process has, whose gradients need no sum.
    """
    if place.expert is None or place.sizes.dp_replicate == place.world:  # under DDP they are parameters like others
        return set()
    layers = [layer.experts for _, layer in sparse_layers([decoder])]
    mesh = place.expert["shard"] if place.sizes.dp_replicate == 1 else place.expert["replicate", "shard"]
    if mesh.size() == 1:
        return {parameter for experts in layers for parameter in experts.parameters()}
    for experts in layers:
        # Not left to FSDP, which would keep them gathered where nothing but the experts is sharded (tensor parallelism
        # alone): it then takes each layer's for a whole model.
        part = fully_shard(
            experts, mesh=mesh, reshard_after_forward=True, mp_policy=policy, shard_placement_fn=_evenly(mesh)
        )
        part.set_force_sum_reduction_for_comms(True)
        part.set_gradient_divide_factor(1.0)
        _out_of_sight(experts)
    return set()


def _out_of_sight(experts: Experts) -> None:
    """Hides what FSDP does around the experts from selective recomputation.

    That wants the same operations in a block's forward pass and its repetition, and refuses others. FSDP does not: the
    second time it finds parameters gathered, or gathers them another way. It does so for whole blocks out of its sight.
    """
    hidden: list[TorchDispatchMode] = []

    def hide(*_: Any) -> None:
        if isinstance(_get_current_dispatch_mode(), _CachingTorchDispatchMode | _CachedTorchDispatchMode):
            hidden.append(_pop_mode())

    def show(*_: Any) -> None:
        if hidden:
            _push_mode(hidden.pop())

    # FSDP's own hooks are registered: these go before the first and after the last.
    experts.register_forward_pre_hook(hide, prepend=True)
    experts.register_forward_pre_hook(show)
    experts.register_forward_hook(hide, prepend=True)
    experts.register_forward_hook(show)


def _evenly(mesh: DeviceMesh) -> Callable[[nn.Parameter], Shard]:
    """By experts where their number allows, which copies nothing; else by the first dimension that divides evenly.

    Padding is possible along the first dimension only, and there a padded shard of an expert-parallel part would not
    lie where its placement says.
    """
    size = mesh.size(mesh.ndim - 1)

    def place_parameter(parameter: nn.Parameter) -> Shard:
        local = parameter.to_local().shape if isinstance(parameter, DTensor) else parameter.shape
        for dim, length in enumerate(local):
            if length % size == 0:
                return Shard(dim)
        raise SpecError(
            f"experts of the shape {tuple(local)} cannot be cut evenly over {size} processes: "
            "choose a larger mesh.ep, or model.experts.ffn_dim as a multiple of that number."
        )

    return place_parameter


def through_peers(experts: Experts, x: Tensor, chosen: Tensor, group: dist.ProcessGroup) -> Tensor:
    """As `through_experts`, with the experts on the group's processes, neighbours on the same one, in order."""
    peers, (count, *_), top_k = group.size(), experts.gate.shape, chosen.shape[1]
    order = chosen.flatten().argsort(stable=True)  # of the (token, expert) pairs, by expert and so by process
    counts = counted(chosen, count).view(peers, -1)  # [peers, experts of each]
    arriving = _all_to_all(counts, None, None, group)  # [peers, experts here]: what each sends to ours
    # The one time that the host must know: an all-to-all is told its sizes by the host.
    send, receive = torch.stack([counts.sum(1), arriving.sum(1)]).tolist()

    y = _Travel.apply(spread(x, order, top_k), send, receive, group)  # sorted by where from, then by expert
    by_expert = _by_expert(arriving, sum(receive))
    y = experts(spread(y, by_expert), arriving.sum(0))
    y = _Travel.apply(spread(y, inverse(by_expert)), receive, send, group)
    return spread(y, inverse(order)).unflatten(0, (-1, top_k))  # [tokens, top_k, dim]


def _by_expert(arriving: Tensor, rows: int) -> Tensor:
    """The order that sorts rows by expert, rows that came sorted by peer and then by expert. [rows]"""
    peers, here = arriving.shape
    experts = torch.arange(here, device=arriving.device).repeat(peers)
    # Told the number of rows, repeat_interleave does not ask the device for it.
    return experts.repeat_interleave(arriving.flatten(), output_size=rows).argsort(stable=True)


def _on_own_part(x: Tensor, counts: Tensor, *stacks: Tensor) -> Tensor:
    """What an expert-parallel process computes: its own experts. Cast, as those that FSDP leaves alone are float32."""
    gate, up, down = (stack.to_local().to(x.dtype) if isinstance(stack, DTensor) else stack for stack in stacks)
    return swiglu(x, counts, gate, up, down)


class _Travel(torch.autograd.Function):
    """An all-to-all of rows, whose gradients go the other way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.way = (send, receive, group)
        return _all_to_all(x, send, receive, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        send, receive, group = ctx.way
        return _all_to_all(grad, receive, send, group), None, None, None


def _all_to_all(x: Tensor, send: list[int] | None, receive: list[int] | None, group: dist.ProcessGroup) -> Tensor:
    # The functional kind: selective recomputation can keep its result instead of sending everything again.
    return functional.wait_tensor(functional.all_to_all_single(x.contiguous(), receive, send, group))
