"""A Hugging Face folder whose weights are `pytorch_model*.bin`: what `torch.save` writes, read without an unpickler.

transformers wrote these until 2024. Colossal-AI does by `booster.save_model(model, folder, shard=True)`, unless told
`use_safetensors=True`. A file is a table of names and tensors; each tensor is read when its turn comes.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch

from shoal.checkpoint.foreign.blob import Blob
from shoal.checkpoint.foreign.incoming import Box, Incoming
from shoal.checkpoint.foreign.inert import Refused
from shoal.checkpoint.layout import DTYPES
from shoal.errors import DataError
from shoal.model.hf_files import weight_map
from shoal.plain_file import open_plain
from shoal.values import shown

SINGLE, INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
_COMPUTED, _HEAD = "rotary_emb.inv_freq", "lm_head.weight"
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def has_bins(folder: Path) -> bool:
    """Whether its weights are these, and there are none as safetensors, which are better."""
    safe = any(folder.glob("*.safetensors"))
    return not safe and any((folder / name).is_file() for name in (SINGLE, INDEX))


def of_bins(folder: Path, stack: ExitStack, tied: bool) -> dict[str, Incoming]:
    """Every tensor by its name; files stay open with the stack. `tied`: the head is the embedding, and torch saves it
    under both names."""
    said = _said(folder)
    found: dict[str, Incoming] = {}
    for file in sorted(set(said.values())) if said else [SINGLE]:
        for name, incoming in _of_file(folder / file, stack).items():
            if name in found:
                raise DataError(f"{folder} has {shown(name)} in two files: get the model again.")
            found[name] = incoming
    if said and (missing := [name for name in said if name not in found]):
        raise DataError(f"{folder / INDEX} names {shown(missing[0])}, which no file has: get the model again.")
    computed = [n for n in found if n.endswith(_COMPUTED) or (tied and n == _HEAD)]
    return {name: incoming for name, incoming in found.items() if name not in computed}


def _said(folder: Path) -> dict[str, str]:
    """Which file each tensor is in, by the index; empty where there is one file alone."""
    index = folder / INDEX
    if not index.is_file():
        return {}
    names = weight_map(index)
    if other := [name for name in names.values() if not name.endswith(".bin")]:
        raise DataError(f"{index} names {shown(other[0])}, which is no .bin file: get the model again.")
    return names


def _of_file(file: Path, stack: ExitStack) -> dict[str, Incoming]:
    try:
        fd = open_plain(file)
        stack.callback(os.close, fd)
        blob = Blob(fd, 0, os.fstat(fd).st_size)
        tensors = blob.table()
    except OSError as e:
        raise DataError(f"{file} cannot be read ({e.strerror or e}): get the model again.") from None
    except Refused as e:
        raise DataError(f"{file} is not read: {e}.") from None
    incoming = {}
    for name, (dtype, shape) in tensors.items():
        if dtype not in _FLOATS:
            continue  # a count or a mask that a class of transformers keeps beside its weights
        box = Box((0,) * len(shape), shape, partial(_read, blob, file, name))
        incoming[name] = Incoming(DTYPES[dtype], shape, (box,))
    return incoming


def _read(blob: Blob, file: Path, name: str) -> torch.Tensor:
    try:
        part = blob.of_table(name)
    except Refused as e:
        raise DataError(f"{file}: {shown(name)} is not read: {e}.") from None
    if not part.isfinite().all():
        raise DataError(f"{file}: {shown(name)} holds NaN or infinity: get the model again.")
    return part
