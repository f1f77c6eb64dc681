"""A universal checkpoint of DeepSpeed's (`ds_to_universal.py`): a folder for each tensor, which is whole."""

from __future__ import annotations

import os
from pathlib import Path

from shoal.checkpoint.foreign.inert import Refused
from shoal.checkpoint.foreign.zero.flat import incoming
from shoal.checkpoint.foreign.zero.module import Module, read_module
from shoal.checkpoint.foreign.zero.ranks import MOMENTS
from shoal.checkpoint.foreign.zero.state_file import about, opened
from shoal.checkpoint.foreign.zero.tag import Tag
from shoal.checkpoint.foreign.zero.weights import Taken, add_others, check_budget, moment
from shoal.checkpoint.grids import Dims
from shoal.checkpoint.layout import TORCH_DTYPES

_WEIGHT = "fp32"


def of_universal(tag: Tag) -> Taken:
    module = read_module(tag)
    taken = Taken(counters=module.counters)
    shapes, read_bytes = module.shapes, module.bytes
    with about(tag.folder / "zero"):
        names = sorted(entry.name for entry in os.scandir(tag.folder / "zero") if entry.is_dir())
        if any(name.encode(errors="replace").decode() != name for name in names):
            raise Refused("it has a folder whose name is no text")
    for name in names:
        if name in module.buffers and not _is_float(module, name):
            continue  # it became one on the way; told with the others
        for key in (_WEIGHT, *MOMENTS):
            file = tag.folder / "zero" / name / f"{key}.pt"
            if key == _WEIGHT or file.exists():
                read_bytes += _add(taken, name, key, file, shapes.get(name))
    with about(tag.folder):
        add_others(module, tag.each_has_a_part, taken)
        check_budget(taken, read_bytes)
    return taken


def _add(taken: Taken, name: str, key: str, file: Path, shape: Dims | None) -> int:
    with opened(file) as state:
        told = isinstance(state.value, dict)
        stored = state.tensor(state.value.get("param") if told else state.value)
        if not told and shape is None:  # of ZeRO 3: the numbers alone, in a row
            raise Refused("its shape is in no model_states file beside the folder 'zero': copy the whole folder again")
        if not TORCH_DTYPES[stored.dtype].is_floating_point:
            raise Refused(f"it holds {stored.dtype}, where a tensor of floats should be")
        whole = stored.shape if told else shape
        assert whole is not None
        tensor = incoming(whole, stored)
        if key != _WEIGHT and (weight := taken.tensors[name]).shape != tensor.shape:
            raise Refused(f"its shape is {list(tensor.shape)}, and that of the weight {list(weight.shape)}")
        taken.tensors[name if key == _WEIGHT else moment(name, key)] = tensor
        return state.bytes


def _is_float(module: Module, name: str) -> bool:
    return name not in module.others or TORCH_DTYPES[module.others[name].dtype].is_floating_point
