"""The files of weights in a Hugging Face folder: opened as transformers chooses them, looked at before they are used.

Somebody else has written them: only plain files inside the folder are opened, every tensor is in one of them and of a
dtype that weights have, and what is read is finite.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from shoal.errors import DataError, SetupError
from shoal.plain_file import NotPlain, open_plain, read_object
from shoal.spec.hf.folder import CONFIG, read_config
from shoal.values import BadValue, inside, shown, table, text

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_DTYPES = ("F64", "F32", "F16", "BF16")
_MOST_INDEX_BYTES = 256 << 20  # that of a model of 61 layers with 384 experts has 15 MB
_MOST_TENSORS = 4_000_000
_MOST_NAME = 255  # of a file
_COMPUTED = "rotary_emb.inv_freq"  # what older transformers wrote, and every model makes by itself


@dataclass(frozen=True)
class Held:
    """An open file."""

    path: Path
    file: Any  # safetensors has no type for it

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.file.get_slice(name).get_shape())

    def dtype(self, name: str) -> str:
        return str(self.file.get_slice(name).get_dtype())

    def read(self, name: str, box: Any = ()) -> Tensor:
        """Some of a tensor, all of it finite: NaN and infinity stay in a sum, so only where that is not finite each
        is looked at. (A sum takes 0.3 ns a number, where reading and copying it take 2.)"""
        part: Tensor = self.file.get_slice(name)[box] if box != () else self.file.get_tensor(name)
        if not part.sum().isfinite() and not part.isfinite().all():
            raise DataError(f"{self.path}: {shown(name)} holds NaN or infinity: get the model again.")
        return part


def open_folder(folder: Path, stack: ExitStack) -> dict[str, Held]:
    """Every tensor's name to the open file that holds it."""
    if not folder.is_dir():
        raise SetupError(f"{folder} is not a folder here: give the folder of a Hugging Face model.")
    index, where = _files(folder)
    held: dict[str, Held] = {}
    for name in sorted(set(where.values()) if where else [index]):
        file = _open(folder, name, index, stack)
        for tensor in file.file.keys():  # noqa: SIM118  # it is no mapping
            if tensor.endswith(_COMPUTED):
                continue
            if tensor in held:
                raise DataError(
                    f"{folder} has the tensor {shown(tensor)} in {shown(held[tensor].path.name)} and in {shown(name)}: "
                    "get the model again."
                )
            held[tensor] = file
    for tensor, name in where.items():
        if tensor.endswith(_COMPUTED):
            continue
        if tensor not in held or held[tensor].path.name != name:
            raise DataError(
                f"{folder / index} names {shown(name)} for the tensor {shown(tensor)}, which is not in it: get the "
                "model again."
            )
    for tensor, file in held.items():
        if (dtype := file.dtype(tensor)) not in _DTYPES:
            raise DataError(
                f"{file.path}: {shown(tensor)} has the dtype {dtype}, and weights are {', '.join(_DTYPES)}: the model "
                "is quantised; dequantise it first."
            )
    return held


def _files(folder: Path) -> tuple[str, dict[str, str]]:
    """What transformers opens: the file that config.json names, else the single one, else those of the index. For an
    index, the file of each tensor."""
    if shards := sorted(p.name for p in folder.glob("shard-*-model-*-of-*.safetensors")):
        raise DataError(
            f"{folder} has {shown(shards[0])}, a part of a distributed save, which transformers reads first: "
            "save the model whole first."
        )
    chosen = None
    if (folder / CONFIG).exists():
        chosen = read_config(folder / CONFIG).get("transformers_weights")
    if chosen is not None:
        if not _is_name(chosen) or not chosen.endswith((".safetensors", ".safetensors.index.json")):
            raise DataError(
                f"{folder / CONFIG} has transformers_weights {shown(chosen)}, which is no safetensors file of this "
                "folder: get the model again."
            )
    else:
        chosen = next((name for name in (SINGLE, INDEX) if os.path.lexists(folder / name)), None)
    if chosen is None:
        if pickled := sorted(p.name for pattern in ("*.bin", "*.pt", "*.pth") for p in folder.glob(pattern)):
            raise DataError(
                f"{folder} has its weights in {shown(pickled[0])}, a pickle, which could run code: convert it to "
                "safetensors."
            )
        raise SetupError(f"{folder} has neither {SINGLE} nor {INDEX}: get the model's weights.")
    return chosen, weight_map(folder / chosen) if chosen.endswith(".json") else {}


def weight_map(index: Path) -> dict[str, str]:
    """The file of each tensor, by an index of safetensors or of pickles."""
    try:
        with inside("weight_map"):
            where = table(read_object(index, _MOST_INDEX_BYTES, _MOST_TENSORS).get("weight_map"), _MOST_TENSORS)
            names = {tensor: text(name, _MOST_NAME) for tensor, name in where.items()}
    except OSError as e:
        raise DataError(f"{index} cannot be read ({e.strerror or e}): get the model again.") from None
    except BadValue as e:
        raise DataError(f"{index} cannot be read as an index of weights ({e.reason}): get the model again.") from None
    if not names:
        raise DataError(f"{index} cannot be read as an index of weights (it names none): get the model again.")
    if outside := [name for name in names.values() if not _is_name(name)]:
        raise DataError(f"{index} names {shown(outside[0])!r}, which lies outside its folder: get the model again.")
    return names


def _is_name(said: object) -> bool:
    """Whether it can be the name of a file in a folder, and nothing else."""
    if not isinstance(said, str) or said in ("", ".", "..") or len(said) > _MOST_NAME:
        return False
    return said.isprintable() and "/" not in said and "\\" not in said  # no NUL, no half of a surrogate pair


def _open(folder: Path, name: str, index: str, stack: ExitStack) -> Held:
    path = folder / name
    try:
        os.close(open_plain(path))  # safetensors would wait at a FIFO for ever
        return Held(path, stack.enter_context(safe_open(path, framework="pt", device="cpu")))
    except FileNotFoundError:
        raise DataError(f"{folder / index} names {shown(name)}, which is not there: get the model again.") from None
    except NotPlain as e:
        raise DataError(f"{e}: get the model again.") from None
    except OSError as e:
        raise DataError(f"{path} cannot be read ({e.strerror or e}).") from None
    except SafetensorError as e:
        raise DataError(f"{path} is damaged ({shown(str(e))}): get the model again.") from None


def check_holds(folder: Path, held: Mapping[str, Held], wanted: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse a folder whose tensors are not exactly those of the model."""
    if missing := [name for name in wanted if name not in held]:
        raise DataError(
            f"{folder} lacks the tensor {missing[0]}{_more(missing)}: its config.json describes another model."
        )
    extra = [name for name in held if name not in wanted]
    if extra == ["lm_head.weight"]:  # a tied head that was written all the same
        if not _equal(held, "lm_head.weight", "model.embed_tokens.weight"):
            raise DataError(
                f"{folder} has a lm_head.weight of its own, but its config.json says that the head is tied."
            )
    elif extra:
        raise DataError(
            f"{folder} has the tensor {shown(extra[0])}{_more(extra)}, which the model of its config.json has not."
        )
    for name, shape in wanted.items():
        if (found := held[name].shape(name)) != shape:
            raise DataError(f"{folder}: {name} is {list(found)}, but the model needs {list(shape)}.")


def _equal(held: Mapping[str, Held], one: str, other: str) -> bool:
    if held[one].shape(one) != held[other].shape(other) or held[one].dtype(one) != held[other].dtype(other):
        return False
    return torch.equal(held[one].read(one), held[other].read(other))


def _more(names: list[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""
