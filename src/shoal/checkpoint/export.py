"""A checkpoint of a run as a Hugging Face folder, with the tokenizer of the data it was trained on."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from shoal.checkpoint.find import Found
from shoal.checkpoint.loading import read_full
from shoal.data.shards import TokenShards
from shoal.data.tokenizer import BYTE, JsonTokenizer, Tokenizer, load_tokenizer
from shoal.errors import DataError, ShoalError
from shoal.model.hf import save_folder
from shoal.spec.run import Run
from shoal.spec.shape import shape_of

NO_TOKENIZER = "none"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def export(found: Found, run: Run, folder: str | os.PathLike[str], tokenizer: str | None, dtype: str | None) -> None:
    """Writes the weights of `found`. `tokenizer` names another than the data's, or is `none`; `dtype` casts."""
    like = run.model.weights if tokenizer is None and _has_config(run.model.weights) else None
    chosen, vocab_size = None, None
    if like is None and tokenizer != NO_TOKENIZER:
        chosen = load_tokenizer(tokenizer) if tokenizer is not None else tokenizer_of_data(run)
        vocab_size = chosen.vocab_size
    shape = shape_of(run.model, vocab_size)
    save_folder(folder, shape, read_full(found), chosen, like, DTYPES[dtype] if dtype else None)


def _has_config(weights: str | None) -> bool:
    """Whether the folder a fine-tuned model started from is still there: its tokenizer files are the right ones."""
    return weights is not None and (Path(weights) / "config.json").is_file()


def tokenizer_of_data(run: Run) -> Tokenizer:
    """The tokenizer whose ids the run was trained on."""
    try:
        data = TokenShards.open(run.data.train[0].path)
        if data.tokenizer == BYTE:
            return load_tokenizer(BYTE)
        content = data.folder.read(data.tokenizer).decode()
        return JsonTokenizer(content, f"{data.where}/{data.tokenizer}", data.eos_id)
    except (ShoalError, OSError) as e:
        raise DataError(
            f"the run's data gives no tokenizer ({str(e).rstrip('.')}): name one with --tokenizer PATH."
        ) from e
