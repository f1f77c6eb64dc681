"""The model that a Hugging Face folder describes: read, understood, and asked all that a run file is asked.

`model.weights`, `sample --weights`, `checkpoint import` and `plan` all come through here, so that a folder which one of
them refuses is refused by all. No torch here; `shoal.model.hf_files` opens the weights.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from shoal.errors import DataError, SetupError, ShoalError, SpecError
from shoal.plain_file import is_plain, read_object
from shoal.spec.hf.config import from_hf, to_hf
from shoal.spec.model import Model
from shoal.spec.model_rules import computable
from shoal.spec.shape import Shape, shape_of
from shoal.values import BadValue, inside, real, shown

CONFIG = "config.json"
ADAPTER = "adapter_config.json"
LEAST_BYTES = 2  # of a weight


def read_config(file: Path) -> dict[str, Any]:
    """A config.json as it stands there."""
    try:
        return read_object(file)
    except FileNotFoundError:
        raise SetupError(f"{file} is not there: give the folder of a Hugging Face model.") from None
    except OSError as e:
        raise SetupError(f"{file} cannot be read ({e.strerror or e}): get the model again.") from None
    except BadValue as e:
        raise DataError(f"{file} cannot be read as JSON ({e.reason}): get the model again.") from None


def model_of_folder(folder: Path) -> Model:
    """SpecError in one sentence where transformers would compute something that Shoal does not."""
    if (folder / ADAPTER).exists():
        raise DataError(
            f"{folder} has an {ADAPTER}, so transformers would load another model and lay this over it: merge the two "
            "first (peft: merge_and_unload)."
        )
    model = model_of_config(folder / CONFIG)
    _refuse_more_than_there_is(folder, shape_of(model))
    return model


def model_of_config(file: Path) -> Model:
    """The same by its config.json alone."""
    config = read_config(file)
    try:
        return _model_of(config)
    except SpecError as e:
        raise SpecError(f"{file.parent}: {e}") from None


def _model_of(config: Mapping[str, Any]) -> Model:
    fields = from_hf(config)
    notes_of_config(config)
    try:
        model = Model(**fields)
    except ValidationError as e:
        problem = e.errors()[0]
        place = ".".join(map(str, ("model", *problem["loc"])))
        raise SpecError(f"{CONFIG} makes {place} {shown(problem['input'])}: {problem['msg']}.") from None
    if broken := next(computable(model), None):
        raise SpecError(f"{CONFIG}: {broken[1]}.")
    to_hf(shape_of(model))  # what no class of transformers computes
    return model


def _refuse_more_than_there_is(folder: Path, shape: Shape) -> None:
    """A config of a few bytes can describe any number of layers; the weights cannot. Asked before anything is built.
    Where there are no weights yet, there is nothing to ask: `shoal.decide.checks` does."""
    files = [file for file in folder.glob("*.safetensors") if is_plain(file)]
    there = sum(os.stat(file).st_size for file in files)
    if files and shape.params * LEAST_BYTES > there:
        raise DataError(
            f"{folder / CONFIG} describes a model of {shape.params:,} parameters, but the weights beside it have "
            f"{there:,} bytes: get the model again."
        )


def notes_of(where: str | os.PathLike[str] | None) -> list[str]:
    """What Shoal leaves out in training that transformers would do, a sentence each. Of `model.weights`: nothing of
    those that are a checkpoint, or are gone by now."""
    try:
        return notes_of_config(read_config(Path(where) / CONFIG)) if where else []
    except ShoalError:
        return []


def notes_of_config(config: Mapping[str, Any]) -> list[str]:
    notes = []
    try:
        with inside("attention_dropout"):
            dropout = real(config.get("attention_dropout") or 0, most=1.0, least=0.0)
    except BadValue as e:
        raise SpecError(f"{CONFIG}: {e}.") from None
    if dropout:
        notes.append(f"{CONFIG} has attention_dropout {dropout:g}, and Shoal trains without dropout.")
    pad = config.get("pad_token_id")
    if isinstance(pad, int):
        notes.append(
            f"{CONFIG} has pad_token_id {pad}, whose embedding transformers does not train; Shoal trains it like any "
            "other, as it may be the end of a document."
        )
    if config.get("output_router_logits") is True:
        notes.append(
            f"{CONFIG} has output_router_logits, with which transformers adds a loss that balances the experts; Shoal "
            "adds one where model.experts.balance_loss asks for it."
        )
    return notes
