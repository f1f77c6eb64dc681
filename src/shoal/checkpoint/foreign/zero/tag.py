"""Which folder a checkpoint of DeepSpeed's is in, and which of its files are which. None of them is opened."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from shoal.errors import CheckpointError
from shoal.plain_file import read_plain
from shoal.values import shown

_LATEST = ("latest", "latest_universal")
_MOST_TAG = 255
_OPTIM = re.compile(r"(bf16_|fp16_)?zero_pp_rank_(\d{1,7})_mp_rank_(\d{1,7})_optim_states\.pt")
_MODEL = re.compile(r"(?:zero_pp_rank_(\d{1,7})_)?mp_rank_(\d{1,7})_model_states\.pt")
_EXPERTS = re.compile(r"expp_rank_.*_optim_states\.pt|(?:layer_.*_)?expert_.*_model_states\.pt")
_LAYERS = re.compile(r"layer_\d+-.*model_states\.pt")


@dataclass(frozen=True)
class Tag:
    """One checkpoint: a file for each process, in the order of their ranks."""

    folder: Path
    optim: tuple[Path, ...]
    model: tuple[Path, ...]  # with ZeRO 1 and 2 one; none where a universal folder was copied without it
    each_has_a_part: bool  # ZeRO 3: the files of the model are one for each process too
    universal: bool


def tag_of(folder: Path) -> Path | None:
    """The folder of the checkpoint, which may be named by a file beside it; None where DeepSpeed has saved nothing."""
    if _is_tag(folder):
        return folder
    for name in _LATEST:
        if not (folder / name).is_file():
            continue
        try:
            said = read_plain(folder / name, _MOST_TAG).decode(errors="replace").strip()
        except OSError as e:
            raise CheckpointError(f"{folder / name} cannot be read ({e.strerror or e}): copy the folder again.") from e
        if os.path.basename(said) != said or said in ("", ".", "..") or "\0" in said:
            raise CheckpointError(
                f"{folder / name} names {shown(said)}, which is no folder beside it: name the folder of the checkpoint "
                "itself."
            )
        if _is_tag(folder / said):
            return folder / said
        raise CheckpointError(
            f"{folder / name} names {shown(said)}, which is not there, or holds no checkpoint of ZeRO's: copy the "
            "whole folder again, or name the folder of another checkpoint in it."
        )
    return None


def open_tag(folder: Path) -> Tag:
    """Its files, if they are all of one checkpoint that was not cut by more than ZeRO."""
    universal = (folder / "zero").is_dir()
    optim: dict[int, Path] = {}
    model: dict[int, Path] = {}
    kinds, parts = set(), set()
    for name in sorted(os.listdir(folder)):
        if not universal and _EXPERTS.fullmatch(name):
            raise _cut(folder, name, "experts on processes of their own")
        if not universal and _LAYERS.fullmatch(name):
            raise _cut(folder, name, "layers on the stages of a pipeline")
        if found := _OPTIM.fullmatch(name):
            kind, rank, column, into = found[1], int(found[2]), int(found[3]), optim
            kinds.add(kind)
        elif found := _MODEL.fullmatch(name):
            rank, column, into = int(found[1] or 0), int(found[2]), model
            parts.add(found[1] is not None)
        else:
            continue
        if column and universal:
            continue  # what it was made of; the tensors themselves are whole
        if column:
            raise _cut(folder, name, "tensors cut over several processes (tensor or pipeline parallel)")
        if rank in into:
            raise CheckpointError(
                f"{folder} has {into[rank].name} and {name}, files of two checkpoints: sort them out."
            )
        into[rank] = folder / name
    if len(kinds) > 1 or len(parts) > 1:
        raise CheckpointError(
            f"{folder} has files of two kinds of checkpoints, one written over another: sort them out."
        )
    for files, what in ((optim, "optim_states"), (model, "model_states")):
        if files and max(files) != len(files) - 1:
            lost = next(rank for rank in range(len(files)) if rank not in files)
            raise CheckpointError(
                f"{folder} lacks the {what} file of rank {lost}, and has that of rank {max(files)}: copy those of all "
                "nodes into it."
            )
    if not universal:
        _check_counts(folder, len(optim), len(model), parts == {True})
    return Tag(folder, _in_order(optim), _in_order(model), parts == {True}, universal)


def _check_counts(folder: Path, optim: int, model: int, parts: bool) -> None:
    if not optim:
        raise CheckpointError(
            f"{folder} has no optim_states file of ZeRO's: it was saved without ZeRO (its weights are in "
            "mp_rank_00_model_states.pt), or those of the other nodes were not copied."
        )
    if not model or (parts and model != optim):
        raise CheckpointError(
            f"{folder} has {optim} optim_states and {model} model_states files, where there is "
            f"{'one of each for each process' if parts or not model else 'one'}: copy those of all nodes into it."
        )


def _is_tag(folder: Path) -> bool:
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as e:
        raise CheckpointError(f"{folder} cannot be read ({e.strerror or e}): copy the folder again.") from e
    universal = "zero" in names and any(folder.glob("zero/*/fp32.pt"))
    return universal or any(_OPTIM.fullmatch(name) or _MODEL.fullmatch(name) for name in names)


def _cut(folder: Path, name: str, what: str) -> CheckpointError:
    return CheckpointError(
        f"{folder} has {shown(name)}: {what}, which Shoal does not put together; merge it with DeepSpeed's own "
        "ds_to_universal.py, and import what that writes."
    )


def _in_order(files: dict[int, Path]) -> tuple[Path, ...]:
    return tuple(files[rank] for rank in sorted(files))
