"""What the modules of a class do with their input and output where their parameters are cut (`class_plan.Way`)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shoal.errors import SpecError
from shoal.parallel.class_plan import Style
from shoal.parallel.seams import dealt_out, joined, shared, summed

Forward = Callable[..., Any]


def meet(module: nn.Module, style: Style, mesh: DeviceMesh, called: str, net: nn.Module) -> None:
    """Wrap the forward of one module, whose parameters are laid out already."""
    inner: Forward = module.forward
    match style.way:
        case "shared in":
            wrapped = partial(_shared_in, inner, mesh)
        case "joined out":
            wrapped = partial(_joined_out, inner, mesh)
        case "summed out" if style.cut is None:
            wrapped = partial(_summed_out, inner, mesh)
        case "summed out" | "dealt in":
            if not isinstance(module, nn.Linear) or type(module).forward is not nn.Linear.forward:
                raise SpecError(f"{called} is a {type(module).__name__}, whose input its plan cuts, which Shoal does "
                                "for nn.Linear: take dp_shard.")  # fmt: skip
            wrapped = partial(_product, module, mesh, style.way == "dealt in")
        case "rows":
            wrapped = partial(_rows, module, inner, mesh, _first_row(module, mesh, called))
        case "rope":
            wrapped = partial(_rope, inner, mesh, _rope_width(net, called))
        case "experts":
            if all(_whole(p) for p in module.parameters()):
                return
            wrapped = partial(_experts, inner, mesh)
        case "share":
            wrapped = partial(_share, inner, mesh)
        case "as it is":
            return
    module.forward = wrapped


def _shared_in(inner: Forward, mesh: DeviceMesh, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    return inner(shared(x, mesh), *args, **kwargs)


def _joined_out(inner: Forward, mesh: DeviceMesh, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return joined(inner(shared(x, mesh) if x.is_floating_point() else x, *args, **kwargs), mesh)


def _summed_out(inner: Forward, mesh: DeviceMesh, *args: Any, **kwargs: Any) -> Tensor:
    return summed(inner(*args, **kwargs), mesh)


def _product(module: nn.Linear, mesh: DeviceMesh, whole: bool, x: Tensor) -> Tensor:
    """Of this process's columns; the bias is everybody's, and added once."""
    part = F.linear(dealt_out(x, mesh) if whole else x, module.weight)
    total = summed(part, mesh)
    return total if module.bias is None else total + module.bias.to(total.dtype)


def _rows(table: nn.Module, inner: Forward, mesh: DeviceMesh, first: int, tokens: Tensor) -> Tensor:
    assert isinstance(table.weight, Tensor)
    rows = table.weight.shape[0]
    here = tokens - first
    mine = (here >= 0) & (here < rows)
    return summed(inner(here.where(mine, 0)).masked_fill(~mine[..., None], 0.0), mesh)


def _first_row(module: nn.Module, mesh: DeviceMesh, called: str) -> int:
    """Which row of the whole table is the first here. A row that is padding has no gradient, and only where it is."""
    if not isinstance(module, nn.Embedding) or module.max_norm is not None:
        raise SpecError(f"{called} is a {type(module).__name__}, whose rows its plan cuts, which Shoal does for "
                        "nn.Embedding without max_norm: take dp_shard.")  # fmt: skip
    rows = module.num_embeddings // mesh.size()
    first = mesh.get_local_rank() * rows
    if module.padding_idx is not None:
        here = module.padding_idx - first
        module.padding_idx = here if 0 <= here < rows else None
    return first


def _rope(inner: Forward, mesh: DeviceMesh, width: int, x: Tensor) -> Tensor:
    """Latent attention's one product for keys: what comes last is the keys' own rotary part, which each process uses
    for its heads; the rest goes on to a product that says so itself."""
    given: Tensor = inner(x)
    latent, rope = given.split([given.shape[-1] - width, width], dim=-1)
    return torch.cat([latent, shared(rope, mesh)], dim=-1)


def _rope_width(net: nn.Module, called: str) -> int:
    config: Any = net.config
    width = getattr(config.get_text_config(), "qk_rope_head_dim", None)
    if not isinstance(width, int):
        raise SpecError(f"{called}: its config has no qk_rope_head_dim, which its plan needs: take dp_shard.")
    return width


def _experts(inner: Forward, mesh: DeviceMesh, x: Tensor, *routing: Any, **more: Any) -> Tensor:
    """Each process has a part of every expert: of its tokens and their weights it knows a part of the gradient."""
    routing = tuple(_weights(given, mesh) for given in routing)
    more = {name: _weights(given, mesh) for name, given in more.items()}
    return summed(inner(shared(x, mesh), *routing, **more), mesh)


def _weights(given: Any, mesh: DeviceMesh) -> Any:
    return shared(given, mesh) if isinstance(given, Tensor) and given.is_floating_point() else given


def _share(inner: Forward, mesh: DeviceMesh, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """What every process does alike inside of experts, whose results are summed."""
    return inner(x / mesh.size(), *args, **kwargs)


def _whole(parameter: Tensor) -> bool:
    return not isinstance(parameter, DTensor) or parameter.placements[-1].is_replicate()
