"""What Shoal asks of the config.json of a model that it does not have itself (`model.hf`). No torch here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from shoal.errors import DataError, SetupError, SpecError
from shoal.plain_file import read_plain
from shoal.spec.hf.folder import CONFIG
from shoal.values import BadValue, inside, look_at_count, look_at_depth, whole

LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len")  # by what classes call it
MOST_BYTES = 1 << 18
MOST_PARTS = 1 << 16
ANY_LENGTH = 1 << 20  # of a class that names none: a state has no longest row


def fields_of(folder: Path) -> dict[str, Any]:
    """For `model` of the run file: the config itself, the vocabulary and the longest row."""
    config = _read(folder / CONFIG)
    for key, why in (
        ("auto_map", "names code of its own: read that, and train it as own.model"),
        ("quantization_config", "describes quantized weights, which cannot be trained: get the model in 16 or 32 bits"),
    ):
        if config.get(key):
            raise SpecError(f"{folder / CONFIG} has {key}, which {why}.")
    if not isinstance(config.get("model_type"), str):
        raise SpecError(f"{folder / CONFIG} has no model_type, so no class of transformers is meant.")
    longest = next((config[name] for name in LENGTHS if config.get(name) is not None), ANY_LENGTH)
    try:
        with inside("vocab_size"):
            words = whole(config.get("vocab_size"), 1 << 31, 1)
        with inside("the longest row"):
            length = whole(longest, 1 << 31, 1)
    except BadValue as e:
        raise SpecError(f"{folder / CONFIG}: {e}.") from None
    return {"hf_config": json.dumps(config, sort_keys=True), "vocab_size": words, "max_seq_len": length}


def _read(file: Path) -> dict[str, Any]:
    """As Python's own parser has it: configs of state-space models hold an Infinity, which is no JSON."""
    try:
        data = read_plain(file, MOST_BYTES)
        look_at_depth(data)
        look_at_count(data, MOST_PARTS)
        config = json.loads(data)
    except FileNotFoundError:
        raise SetupError(f"{file} is not there: give the folder of a Hugging Face model.") from None
    except OSError as e:
        raise SetupError(f"{file} cannot be read ({e.strerror or e}): get the model again.") from None
    except ValueError as e:
        reason = e.reason if isinstance(e, BadValue) else e
        raise DataError(f"{file} cannot be read as JSON ({reason}): get the model again.") from None
    if not isinstance(config, dict):
        raise DataError(f"{file} is no JSON object: get the model again.")
    return config
