"""Counts what a step sends: calls and bytes of every collective, by the axis of the mesh that it serves.

One step of an attempt runs under a dispatch mode that sees each communication operator with its tensors and its group,
whoever calls it: FSDP and the pipeline from Python, DDP's reducer and DTensor from C++, forward, backward, recomputed
or inside a compiled block. Ordinary steps run without it and pay nothing (docs/decisions/015).

Bytes are what this process puts on the wire with an algorithm that wastes nothing, for a group of n:

    all_gather       what it receives from others     (n-1)/n of the output
    reduce_scatter   what it sends to others          (n-1)/n of the input
    all_reduce       both of them                     2(n-1)/n of the tensor
    all_to_all       what it sends to others          its input without its own part
    send             the message (a receive is not counted: it is somebody's send)
    broadcast, scatter: what it receives; reduce, gather: what it sends; nothing at the root
"""

from __future__ import annotations

import contextlib
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shoal.parallel.place import Place

Row = dict[str, Any]
Args = dict[str, Any]
LAZY_STEPS = 2  # the first step sets FSDP and the pipeline up, DDP orders its buckets anew before the second
EVERY_STEPS = 500  # with experts, whose traffic follows the router
OURS = "shoal"  # namespace of operators
ALL = "all"  # the group of all processes: sums of losses, norms and counts


def due(steps_of_attempt: int, steps_left: int, varies: bool) -> bool:
    """Whether to count the step after `steps_of_attempt` steps of this attempt, when `steps_left` remain with it."""
    if steps_of_attempt <= LAZY_STEPS:
        return steps_of_attempt == LAZY_STEPS or steps_left == 1
    return varies and steps_of_attempt % EVERY_STEPS == 0


@dataclass
class Counter:
    """What this process sends while `counting`."""

    place: Place
    _axes: dict[str, str] = field(init=False)  # name of a process group → axis
    _seen: dict[tuple[str, str, int], list[float]] = field(init=False)  # (axis, op, group size) → [calls, bytes]

    def __post_init__(self) -> None:
        self._axes = axes(self.place)
        self._seen = {}

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Around one step's computation. What was counted before is forgotten."""
        self._seen = defaultdict(lambda: [0, 0.0])
        with _Mode(self._add):
            yield

    def table(self) -> list[Row]:
        """One row for each axis and kind of operator, by name: {axis, op, group, calls, bytes} of this process."""
        return [
            {"axis": axis, "op": op, "group": group, "calls": int(calls), "bytes": round(size)}
            for (axis, op, group), (calls, size) in sorted(self._seen.items())
        ]

    def _add(self, op: str, group: dist.ProcessGroup, size_bytes: float) -> None:
        axis = self._axes.get(group.group_name) or group.group_desc or "other"
        row = self._seen[axis, op, group.size()]
        row[0] += 1
        row[1] += size_bytes


def axes(place: Place) -> dict[str, str]:
    """Process group → axis. Axes that share a group share a row, with both names."""
    if place.world == 1:
        return {}
    names: dict[str, list[str]] = defaultdict(list)
    for mesh, prefix in ((place.dense, ""), (place.expert, "expert ")):
        if mesh is None:
            continue
        for i, dim in enumerate(mesh.mesh_dim_names or ()):
            if mesh.size(i) > 1 and not (prefix and dim == "pp"):
                names[mesh.get_group(i).group_name].append(dim if dim == "ep" else prefix + dim)
    if place.context is not None:
        names[place.context.group_name].append("cp")
    world = dist.group.WORLD
    assert world is not None
    names.setdefault(world.group_name, [ALL])
    return {group: "=".join(dict.fromkeys(of)) for group, of in names.items()}


def together(table: list[Row]) -> list[Row]:
    """All processes' tables as one: `calls` and `bytes` are sums, `most_*` are of the busiest process. Collective."""
    merged: dict[tuple[str, str, int], Row] = {}
    for row in (row for part in _gathered(table) for row in part):
        key = row["axis"], row["op"], row["group"]
        so_far = merged.setdefault(key, {**row, "calls": 0, "bytes": 0, "most_calls": 0, "most_bytes": 0})
        for name in ("calls", "bytes"):
            so_far[name] += row[name]
            so_far[f"most_{name}"] = max(so_far[f"most_{name}"], row[name])
    return [merged[key] for key in sorted(merged)]


def _gathered(table: list[Row]) -> list[list[Row]]:
    """The tables travel as JSON: their rows differ from stage to stage, and no pickle is ever loaded."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [table]
    text = json.dumps(table).encode()
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([len(text)]))
    longest = max(int(size) for size in sizes)
    parts = [torch.zeros(longest, dtype=torch.uint8) for _ in sizes]
    dist.all_gather(parts, torch.frombuffer(bytearray(text.ljust(longest)), dtype=torch.uint8))
    return [json.loads(bytes(part.tolist())) for part in parts]


class _Mode(TorchDispatchMode):
    """Tells `add` of each communication operator, and runs everything as it would run without."""

    supports_higher_order_operators = True

    def __init__(self, add: Callable[[str, dist.ProcessGroup, float], None]) -> None:
        super().__init__()
        self._add = add

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # compiled blocks stay compiled; what they send is still seen, when it is sent

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # DTensor first: it turns the operator into local ones and what it sends for them
        kwargs = kwargs or {}
        if not isinstance(func, torch._ops.OpOverload):
            return func(*args, **kwargs)
        if func.namespace == OURS:
            # Operators of our own send from within, where this mode would be off: on again, past itself.
            with self:
                return func.redispatch(_below(args, kwargs), *args, **kwargs)
        if (found := _counted(func)) is not None:
            op, bytes_of, names = found
            by_name = {**dict(zip(names, args, strict=False)), **kwargs}
            group = _group(by_name.get("process_group", by_name.get("group_name")))
            if group.size() > 1:
                self._add(op, group, bytes_of(by_name, group))
        return func(*args, **kwargs)


def _below(*arguments: Any) -> torch._C.DispatchKeySet:
    """The dispatch keys that follow the modes': those of all tensors among the arguments, in lists as well. Without
    any tensor no key is left, and the operator's kernel for every device runs."""
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.Undefined)
    for leaf in tree_leaves(arguments):
        if isinstance(leaf, torch.Tensor):
            keys = keys | torch._C._dispatch_keys(leaf)
    return keys & torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.Python)


Bytes = Callable[[Args, dist.ProcessGroup], float]


@cache
def _counted(func: torch._ops.OpOverload) -> tuple[str, Bytes, list[str]] | None:
    """(what it is called here, its bytes, its arguments' names); None when it does not communicate."""
    if func.namespace not in ("c10d", "_c10d_functional", "_c10d_functional_autograd", "c10d_functional"):
        return None
    name = func._schema.name.split("::")[1].strip("_").removesuffix("_out")
    if name not in _OPERATORS:
        return None
    op, bytes_of = _OPERATORS[name]
    return op, bytes_of, [argument.name for argument in func._schema.arguments]


def _group(given: Any) -> dist.ProcessGroup:
    if isinstance(given, str):
        return dist.distributed_c10d._resolve_process_group(given)  # type: ignore[arg-type]  # a str by another name
    return given if isinstance(given, dist.ProcessGroup) else dist.ProcessGroup.unbox(given)


def _size(value: Any) -> int:
    """Bytes of a tensor, or of all tensors in nested lists."""
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    return sum(_size(v) for v in value) if isinstance(value, Iterable) else 0


def _first(a: Args, *names: str) -> int:
    return next(_size(a[name]) for name in names if a.get(name) is not None)


def _input(a: Args) -> int:
    return _first(a, "input_tensor", "input_tensors", "input_list", "inputs", "input", "tensors", "tensor")


def _all_gather(a: Args, group: dist.ProcessGroup) -> float:
    if "output_tensors" in a or "output_lists" in a:  # lists, whose members may differ in size
        return _first(a, "output_tensors", "output_lists") - _input(a)
    return (group.size() - 1) * _input(a)


def _reduce_scatter(a: Args, group: dist.ProcessGroup) -> float:
    if "output_tensors" in a:
        return _input(a) - _size(a["output_tensors"])
    return _input(a) * (group.size() - 1) / group.size()


def _all_reduce(a: Args, group: dist.ProcessGroup) -> float:
    return 2 * _input(a) * (group.size() - 1) / group.size()


def _all_to_all(a: Args, group: dist.ProcessGroup) -> float:
    if "input_tensors" in a:
        return _size(a["input_tensors"]) - _size(a["input_tensors"][group.rank()])
    splits = a.get("input_split_sizes")
    if not splits:
        return _input(a) * (group.size() - 1) / group.size()
    rows = sum(splits)
    return _input(a) * (rows - splits[group.rank()]) / rows if rows else 0


def _unless_root(a: Args, group: dist.ProcessGroup) -> float:
    return 0 if group.rank() == a.get("root_rank", a.get("src")) else _input(a)


def _received(a: Args, group: dist.ProcessGroup) -> float:
    return 0 if group.rank() == a["root_rank"] else _size(a["output_tensors"])


def _message(a: Args, group: dist.ProcessGroup) -> float:
    return _input(a)


def _nothing(a: Args, group: dist.ProcessGroup) -> float:
    return 0


# By the operator's name without leading and trailing underscores. Receives and waits are not here.
_OPERATORS: dict[str, tuple[str, Bytes]] = {
    **dict.fromkeys(
        (
            "allgather_base",
            "allgather",
            "allgather_coalesced",
            "allgather_into_tensor_coalesced",
            "all_gather_into_tensor",
            "all_gather_into_tensor_coalesced",
        ),
        ("all_gather", _all_gather),
    ),
    **dict.fromkeys(
        (
            "reduce_scatter_base",
            "reduce_scatter",
            "reduce_scatter_tensor",
            "reduce_scatter_tensor_coalesced",
        ),
        ("reduce_scatter", _reduce_scatter),
    ),
    **dict.fromkeys(
        ("allreduce", "allreduce_coalesced", "all_reduce", "all_reduce_coalesced"), ("all_reduce", _all_reduce)
    ),
    **dict.fromkeys(("alltoall", "alltoall_base", "all_to_all_single"), ("all_to_all", _all_to_all)),
    **dict.fromkeys(("send", "isend"), ("send", _message)),
    "broadcast": ("broadcast", _unless_root),
    "reduce": ("reduce", _unless_root),
    "gather": ("gather", _unless_root),
    "scatter": ("scatter", _received),
    "barrier": ("barrier", _nothing),
}
