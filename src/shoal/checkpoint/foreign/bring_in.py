"""Brings in what others have saved: a folder of DCP, DeepSpeed or Hugging Face, or a checkpoint, becomes one of ours.

Read and written shard by shard, by one process, in the memory of the largest shard (of queries and keys whose rotary
order changes: of one such tensor). The bytes of a tensor stay what they are; only its name may change, and that order.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal.checkpoint.find import Found, Root, published
from shoal.checkpoint.foreign.bins import has_bins, of_bins
from shoal.checkpoint.foreign.dcp import Dcp, is_dcp, open_dcp
from shoal.checkpoint.foreign.foreign_names import Named, in_our_names, of_optimizer
from shoal.checkpoint.foreign.incoming import Box, Incoming, of_checkpoint, of_dcp, of_safetensors
from shoal.checkpoint.foreign.shapes import model_of
from shoal.checkpoint.foreign.start_from import check_fits
from shoal.checkpoint.foreign.zero import weights as of_deepspeed
from shoal.checkpoint.foreign.zero.tag import open_tag, tag_of
from shoal.checkpoint.foreign.zero.universal import of_universal
from shoal.checkpoint.grids import Dims, alone
from shoal.checkpoint.layout import bytes_of
from shoal.checkpoint.locate import place_of
from shoal.checkpoint.names import Name
from shoal.checkpoint.part import Contents, write_part
from shoal.checkpoint.publish import complete
from shoal.checkpoint.rows import ITEM_BYTES, PIECE_BYTES, Entry, Layout
from shoal.checkpoint.store import Store, store_of
from shoal.errors import CheckpointError, DataError, UsageError
from shoal.spec.hf.folder import model_of_folder, notes_of
from shoal.spec.model import Model
from shoal.spec.shape import shape_of
from shoal.values import shown

KIND = "a Hugging Face folder"
NO_PICKLE = "its weights are pickles (.bin): they were read for their numbers alone, and nothing in them was run."
_MOST_VALUES_BYTES = 64 << 10  # of what is no tensor; more than that is no setting but data


@dataclass(frozen=True)
class Source:
    """Somebody's checkpoint, opened; no tensor of it has been read."""

    kind: str
    where: str
    tensors: Mapping[str, Incoming]
    model: Model | None = None  # that it describes by itself
    step: int | None = None
    ours: bool = False  # the names are `model.…` and `optim.…` already
    values: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Brought:
    """What was written, for people."""

    where: str
    step: int
    kind: str
    convention: str | None
    tensors: int
    bytes: int
    startable: bool  # whether the shape is in it, so that a run needs to be told nothing else
    notes: tuple[str, ...]


def open_source(text: str, workspace: Path, stack: ExitStack) -> Source:
    """A DCP folder, one of DeepSpeed or of Hugging Face, or what `shoal.checkpoint.locate` finds; files stay open with
    the stack."""
    folder = Path(text).resolve()
    if is_dcp(folder):
        return _of_dcp(open_dcp(folder))
    has_weights = (folder / "config.json").is_file() and (any(folder.glob("*.safetensors")) or has_bins(folder))
    if not has_weights and (tag := tag_of(folder)) is not None:
        return _of_deepspeed(tag, *_model_beside(folder))
    if (folder / "config.json").is_file() or any(folder.glob("*.safetensors.index.json")) or has_bins(folder):
        from shoal.model.hf import open_weights

        model = model_of_folder(folder)
        if has_bins(folder):
            tensors = of_bins(folder, stack, model.tie_embeddings)
            return Source(KIND, str(folder), tensors, model, notes=(*notes_of(folder), NO_PICKLE))
        held, _ = open_weights(folder, shape_of(model), stack)
        return Source(KIND, str(folder), of_safetensors(held), model, notes=tuple(notes_of(folder)))
    found, _ = place_of(text, workspace).take(lambda found: found, lambda words: None)
    return Source("a checkpoint", found.where, of_checkpoint(found), model_of(found), found.step, ours=True)


def bring_in(
    source: Source,
    out: Root,
    like: Model | None = None,
    step: int | None = None,
    weights_only: bool = False,
    on_bytes: Callable[[int], None] = lambda n: None,
) -> Brought:
    """Writes the source as one checkpoint under `out`, where none may be yet. `like` describes the model."""
    store = store_of(out)
    if published(store):
        raise UsageError(f"{store.where} has checkpoints already: name a new folder.")
    model = _with_vocabulary(like or source.model, source.tensors)
    shape = None if model is None else shape_of(model)
    named = Named(dict(source.tensors), "Shoal") if source.ours else in_our_names(source.tensors, shape, source.where)
    if named.convention is None:
        model = shape = None
    tensors = {name: t for name, t in named.tensors.items() if not weights_only or _is_weight(name, named.convention)}
    if shape is not None:
        check_fits(_weights(tensors), shape, source.where)
    step = next((n for n in (step, source.step, named.step) if n is not None), 0)
    about = {"kind": source.kind, "from": source.where, "names": named.convention, "values": dict(source.values)}
    extra: dict[str, Any] = {"step": step, "imported": about}
    if model is not None:
        extra["spec"] = {"model": model.model_dump(mode="json")}
    found = write(store, Name(step, 0), tensors, extra, on_bytes)
    notes = source.notes + named.notes
    counts = {"tensors": len(tensors), "bytes": found.bytes}
    return Brought(found.where, step, source.kind, named.convention, **counts, startable=shape is not None, notes=notes)


def write(
    store: Store,
    name: Name,
    tensors: Mapping[str, Incoming],
    extra: dict[str, Any],
    on_bytes: Callable[[int], None] = lambda n: None,
) -> Found:
    """One checkpoint of tensors from anywhere, whole or not at all."""
    contents, boxes = _contents(tensors)
    try:
        store.remove(store.staging(str(name)))  # what a try before has left
        write_part(store, name, 0, 1, contents, _slices(contents, boxes, on_bytes))
        return complete(store, name, 1, extra)
    except BaseException:
        store.remove(store.staging(str(name)))
        raise


def size_of(source: Source) -> int:
    """Bytes to be read, about, for a progress bar."""
    return sum(math.prod(t.shape) * ITEM_BYTES[t.dtype] for t in source.tensors.values())


def _model_beside(folder: Path) -> tuple[Model | None, tuple[str, ...]]:
    """Of the config.json that a Trainer has put beside DeepSpeed's folder; a note where it is of no use."""
    if not (folder / "config.json").is_file():
        return None, ()
    try:
        return model_of_folder(folder), ()
    except (UsageError, DataError) as e:
        return None, (f"the config.json beside it is not used: {e}",)


def _of_deepspeed(folder: Path, model: Model | None, more: tuple[str, ...]) -> Source:
    tag = open_tag(folder)
    taken = of_universal(tag) if tag.universal else of_deepspeed.of_zero(tag)
    kind = "a universal checkpoint of DeepSpeed" if tag.universal else "a ZeRO checkpoint of DeepSpeed"
    notes = (*more, *taken.notes, of_deepspeed.NO_PICKLE)
    return Source(
        kind, str(folder), taken.tensors, model, taken.counters.get("global_steps"), False, taken.counters, notes
    )


def _of_dcp(dcp: Dcp) -> Source:
    values, notes = _plain_values(dcp)
    if not dcp.has_crc():
        notes.append("it was saved without CRC-32, so a flipped bit in it cannot be told from a weight.")
    step = next((v for name, v in values.items() if name.rpartition(".")[2] == "step" and type(v) is int), None)
    return Source("a DCP checkpoint", str(dcp.folder), of_dcp(dcp), None, step, False, values, tuple(notes))


def _plain_values(dcp: Dcp) -> tuple[dict[str, Any], list[str]]:
    """What is no tensor and can be written as JSON; the settings of an optimizer, one for each parameter, are not."""
    values: dict[str, Any] = {}
    lost: list[str] = []
    for name in dcp.values:
        if ".param_groups." in f".{name}":
            continue
        try:
            value = dcp.value(name)
            if len(json.dumps(value, allow_nan=False)) > _MOST_VALUES_BYTES:
                raise ValueError
            values[name] = value
        except (CheckpointError, ValueError):
            lost.append(name)
    if not lost:
        return values, []
    more = f" and {len(lost) - 3} more" if len(lost) > 3 else ""
    return values, [f"left out, as no plain values: {', '.join(map(shown, lost[:3]))}{more}."]


def _with_vocabulary(model: Model | None, tensors: Mapping[str, Incoming]) -> Model | None:
    """`auto` is as many rows as the embedding has."""
    if model is None or model.vocab_size != "auto":
        return model
    ends = ("embed.weight", "embed_tokens.weight", "tok_embeddings.weight")
    rows = next((t.shape[0] for name, t in tensors.items() if name.endswith(ends) and t.shape), None)
    return model if rows is None else model.model_copy(update={"vocab_size": rows})


def _is_weight(name: str, convention: str | None) -> bool:
    """Under names that nobody knows the optimizer stands among the weights, and can be told all the same."""
    weight = name.startswith("model.")
    return weight and (convention is not None or not of_optimizer(name.removeprefix("model.")))


def _weights(tensors: Mapping[str, Incoming]) -> dict[str, tuple[int, ...]]:
    return {n.removeprefix("model."): t.shape for n, t in tensors.items() if n.startswith("model.")}


def _contents(tensors: Mapping[str, Incoming]) -> tuple[Contents, dict[str, list[Box]]]:
    """What will be written, and the boxes in which each tensor comes, in the order of the file.

    Rows that follow each other are the whole tensor, byte for byte, however they were cut: only other boxes are listed.
    """
    entries, boxes = {}, {}
    for name, tensor in sorted(tensors.items()):
        boxes[name] = sorted(tensor.boxes, key=lambda box: box.offset)
        listed = None if _are_rows(tensor.shape, boxes[name]) else tuple((b.offset, b.shape) for b in boxes[name])
        entries[name] = Entry(tensor.dtype, tensor.shape, alone(0), listed)
    return Contents(Layout(entries), 0), boxes


def _are_rows(shape: Dims, boxes: Sequence[Box]) -> bool:
    """Whether boxes, one after the other, are the tensor in the order of its bytes."""
    if not shape:
        return len(boxes) == 1
    rows = 0
    for box in boxes:
        if box.offset != (rows, *(0 for _ in shape[1:])) or box.shape[1:] != shape[1:]:
            return False
        rows += box.shape[0]
    return rows == shape[0] or not math.prod(shape)


def _slices(
    contents: Contents, boxes: Mapping[str, Sequence[Box]], on_bytes: Callable[[int], None]
) -> Iterator[memoryview]:
    for name in contents.layout.names_of(0):
        for box in boxes[name]:
            data = bytes_of(box.read().contiguous())
            for at in range(0, data.nbytes, PIECE_BYTES):
                piece = data[at : at + PIECE_BYTES]
                on_bytes(piece.nbytes)
                yield piece
