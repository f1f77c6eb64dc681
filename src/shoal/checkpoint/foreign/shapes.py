"""The model that a checkpoint, a run file or a Hugging Face folder describes. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from shoal.checkpoint.find import Found
from shoal.checkpoint.locate import holds_checkpoints, place_of
from shoal.errors import SpecError, UsageError
from shoal.spec.hf.folder import model_of_config
from shoal.spec.model import Model

_SOURCES = ("preset", "weights", "init")  # where a shape and its weights came from; no part of it


def model_of(found: Found) -> Model | None:
    """The model section that is in a checkpoint's manifest; None where none is."""
    spec = found.extra.get("spec")
    own = spec.get("own") if isinstance(spec, Mapping) else None
    refuse_own_model(own.get("model") or own.get("block") if isinstance(own, Mapping) else None, found.where)
    fields = spec.get("model") if isinstance(spec, Mapping) else None
    if not isinstance(fields, Mapping):
        return None
    try:
        return Model(**without_sources(fields))
    except ValidationError as e:
        problem = e.errors()[0]
        place = ".".join(map(str, ("model", *problem["loc"])))
        raise SpecError(
            f"{found.where} was saved with a {place} that this Shoal does not know ({problem['msg']})."
        ) from e


def refuse_own_model(code: object, where: object) -> None:
    """Without its code nobody can say what such a model computes, and no class of Hugging Face's computes it."""
    if code:
        raise SpecError(
            f"the model of {where} is own code ({code}), which no other model class computes: it cannot be exported "
            "or started from; train on with it, or sample from its run with --own-code."
        )


def fields_of_weights(where: str) -> dict[str, Any] | None:
    """What the checkpoint that a run is to start from says about its model, nothing where it was never told. None where
    no checkpoint is."""
    if not holds_checkpoints(where):
        return None
    found, _ = place_of(where, Path.cwd()).take(lambda found: found, lambda words: None)
    model = model_of(found)
    return {} if model is None else without_sources(model.model_dump(mode="json"))


def without_sources(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name not in _SOURCES}


def model_like(path: Path) -> Model:
    """From a run file, a config.json, or the folder that holds one."""
    if path.is_dir():
        path = path / "config.json"
    if not path.is_file():
        raise UsageError(f"--like names {path}, which is not there: name a run file or a Hugging Face folder.")
    if path.suffix == ".json":
        return model_of_config(path)
    from shoal.spec import load

    return Model(**without_sources(load(path, (), fields_of_weights).run.model.model_dump()))
