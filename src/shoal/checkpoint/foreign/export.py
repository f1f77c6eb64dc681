"""A checkpoint as a Hugging Face folder, with the tokenizer of the data it was trained on."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from pydantic import ValidationError

from shoal.checkpoint.find import Found
from shoal.checkpoint.foreign.shapes import fields_of_weights, model_of, refuse_own_model
from shoal.checkpoint.loading import read_full
from shoal.data.shards import TokenShards
from shoal.data.tokenizer import Tokenizer, load_tokenizer
from shoal.data.tokenizer import tokenizer_of as tokenizer_of_shards
from shoal.data.tokenizer_folder import TOKENIZER_FILES
from shoal.errors import DataError, ShoalError, UsageError
from shoal.journal.rundir import RunDir
from shoal.model.hf import save_folder
from shoal.spec.model import Model
from shoal.spec.run import Run
from shoal.spec.shape import shape_of

NO_TOKENIZER = "none"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def described(found: Found, run_dir: RunDir | None) -> Run | Model:
    """The run that saved it, as its directory has it or else its manifest; of one that was imported, the model."""
    if run_dir is not None and run_dir.spec_file.exists():
        from shoal.spec import load

        return load(run_dir.spec_file, (), fields_of_weights).run
    try:
        return Run.model_validate(found.extra.get("spec"))
    except ValidationError:
        model = model_of(found)
    if model is None:
        raise UsageError(
            f"{found.where} does not say what model it is of: import it again with --like, and export that."
        )
    return model


def export(
    found: Found,
    of: Run | Model,
    folder: str | os.PathLike[str],
    tokenizer: str | None,
    dtype: str | None,
    drop_biases: bool = False,
) -> None:
    """Writes the weights of `found`. `tokenizer` names another than the data's, or is `none`; `dtype` casts;
    `drop_biases` leaves out those of routers that the class has no place for."""
    model = of.model if isinstance(of, Run) else of
    refuse_own_model(of.own.computes if isinstance(of, Run) else None, found.where)
    like = _folder_it_came_from(found, model) if tokenizer is None else None
    chosen, vocab_size = None, None
    if like is None and tokenizer != NO_TOKENIZER:
        chosen = load_tokenizer(tokenizer) if tokenizer is not None else tokenizer_of(of)
        vocab_size = chosen.vocab_size
    shape = shape_of(model, vocab_size)
    cast = DTYPES[dtype] if dtype else None
    if isinstance(of, Run) and of.model.hf is not None:
        from shoal.model.hf_any import save_folder as save_any

        save_any(folder, of, shape, read_full(found), chosen, like, cast)
        return
    save_folder(folder, shape, read_full(found), chosen, like, cast, drop_biases=drop_biases)


def _folder_it_came_from(found: Found, model: Model) -> str | None:
    """The Hugging Face folder that a run or an import started from, if it is still there: its tokenizer is the right
    one."""
    imported = found.extra.get("imported")
    if model.hf is not None:  # a config alone will do there, and the data's tokenizer is the right one then
        return model.hf if any((Path(model.hf) / name).is_file() for name in TOKENIZER_FILES) else None
    for folder in (model.weights, imported.get("from") if isinstance(imported, dict) else None):
        if isinstance(folder, str) and (Path(folder) / "config.json").is_file():
            return folder
    return None


def tokenizer_of(of: Run | Model) -> Tokenizer:
    if isinstance(of, Run):
        return tokenizer_of_data(of)
    raise UsageError("it was imported without a tokenizer: name one with --tokenizer PATH, or --tokenizer none.")


def tokenizer_of_data(run: Run, start: str | None = None, special: bool = False) -> Tokenizer:
    """The tokenizer whose ids the run was trained on; `start` and `special` as for `load_tokenizer`."""
    if run.own.data is not None:
        raise DataError(f"own.data {run.own.data} gives no tokenizer: name one with --tokenizer PATH.")
    try:
        data = TokenShards.open(run.data.train[0].path)
        chosen = tokenizer_of_shards(data, special=special)
    except (ShoalError, OSError) as e:
        raise DataError(
            f"the run's data gives no tokenizer ({str(e).rstrip('.')}): name one with --tokenizer PATH."
        ) from e
    return chosen if start is None else tokenizer_of_shards(data, start, special)
