"""Tensor parallelism of a class of transformers, by the plan that the class brings (`shoal.parallel.class_plan`).

A parameter that the plan cuts is a DTensor with this process's part, all others are DTensors that everybody holds
whole. The class's own code computes with plain tensors, what is here of each: while the net or one of its blocks runs,
its parameters are swapped for their local parts, so that code which reads a parameter of a submodule finds the same.
Modules that the plan names meet the other processes at their ends (`shoal.parallel.seams`). Hidden states are whole on
every process between them: unlike Shoal's own blocks, a class knows nothing of stretches of a sequence.

What is whole everywhere has its whole gradient everywhere, as all processes compute alike; only what is used for a
part (norms inside heads) has a part of it. Whether a plan says so of all that needs it is tried (`class_tried`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from shoal.errors import SpecError
from shoal.model.head import NO_TARGET
from shoal.model.hf_any import Hf, head_of
from shoal.model.own_model import OwnModel
from shoal.model.packed import MATRICES
from shoal.parallel import vocabulary
from shoal.parallel.class_ends import meet
from shoal.parallel.class_plan import STYLES, Style, general, plan_of, style_of
from shoal.parallel.seams import dealt_out

LEAST_SHARE = 0.5
"""Of the weights' bytes. What is not cut is held, computed and updated by every process of the axis: with less than
half of it cut, two processes hold more than three quarters each, where dp_shard leaves each a half."""


@dataclass(frozen=True)
class Cut:
    """How much of a net is cut over the axis."""

    parameters: int
    of_parameters: int
    share: float  # of the bytes
    left: tuple[str, ...] = ()  # what the plan would cut, and whose width does not divide
    packed: str | None = None  # a parameter whose part here is two stretches

    def __str__(self) -> str:
        left = f" ({', '.join(self.left)} stays whole, as its width does not divide)" if self.left else ""
        percent = int(100 * self.share)  # never 100 where something is whole
        return f"{self.parameters} of {self.of_parameters} parameters, {percent}% of the weights' bytes{left}"


@dataclass(frozen=True)
class _Held:
    """A parameter where a module has it."""

    name: str  # in the net
    module: nn.Module
    own: str  # its name in the module
    style: Style


def split(model: OwnModel, mesh: DeviceMesh, called: str) -> Cut:
    """Cut a net that is whole over the axis of `mesh`, before it is recomputed, compiled or sharded. `called`: as
    messages name it."""
    plan, size = plan_of(model.net), mesh.size()
    if unknown := sorted(set(plan.values()) - STYLES.keys()):
        raise SpecError(f"{called}: its plan for tensor parallelism says {unknown[0]}, which Shoal does not know: "
                        "take dp_shard.")  # fmt: skip
    plan = _tied(model.net, plan)
    _refuse_uneven_heads(model.net, plan, size, called)
    left = _left_whole(model.net, plan, size)
    held = [_Held(*at, _style(plan, at[0], left)) for at in _parameters(model.net)]
    cut = _counted(held, left)
    if cut.share < LEAST_SHARE:
        raise SpecError(f"{called}: its plan for tensor parallelism cuts {cut}, and all else would be computed on each "
                        f"of {size} processes; take dp_shard.")  # fmt: skip
    laid: dict[nn.Parameter, nn.Parameter] = {}
    for at in held:
        whole = at.module._parameters[at.own]
        assert whole is not None
        if whole not in laid:
            laid[whole] = _laid(whole, _placement(at, whole, size, called), mesh)
        at.module._parameters[at.own] = laid[whole]
    for name, module in model.net.named_modules():
        style = plan.get(general(name))
        if style is not None and name not in left:
            meet(module, STYLES[style], mesh, f"{called}: {name}", model.net)
    inside = {id(module) for block in model.blocks.values() for module in block.modules()}
    for block in model.blocks.values():
        mine = {id(module) for module in block.modules()}
        _compute_with_parts(block, [at for at in held if id(at.module) in mine])
    _compute_with_parts(model, [at for at in held if id(at.module) not in inside])
    head = head_of(model.net)
    if head is not None and any(at.module is head and _is_cut(at.module._parameters[at.own]) for at in held):
        assert isinstance(model.way, Hf)
        model.way.cross_entropy = partial(_summed_cross_entropy, mesh=mesh)
    return cut


def _parameters(net: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    for place, module in net.named_modules():
        for own, parameter in module.named_parameters(recurse=False):
            if parameter is not None:
                yield f"{place}.{own}".lstrip("."), module, own


def _tied(net: nn.Module, plan: dict[str, str]) -> dict[str, str]:
    """With both ends of a matrix that is embedding and head, where the plan names one."""
    said, first, last = dict(plan), None, head_of(net)
    if callable(get := getattr(net, "get_input_embeddings", None)):
        first = get()
    if first is None or last is None or getattr(last, "weight", None) is not first.weight:
        return said
    names = {id(module): general(name) for name, module in net.named_modules()}
    ends = names[id(first)], names[id(last)]
    if any(end in said for end in ends):
        said |= {ends[0]: "embedding_rowwise", ends[1]: "colwise_gather_output"}
    return said


def _left_whole(net: nn.Module, plan: dict[str, str], size: int) -> tuple[str, ...]:
    """Modules that meet nobody where they are left whole, and have to be: a vocabulary of an odd number of words."""
    left = []
    for name, module in net.named_modules():
        style = STYLES.get(plan.get(general(name), ""))
        if style is None or not style.alone or style.cut is None:
            continue
        widths = [p.shape[style.cut] for p in module.parameters(recurse=False) if p.ndim >= 2]
        if any(width % size for width in widths):
            left.append(name)
    return tuple(left)


def _style(plan: dict[str, str], name: str, left: tuple[str, ...]) -> Style:
    said = style_of(plan, name)
    return Style() if said is None or name.rpartition(".")[0] in left else STYLES[said]


def _placement(at: _Held, whole: Tensor, size: int, called: str) -> Placement:
    style = at.style
    if style.cut is None or (whole.ndim == 1 and not style.bias):
        return Replicate()
    dim = max(whole.ndim + style.cut, 0)
    if style.packed:
        if whole.ndim != 3:
            raise SpecError(f"{called}: its plan packs {MATRICES} matrices in {at.name}, which Shoal does for experts "
                            "alone: take dp_shard.")  # fmt: skip
        if whole.shape[dim] % (MATRICES * size) == 0:
            return _StridedShard(dim, split_factor=MATRICES)
    elif whole.shape[dim] % size == 0:
        return Shard(dim)
    raise SpecError(f"{called}: {at.name} of {list(whole.shape)} cannot be cut into {size} equal parts along dimension "
                    f"{dim}; take another mesh.tp, or dp_shard.")  # fmt: skip


def _laid(whole: nn.Parameter, placement: Placement, mesh: DeviceMesh) -> nn.Parameter:
    part, rank, size = whole.detach(), mesh.get_local_rank(), mesh.size()
    if isinstance(placement, _StridedShard):
        stretches = part.chunk(MATRICES, placement.dim)
        part = torch.cat([stretch.chunk(size, placement.dim)[rank] for stretch in stretches], placement.dim)
    elif isinstance(placement, Shard):
        part = part.chunk(size, placement.dim)[rank]
    part = part.clone(memory_format=torch.contiguous_format).to(mesh.device_type)
    laid = DTensor.from_local(
        part, mesh, [placement], run_check=False, shape=whole.shape, stride=whole.contiguous().stride()
    )
    return nn.Parameter(laid, requires_grad=whole.requires_grad)


def _is_cut(parameter: Tensor | None) -> bool:
    return isinstance(parameter, DTensor) and not parameter.placements[-1].is_replicate()


def _refuse_uneven_heads(net: nn.Module, plan: dict[str, str], size: int, called: str) -> None:
    """Of attention whose heads are dealt out: a width can divide where heads do not."""
    ends = {name.rpartition(".")[2] for name, style in plan.items() if style == "colwise"}
    config: Any = net.config
    settings = config.get_text_config() if hasattr(config, "get_text_config") else config
    for end, key in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
        heads = getattr(settings, key, None)
        if end in ends and isinstance(heads, int) and heads % size:
            raise SpecError(f"{called}: its {key} {heads} cannot be dealt out to mesh.tp {size}; take a divisor of "
                            f"{heads}, or dp_shard.")  # fmt: skip


def _counted(held: list[_Held], left: tuple[str, ...]) -> Cut:
    numbers: dict[Tensor, tuple[int, bool]] = {}
    for at in held:
        p = at.module._parameters[at.own]
        assert p is not None
        cut = at.style.cut is not None and not (p.ndim == 1 and not at.style.bias)
        numbers[p] = p.numel() * p.element_size(), cut
    total = sum(size for size, _ in numbers.values())
    mine = [size for size, cut in numbers.values() if cut]
    packed = next((at.name for at in held if at.style.packed), None)
    return Cut(len(mine), len(numbers), sum(mine) / max(total, 1), left, packed)


def _compute_with_parts(module: nn.Module, held: list[_Held]) -> None:
    inner = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        with _parts(held):
            return inner(*args, **kwargs)

    module.forward = forward


@contextmanager
def _parts(held: list[_Held]) -> Iterator[None]:
    whole: list[Any] = [at.module._parameters[at.own] for at in held]
    try:
        for at, parameter in zip(held, whole, strict=True):
            gradient = [Partial()] if at.style.partial else None
            at.module._parameters[at.own] = parameter.to_local(grad_placements=gradient)
        yield
    finally:
        for at, parameter in zip(held, whole, strict=True):
            at.module._parameters[at.own] = parameter


def _summed_cross_entropy(hidden: Tensor, rows: Tensor, targets: Tensor, mesh: DeviceMesh) -> Tensor:
    """Of hidden states [batch, seq, dim] that are whole here and these rows of the head. Its tokens are dealt out
    first: the loss over a cut vocabulary begins with stretches, and gathers a chunk at a time."""
    tokens, size = targets.flatten(), mesh.size()
    beyond = -len(tokens) % size
    flat = F.pad(hidden.flatten(0, -2), (0, 0, 0, beyond))
    stretch = dealt_out(flat, mesh, dim=0)[None]  # [1, tokens / tp, dim]
    weight = DTensor.from_local(rows, mesh, [Shard(0)], run_check=False)
    return vocabulary.summed_cross_entropy(stretch, weight, F.pad(tokens, (0, beyond), value=NO_TARGET)[None])
