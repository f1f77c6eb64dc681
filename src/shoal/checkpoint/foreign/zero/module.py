"""What the model's files of a checkpoint say: which tensors lie in the flat groups, in which order, and all that is not
in them: frozen tensors, buffers, other names of a tensor."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from shoal.checkpoint.foreign.inert import Made, Refused
from shoal.checkpoint.foreign.zero.state_file import StateFile, Stored, listed, opened, shape_of, table
from shoal.checkpoint.foreign.zero.tag import Tag
from shoal.checkpoint.grids import Dims
from shoal.values import shown, whole

_COUNTERS = ("global_steps", "global_samples", "skipped_steps")
_EXPERTS = ("ds_autoep_layers", "autoep_layers")


@dataclass
class Module:
    groups: list[dict[str, Dims]] = field(default_factory=list)  # the trained tensors of each, in their order
    frozen: dict[str, Dims] = field(default_factory=dict)
    pieces: list[dict[str, Stored]] = field(default_factory=list)  # of frozen tensors: what each file has of them
    shared: dict[str, str] = field(default_factory=dict)  # another name → the name of a tensor
    others: dict[str, Stored] = field(default_factory=dict)  # whole in the state dict, whatever else they are
    buffers: frozenset[str] = frozenset()
    no_tensors: tuple[str, ...] = ()  # what else is in it
    counters: dict[str, int] = field(default_factory=dict)
    bytes: int = 0  # of its files

    @property
    def shapes(self) -> dict[str, Dims]:
        """Of all that has one."""
        return {name: shape for group in [*self.groups, self.frozen] for name, shape in group.items()}


def read_module(tag: Tag) -> Module:
    module = Module()
    for rank, file in enumerate(tag.model):
        with opened(file) as state:
            module.bytes += state.bytes
            fields = table(state.value, "content")
            if not tag.universal:
                _check_whole(fields)
            groups, frozen = _groups(fields), _shapes(fields.get("frozen_param_shapes"), "frozen_param_shapes")
            if rank == 0:
                module.groups, module.frozen = groups, frozen
                _read_first(state, fields, module, tag.each_has_a_part)
            elif (groups, frozen, _counters(fields)) != (module.groups, module.frozen, module.counters):
                raise Refused(f"it is of another model or step than {tag.model[0].name}")
            fragments = table(fields.get("frozen_param_fragments") or {}, "frozen_param_fragments")
            if fragments.keys() != frozen.keys():
                raise Refused("its frozen_param_fragments are not those of its frozen_param_shapes")
            module.pieces.append({name: state.tensor(value) for name, value in fragments.items()})
    return module


def _read_first(state: StateFile, fields: dict[str, Any], module: Module, in_parts: bool) -> None:
    names = Counter(name for group in [*module.groups, module.frozen] for name in group)
    if len(names) != names.total():
        raise Refused(f"its shapes name {shown(names.most_common(1)[0][0])} twice")
    module.counters = _counters(fields)
    module.buffers = frozenset(str(name) for name in listed(fields.get("buffer_names") or [], "buffer_names"))
    for name, of in table(fields.get("shared_params") or {}, "shared_params").items():
        if not isinstance(of, str):
            raise Refused(f"its shared_params say no name for {shown(name)}")
        module.shared[name] = of
    no_tensors = []
    for name, value in table(fields.get("module") or {}, "module").items():
        if in_parts and name not in module.buffers:
            continue  # with ZeRO 3 an empty place
        if not isinstance(value, Made) or "_rebuild" not in value.what.name:
            no_tensors.append(name)
        else:
            module.others[name] = state.tensor(value)
    module.no_tensors = tuple(no_tensors)


def _check_whole(fields: dict[str, Any]) -> None:
    if fields.get("param_shapes") is None:
        raise Refused("it has no param_shapes, so it was saved without ZeRO, or by DeepSpeed before 0.5")
    if (cut := fields.get("mp_world_size", 1)) not in (None, 1):
        raise Refused(
            f"its tensors were cut over {shown(cut)} processes (tensor parallel), which Shoal does not put together; "
            "merge it with DeepSpeed's own ds_to_universal.py, and import what that writes"
        )
    if any(fields.get(key) for key in _EXPERTS):
        raise Refused(
            "its experts are on processes of their own, which Shoal does not put together; merge it with DeepSpeed's "
            "own ds_to_universal.py, and import what that writes"
        )


def _groups(fields: dict[str, Any]) -> list[dict[str, Dims]]:
    said = fields.get("param_shapes")
    said = [said] if isinstance(said, dict) else said  # one group, as it was before 0.5.4
    return [_shapes(group, "param_shapes") for group in listed(said or [], "param_shapes")]


def _shapes(said: Any, what: str) -> dict[str, Dims]:
    return {name: shape_of(value, name) for name, value in table(said or {}, what).items()}


def _counters(fields: dict[str, Any]) -> dict[str, int]:
    return {key: whole(fields[key]) for key in _COUNTERS if type(fields.get(key)) is int}
