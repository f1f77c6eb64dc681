"""The weights that a run starts from: a Hugging Face folder, or a checkpoint of Shoal's (a run's, or an imported one).

Of a checkpoint each process reads the slices that hold its own part, and no others; optimizer state is not read.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from shoal.checkpoint.boxes import read_box
from shoal.checkpoint.error_text import words_of
from shoal.checkpoint.find import Found
from shoal.checkpoint.grids import Dims
from shoal.checkpoint.loading import sent_by_rank_0
from shoal.checkpoint.locate import MEMORY, Place, place_of
from shoal.checkpoint.names import Name
from shoal.errors import CheckpointError, DataError, ShoalError
from shoal.model.decoder import Decoder
from shoal.model.hf import load_weights as load_hf
from shoal.model.init import Rows, clear_buffers, fill, fill_stack
from shoal.parallel import agree
from shoal.spec.shape import Shape

_PREFIX = "model."
_PASSING = "ffn.excess"  # of a router: what a batch was like, no part of what the model computes
_MAY_BE_MISSING = ("ffn.bias", _PASSING)  # where other programs have none it begins at zero


def load_weights(model: nn.Module | Sequence[nn.Module], where: str | os.PathLike[str]) -> None:
    """Fills a Decoder, or some stretches of one, sharded or not. Collective. Nothing is changed unless all fits."""
    if (Path(where) / "config.json").is_file():
        load_hf(model, where)
        return
    stretches = [model] if isinstance(model, nn.Module) else list(model)
    words = None
    found: Found | None = None
    try:
        place = place_of(str(where), Path.cwd())
        if agree.here()[0] == 0:  # the others need not open it, nor look at the headers of all its files
            found, _ = place.without(MEMORY).take(lambda found: found, lambda words: None)
            check_fits(
                {n.removeprefix(_PREFIX): e.shape for n, e in found.manifest.tensors.items() if n.startswith(_PREFIX)},
                stretches[0].shape,  # type: ignore[arg-type]  # a Decoder's
                found.where,
            )
    except Exception as e:
        words = words_of(e)
    _all_well(words)
    try:
        found = _of_rank_0(place, found)
        for stretch in stretches:
            _fill(stretch, found)
    except ShoalError as e:
        words = words_of(e)
    _all_well(words)


def check_fits(held: Mapping[str, Dims], shape: Shape, where: str) -> None:
    """Refuses what has not exactly the tensors of a model of this shape; one sentence that names the first."""
    with torch.device("meta"):
        wanted = {name: tuple(t.shape) for name, t in Decoder(shape).state_dict().items()}
    if missing := [name for name in wanted if name not in held and not name.endswith(_MAY_BE_MISSING)]:
        raise DataError(f"{where} lacks the tensor '{missing[0]}'{_more(missing)}, which a model of this shape has.")
    if extra := [name for name in held if name not in wanted and not name.endswith(_PASSING)]:
        raise DataError(f"{where} has the tensor '{extra[0]}'{_more(extra)}, which a model of this shape has not.")
    for name, size in wanted.items():
        if held.get(name, size) != size:
            raise DataError(f"{where}: '{name}' is {list(held[name])}, but a model of this shape needs {list(size)}.")


def _more(names: list[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""


def _fill(stretch: nn.Module, found: Found) -> None:
    clear_buffers(stretch)
    for name, tensor in _tensors(stretch):
        stored = f"{_PREFIX}{name}"
        if stored not in found.manifest.tensors:
            continue
        if tensor.ndim == 3:
            fill_stack(tensor, partial(_of_stack, found, stored))
        else:
            fill(tensor, partial(_rows, found, stored))


def _tensors(stretch: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from stretch.named_parameters()
    yield from stretch.named_buffers()


def _rows(found: Found, name: str, shape: torch.Size, rows: slice) -> Tensor:
    return read_box(found, name, (rows.start, *(0 for _ in shape[1:])), (rows.stop - rows.start, *shape[1:]))


def _of_stack(found: Found, name: str, place: int) -> Rows:
    def rows_of(shape: torch.Size, rows: slice) -> Tensor:
        return read_box(found, name, (place, rows.start, 0), (1, rows.stop - rows.start, shape[1]))[0]

    return rows_of


def _all_well(words: str | None) -> None:
    """All ranks go on, or all end with the same sentence."""
    if failed := agree.first_error(words):
        raise CheckpointError(failed[1])


def _of_rank_0(place: Place, found: Found | None) -> Found:
    """What rank 0 has found is what all take: a run that is still saving may have published another one meanwhile."""
    tier = agree.text_from_rank_0("" if found is None else place.tier_of(found.store))
    folder = agree.text_from_rank_0("" if found is None else found.folder)
    step = agree.from_rank_0(0 if found is None else found.name.step)
    term = agree.from_rank_0(0 if found is None else found.name.term)
    sent = agree.bytes_from_rank_0(b"" if found is None else found.manifest.data)
    if found is not None:
        return found
    store = next((each.store for each in place.tiers if each.name == tier), None)
    if store is None:
        raise CheckpointError(f"{place.label} has no checkpoints here ({tier}), and has some on rank 0.")
    try:
        return sent_by_rank_0(store, Name(step, term), sent, folder)
    except OSError as e:
        raise CheckpointError(
            f"{store.where} has no such checkpoint here as rank 0 sees ({words_of(e)}): do all nodes share this folder?"
        ) from e
