"""Folders in the shape that DeepSpeed gives them, written here with `torch.save` and without DeepSpeed, so that one
thing in them can be wrong."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

TAG = "global_step7"
Files = dict[str, Any]  # name → what is saved in it


def zero_files(
    stage: int,
    world: int,
    groups: Sequence[Mapping[str, Tensor]],
    frozen: Mapping[str, Tensor] | None = None,
    shared: Mapping[str, str] | None = None,
    buffers: Mapping[str, Tensor] | None = None,
) -> Files:
    """What `engine.save_checkpoint` saves. A moment of a tensor is its number plus 1, or plus 2."""
    frozen, shared, buffers = frozen or {}, shared or {}, buffers or {}
    state: dict[str, Any] = {
        "buffer_names": [*buffers],
        "param_shapes": [OrderedDict((name, t.shape) for name, t in group.items()) for group in groups],
        "frozen_param_shapes": OrderedDict((name, t.shape) for name, t in frozen.items()),
        "shared_params": dict(shared),
        "global_steps": 7,
        "mp_world_size": 1,
    }
    whole = {**buffers, **frozen, **{name: t for group in groups for name, t in group.items()}}
    empty = {name: torch.empty(0) for name in whole} | dict(buffers)
    files: Files = {}
    for rank in range(world):
        if stage == 3:
            fragments = {name: _part(t, world, rank) for name, t in frozen.items()}
            model = {**deepcopy(state), "module": OrderedDict(empty), "frozen_param_fragments": fragments}
            files[f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"] = model
        elif rank == 0:
            model = {**deepcopy(state), "module": OrderedDict(whole), "frozen_param_fragments": dict(frozen)}
            files["mp_rank_00_model_states.pt"] = model
        rows = [_row(stage, list(group.values()), world, rank) for group in groups]
        moments = {
            group: {"step": torch.tensor(7.0), "exp_avg": row + 1, "exp_avg_sq": row + 2}
            for group, (row, _) in enumerate(rows)
        }
        lean = [torch.nn.Parameter(row[: max(0, len(row) - padding)]) for row, padding in rows]
        groups_key = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
        base_key = "optimizer_state_dict" if stage == 3 else "base_optimizer_state"
        held = {groups_key: lean, base_key: {"state": moments}, "zero_stage": stage}
        held["partition_count"] = world if stage == 3 else [world] * len(groups)
        files[f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"] = {"optimizer_state_dict": held}
    return files


def write(folder: Path, files: Files, latest: str | None = TAG) -> Path:
    (folder / TAG).mkdir(parents=True)
    for name, value in files.items():
        torch.save(value, folder / TAG / name)
    if latest is not None:
        (folder / "latest").write_text(latest)
    return folder


def write_universal(folder: Path, tensors: Mapping[str, Tensor], bare: bool = False) -> Path:
    """What `ds_to_universal.py` makes: of ZeRO 1 and 2, or (bare) of ZeRO 3, which has the shapes elsewhere."""
    for name, tensor in tensors.items():
        (folder / TAG / "zero" / name).mkdir(parents=True)
        for more, key in enumerate(("fp32", "exp_avg", "exp_avg_sq")):
            value = (tensor + more).flatten() if bare else {"param": tensor + more, "cat_dim": 0}
            torch.save(value, folder / TAG / "zero" / name / f"{key}.pt")
    (folder / "latest_universal").write_text(TAG)
    return folder


def _row(stage: int, tensors: Sequence[Tensor], world: int, rank: int) -> tuple[Tensor, int]:
    """What a process has of a group, and how much of it at the end is padding that is not saved."""
    if stage == 3:
        return torch.cat([_part(t, world, rank) for t in tensors]), 0
    flat = torch.cat([t.flatten() for t in tensors])
    filled = torch.cat([flat, torch.zeros(-len(flat) % (2 * world))])
    padding = (len(filled) - len(flat)) if rank == world - 1 else 0
    return filled.chunk(world)[rank].clone(), padding


def _part(tensor: Tensor, world: int, rank: int) -> Tensor:
    each = math.ceil(tensor.numel() / world)
    filled = torch.cat([tensor.flatten(), torch.zeros(each * world - tensor.numel())])
    return filled.view(world, each)[rank].clone()
