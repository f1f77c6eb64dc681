"""Weights from and to a Hugging Face folder: config.json, safetensors (one file or several with an index), tokenizer.

Tensors are read one at a time, and of a sharded parameter only the experts and rows that this process holds, so a rank
needs memory for its own part. Pickled weights (.bin, .pt) can run code when they are opened and are never read.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from shoal.errors import DataError, UsageError
from shoal.model.hf_files import INDEX, Held, check_holds, open_folder
from shoal.model.hf_names import Piece, is_stacked, pieces, stacked_pieces, tensors_of
from shoal.model.hf_tokenizer import save_tokenizer
from shoal.model.init import Rows, clear_buffers, fill, fill_stack
from shoal.spec.balancing import holds_bias
from shoal.spec.hf.config import to_hf
from shoal.spec.hf.folder import model_of_folder
from shoal.spec.shape import Shape, shape_of

if TYPE_CHECKING:
    from shoal.data.tokenizer import Tokenizer

SHARD_BYTES = 5_000_000_000


def load_shape(folder: str | os.PathLike[str]) -> Shape:
    """The shape that a folder's config.json states."""
    return shape_of(model_of_folder(Path(folder)))


def load_weights(model: nn.Module | Sequence[nn.Module], folder: str | os.PathLike[str]) -> None:
    """Fill a Decoder, or some stretches of one, sharded or not. Nothing is changed unless everything fits."""
    stretches = [model] if isinstance(model, nn.Module) else list(model)
    shape: Shape = stretches[0].shape  # type: ignore[assignment]  # a Decoder's
    with ExitStack() as stack:
        held, stored = open_weights(Path(folder), shape, stack)
        stacked = is_stacked(held, shape)
        of: dict[str, list[Piece]] = defaultdict(list)
        for piece in stored:
            of[piece.of].append(piece)
        for stretch in stretches:
            clear_buffers(stretch)  # a router's bias, where the folder has none
            for name, tensor in _tensors(stretch):
                if name not in of:
                    continue
                if tensor.ndim == 3:
                    names = [piece.name for piece in of[name]]
                    fill_stack(tensor, partial(_in_stack if stacked else _alone, held, names, name))
                else:
                    piece = of[name][0]
                    fill(tensor, partial(_rows, held[piece.name], piece.name, first=piece.first))


def open_weights(folder: Path, shape: Shape, stack: ExitStack) -> tuple[dict[str, Held], list[Piece]]:
    """The tensors of a folder that holds a model of this shape and nothing else, and what each of them is."""
    held = open_folder(folder, stack)
    stored = stacked_pieces(shape) if is_stacked(held, shape) else pieces(shape)
    check_holds(folder, held, {piece.name: piece.shape for piece in stored})
    return held, stored


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _rows(file: Held, name: str, shape: torch.Size, rows: slice, first: int = 0) -> Tensor:
    """`first`: where several of ours are one in the folder, the row at which this one begins."""
    return file.read(name, slice(first + rows.start, first + rows.stop)).reshape(-1, *shape[1:])


def _alone(held: Mapping[str, Held], names: list[str], _: str, expert: int) -> Rows:
    """One expert, whose matrix is a tensor of its own."""
    return partial(_rows, held[names[expert]], names[expert])


def _in_stack(held: Mapping[str, Held], names: list[str], ours: str, expert: int) -> Rows:
    """One expert of a stack; `up` lies below `gate` in the same matrix."""

    def rows_of(shape: torch.Size, rows: slice) -> Tensor:
        first = shape[0] if ours.endswith(".up") else 0
        return held[names[0]].read(names[0], (expert, slice(first + rows.start, first + rows.stop)))

    return rows_of


def save_folder(
    folder: str | os.PathLike[str],
    shape: Shape,
    tensors: Mapping[str, Tensor],
    tokenizer: Tokenizer | None = None,
    like: str | os.PathLike[str] | None = None,
    dtype: torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
    drop_biases: bool = False,
) -> None:
    """Write a folder that transformers opens. `tensors` are whole, under the names of the Decoder's state_dict.

    `like` is the folder a fine-tuned model started from: its tokenizer files and token ids are carried over. `dtype`
    casts; left out, tensors keep theirs. `drop_biases`: those that the class cannot hold are left out, not refused.
    The folder appears whole or not at all.
    """
    folder = new_folder(folder)
    for name, size in tensors_of(shape).items():
        if name not in tensors or tensors[name].shape != size:
            found = list(tensors[name].shape) if name in tensors else "missing"
            raise DataError(f"{name} is {found}, but a model of this shape needs {list(size)}: nothing was written.")
    _refuse_what_would_be_lost(shape, tensors, drop_biases)
    stored = str(dtype or tensors["embed.weight"].dtype).removeprefix("torch.")
    config = to_hf(shape) | {"dtype": stored, "torch_dtype": stored}
    with whole_or_none(folder) as work:
        config |= save_tokenizer(work, shape, tokenizer, Path(like) if like else None)
        _write_json(work / "config.json", config)
        _save_tensors(work, pieces(shape), tensors, dtype, shard_bytes)


def new_folder(folder: str | os.PathLike[str]) -> Path:
    folder = Path(folder).resolve()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder} exists and is not empty: name a new folder, or remove it first.")
    return folder


@contextmanager
def whole_or_none(folder: Path) -> Iterator[Path]:
    """A place to write it, which becomes the folder when all is written."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    work = folder.parent / f".{folder.name}.{os.getpid()}.tmp"
    try:
        work.mkdir()
        yield work
        os.replace(work, folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _refuse_what_would_be_lost(shape: Shape, tensors: Mapping[str, Tensor], drop: bool) -> None:
    """A bias cannot be folded into a router without one: its input has no component that is the same for all tokens."""
    largest: dict[str, float] = {}
    if not holds_bias(shape.family):
        largest = {name: float(t.max() - t.min()) for name, t in tensors.items() if name.endswith("ffn.bias")}
    if drop and not any(largest.values()):
        why = "keeps them" if holds_bias(shape.family) else "has none"
        raise UsageError(
            f"--drop-biases has nothing to leave out: of biases that balance experts this {shape.family} model {why}; "
            "export without it."
        )
    if any(largest.values()) and not drop:
        name = max(largest, key=largest.__getitem__)
        raise UsageError(
            f"{to_hf(shape)['architectures'][0]} has no place for the biases that balanced the experts (they differ by "
            f"up to {largest[name]:.3g}, in {name.removesuffix('.ffn.bias')}), and without them some tokens would go "
            "to other experts than in training: export with --drop-biases, then train a little more from that folder "
            "(model.weights) with model.experts.balance_loss 0.01, where the routers learn to do without."
        )


def _save_tensors(
    folder: Path, stored: list[Piece], tensors: Mapping[str, Tensor], dtype: torch.dtype | None, shard_bytes: int
) -> None:
    """One file, or several of at most `shard_bytes` and an index. Memory: one file's tensors."""
    kept = {p.name: torch.float32 if p.of.endswith("ffn.bias") else dtype or tensors[p.of].dtype for p in stored}
    sizes = {p.name: math.prod(p.shape) * kept[p.name].itemsize for p in stored}
    made_of: dict[str, list[Piece]] = defaultdict(list)
    for piece in stored:
        made_of[piece.name].append(piece)
    shards: list[list[str]] = [[]]
    for name in made_of:
        if shards[-1] and sum(sizes[other] for other in shards[-1]) + sizes[name] > shard_bytes:
            shards.append([])
        shards[-1].append(name)
    files = ["model.safetensors"]
    if len(shards) > 1:
        files = [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    for file, part in zip(files, shards, strict=True):
        whole = {name: _written(made_of[name], tensors).to("cpu", kept[name]).contiguous() for name in part}
        save_file(whole, folder / file, metadata={"format": "pt"})
        (folder / file).chmod(0o666 & ~_umask())  # safetensors lets only the owner read what it writes
    if len(shards) > 1:
        weight_map = {name: file for file, part in zip(files, shards, strict=True) for name in part}
        _write_json(folder / INDEX, {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map})


def _written(made_of: list[Piece], tensors: Mapping[str, Tensor]) -> Tensor:
    """A tensor of the folder: one of ours, an expert of one, or several one after another."""
    first = made_of[0]
    if len(made_of) == 1:
        return (tensors[first.of] if first.expert is None else tensors[first.of][first.expert]).detach()
    ours = sorted(made_of, key=lambda piece: piece.first)
    return torch.cat([tensors[piece.of].detach() for piece in ours]).reshape(first.shape)


def _umask() -> int:
    os.umask(mask := os.umask(0))  # there is no way to ask but to set it
    return mask


def _write_json(file: Path, value: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
