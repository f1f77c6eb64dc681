"""Weights from and to a Hugging Face folder: config.json, safetensors (one file or several with an index), tokenizer.

Tensors are read one at a time, and of a sharded parameter only the rows that this process holds, so a rank needs
memory for its own part. Pickled weights (.bin, .pt) can run code when they are opened and are never read.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from shoal.errors import DataError, SetupError, UsageError
from shoal.model.decoder import Decoder
from shoal.model.hf_tokenizer import save_tokenizer
from shoal.model.init import fill
from shoal.spec.hf_config import from_hf, to_hf
from shoal.spec.model import Model
from shoal.spec.shape import Shape, shape_of

if TYPE_CHECKING:
    from shoal.data.tokenizer import Tokenizer

SHARD_BYTES = 5_000_000_000
INDEX = "model.safetensors.index.json"
_PARTS = {  # of a block: Shoal's name to that of all four families
    "attention_norm": "input_layernorm",
    "attention.q": "self_attn.q_proj",
    "attention.k": "self_attn.k_proj",
    "attention.v": "self_attn.v_proj",
    "attention.out": "self_attn.o_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn.gate": "mlp.gate_proj",
    "ffn.up": "mlp.up_proj",
    "ffn.down": "mlp.down_proj",
}
_TOP = {
    "embed.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}


def hf_name(name: str) -> str:
    """The name that transformers gives a parameter of the Decoder."""
    if name in _TOP:
        return _TOP[name]
    block = re.fullmatch(r"blocks\.(\d+)\.(.+)\.(weight|bias)", name)
    if block is None or block[2] not in _PARTS:
        raise ValueError(f"{name} is no parameter of a Decoder")
    return f"model.layers.{block[1]}.{_PARTS[block[2]]}.{block[3]}"


def load_shape(folder: str | os.PathLike[str]) -> Shape:
    """The shape that a folder's config.json states."""
    file = Path(folder) / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise SetupError(f"{file} is not there: give the folder of a Hugging Face model.") from None
    except ValueError as e:
        raise DataError(f"{file} cannot be read as JSON ({e}): get the model again.") from None
    return shape_of(Model(**from_hf(config)))


def load_weights(model: nn.Module, folder: str | os.PathLike[str]) -> None:
    """Fill every parameter of a Decoder, sharded or not, from a folder. Nothing is changed unless everything fits."""
    wanted = {hf_name(name): parameter for name, parameter in model.named_parameters()}
    with ExitStack() as stack:
        held = _open(Path(folder), stack)
        _check(Path(folder), held, {name: tuple(p.shape) for name, p in wanted.items()})
        for name, parameter in wanted.items():
            fill(parameter, partial(_rows, held[name], name))


def _rows(file: Any, name: str, _: torch.Size, rows: slice) -> Tensor:
    part: Tensor = file.get_slice(name)[rows]
    return part


def _open(folder: Path, stack: ExitStack) -> dict[str, Any]:
    """Every tensor's name to the open file that holds it."""
    if not folder.is_dir():
        raise SetupError(f"{folder} is not a folder here: give the folder of a Hugging Face model.")
    index = folder / INDEX
    if index.is_file():
        try:
            where = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
        except (ValueError, KeyError, TypeError) as e:
            raise DataError(f"{index} cannot be read as an index of weights ({e!r}): get the model again.") from None
        if outside := [f for f in where.values() if Path(str(f)).name != f]:
            raise DataError(f"{index} names {outside[0]!r}, which lies outside its folder: get the model again.")
        files = sorted(set(where.values()))
    elif (folder / "model.safetensors").is_file():
        files = ["model.safetensors"]
    elif pickled := sorted(p.name for pattern in ("*.bin", "*.pt", "*.pth") for p in folder.glob(pattern)):
        raise DataError(
            f"{folder} has its weights in {pickled[0]}, a pickle, which could run code: convert it to safetensors."
        )
    else:
        raise SetupError(f"{folder} has neither model.safetensors nor {INDEX}: get the model's weights.")
    held: dict[str, Any] = {}
    for name in files:
        try:
            file = stack.enter_context(safe_open(folder / name, framework="pt", device="cpu"))
        except FileNotFoundError:
            raise DataError(f"{index} names {name}, which is not there: get the model again.") from None
        except SafetensorError as e:
            raise DataError(f"{folder / name} is damaged ({e}): get the model again.") from None
        held |= dict.fromkeys(file.keys(), file)
    return held


def _check(folder: Path, held: dict[str, Any], wanted: dict[str, tuple[int, ...]]) -> None:
    """Refuse a folder whose tensors are not exactly those of the model."""
    if missing := [name for name in wanted if name not in held]:
        raise DataError(
            f"{folder} lacks the tensor {missing[0]}{_more(missing)}: its config.json describes another model."
        )
    extra = [name for name in held if name not in wanted and not name.endswith("rotary_emb.inv_freq")]
    if extra == ["lm_head.weight"]:  # a tied head that was written all the same
        embedding = _TOP["embed.weight"]
        if not torch.equal(held["lm_head.weight"].get_tensor("lm_head.weight"), held[embedding].get_tensor(embedding)):
            raise DataError(
                f"{folder} has a lm_head.weight of its own, but its config.json says that the head is tied."
            )
    elif extra:
        raise DataError(
            f"{folder} has the tensor {extra[0]}{_more(extra)}, which the model of its config.json has not."
        )
    for name, shape in wanted.items():
        found = tuple(held[name].get_slice(name).get_shape())
        if found != shape:
            raise DataError(f"{folder}: {name} is {list(found)}, but the model needs {list(shape)}.")


def _more(names: list[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""


def save_folder(
    folder: str | os.PathLike[str],
    shape: Shape,
    tensors: Mapping[str, Tensor],
    tokenizer: Tokenizer | None = None,
    like: str | os.PathLike[str] | None = None,
    dtype: torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a folder that transformers opens. `tensors` are whole, under the Decoder's names.

    `like` is the folder a fine-tuned model started from: its tokenizer files and token ids are carried over. `dtype`
    casts; left out, tensors keep theirs. The folder appears whole or not at all.
    """
    folder = Path(folder).resolve()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder} exists and is not empty: name a new folder, or remove it first.")
    with torch.device("meta"):
        expected = {name: p.shape for name, p in Decoder(shape).named_parameters()}
    for name, size in expected.items():
        if name not in tensors or tensors[name].shape != size:
            found = list(tensors[name].shape) if name in tensors else "missing"
            raise DataError(f"{name} is {found}, but a model of this shape needs {list(size)}: nothing was written.")
    stored = str(dtype or tensors["embed.weight"].dtype).removeprefix("torch.")
    config = to_hf(shape) | {"dtype": stored, "torch_dtype": stored}
    folder.parent.mkdir(parents=True, exist_ok=True)
    work = folder.parent / f".{folder.name}.{os.getpid()}.tmp"
    try:
        work.mkdir()
        config |= save_tokenizer(work, shape, tokenizer, Path(like) if like else None)
        _write_json(work / "config.json", config)
        _save_tensors(work, {name: tensors[name] for name in expected}, dtype, shard_bytes)
        os.replace(work, folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _save_tensors(folder: Path, tensors: Mapping[str, Tensor], dtype: torch.dtype | None, shard_bytes: int) -> None:
    """One file, or several of at most `shard_bytes` and an index. Memory: one file's tensors."""
    sizes = {name: t.numel() * (dtype or t.dtype).itemsize for name, t in tensors.items()}
    shards: list[list[str]] = [[]]
    for name in tensors:
        if shards[-1] and sum(sizes[n] for n in shards[-1]) + sizes[name] > shard_bytes:
            shards.append([])
        shards[-1].append(name)
    files = ["model.safetensors"]
    if len(shards) > 1:
        files = [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    for file, names in zip(files, shards, strict=True):
        whole = {hf_name(n): tensors[n].detach().to("cpu", dtype or tensors[n].dtype).contiguous() for n in names}
        save_file(whole, folder / file, metadata={"format": "pt"})
        (folder / file).chmod(0o666 & ~_umask())  # safetensors lets only the owner read what it writes
    if len(shards) > 1:
        weight_map = {hf_name(n): file for file, names in zip(files, shards, strict=True) for n in names}
        _write_json(folder / INDEX, {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map})


def _umask() -> int:
    os.umask(mask := os.umask(0))  # there is no way to ask but to set it
    return mask


def _write_json(file: Path, value: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
