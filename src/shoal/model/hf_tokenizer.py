"""The tokenizer files of a Hugging Face folder, so that AutoTokenizer opens what Shoal exports."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.data.tokenizer_classes import BACKEND, class_of
from shoal.data.tokenizer_folder import TOKENIZER_FILES
from shoal.errors import DataError
from shoal.spec.shape import Shape

if TYPE_CHECKING:
    from shoal.data.tokenizer import Tokenizer

END = "<|endoftext|>"
# What a folder may hold about text; generation_config.json names the token ids that end an answer.
_CARRIED = (*TOKENIZER_FILES, "generation_config.json")
_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def save_tokenizer(folder: Path, shape: Shape, tokenizer: Tokenizer | None, like: Path | None) -> dict[str, Any]:
    """Write the tokenizer files and return what config.json has to say about token ids."""
    if like is not None:
        for name in _CARRIED:
            if (like / name).is_file():
                shutil.copyfile(like / name, folder / name)
        config = json.loads((like / "config.json").read_text(encoding="utf-8"))
        return {key: config[key] for key in _TOKEN_IDS if key in config}
    if tokenizer is None:
        return {}
    tokenizer.save(folder)
    file = folder / "tokenizer.json"
    if not file.exists():
        file.write_text(json.dumps(_byte_tokenizer(), ensure_ascii=False), encoding="utf-8")
    content = file.read_text(encoding="utf-8")
    spec = json.loads(content)
    config = {
        "tokenizer_class": _taken_as_it_is(shape.family, content),
        "model_max_length": shape.max_seq_len,
        "clean_up_tokenization_spaces": False,
        "eos_token": _token_of(spec, tokenizer.eos_id),
    }
    start = None if tokenizer.start_id is None else _token_of(spec, tokenizer.start_id)
    if start is not None:
        config["bos_token"] = start
        if not _puts_first(spec.get("post_processor"), start):
            spec["post_processor"] = _starts_with(start, tokenizer.start_id)
            file.write_text(json.dumps(spec, ensure_ascii=False), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(
        json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
    )
    # Said outright, even where there is none: transformers would take Llama's 1 and 2 for granted.
    return {"bos_token_id": tokenizer.start_id, "eos_token_id": tokenizer.eos_id, "pad_token_id": None}


def _taken_as_it_is(family: str, content: str) -> str:
    """The class to name so that AutoTokenizer takes tokenizer.json as it is: for some model types (Qwen 2) transformers
    does not believe the usual name, and makes a tokenizer by its own rules of the vocabulary alone."""
    for name in ("PreTrainedTokenizerFast", "LlamaTokenizerFast"):
        if class_of(family, "", None, name, '"ByteLevel"' in content) == BACKEND:
            return name
    raise DataError(
        f"transformers makes the tokenizer of every {family} model by rules of its own, which are not those of this "
        "tokenizer; train with one that is byte-level, or with another model.family."
    )


def _puts_first(step: dict[str, Any] | None, token: str) -> bool:
    """Whether a post-processor does what `_starts_with` does."""
    if step is None or step["type"] == "Sequence":
        return step is not None and any(_puts_first(one, token) for one in step["processors"])
    first = step["single"][:1] if step["type"] == "TemplateProcessing" else []
    return any(piece.get("SpecialToken", {}).get("id") == token for piece in first)


def _starts_with(token: str, token_id: int | None) -> dict[str, Any]:
    """A post-processor: every text begins with the token that starts a document, as it did in training."""
    piece: dict[str, Any] = {"SpecialToken": {"id": token, "type_id": 0}}
    first, second = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    return {
        "type": "TemplateProcessing",
        "single": [piece, first],
        "pair": [piece, first, second],
        "special_tokens": {token: {"id": token, "ids": [token_id], "tokens": [token]}},
    }


def _token_of(tokenizer: dict[str, Any], token_id: int) -> str | None:
    for added in tokenizer.get("added_tokens", ()):
        if added["id"] == token_id:
            return str(added["content"])
    vocabulary = tokenizer["model"].get("vocab", {})
    if isinstance(vocabulary, list):  # Unigram: by place, with scores
        return str(vocabulary[token_id][0]) if token_id < len(vocabulary) else None
    return next((token for token, i in vocabulary.items() if i == token_id), None)


def _byte_tokenizer() -> dict[str, Any]:
    """Shoal's byte tokenizer as a tokenizer.json: a BPE without merges whose ids are the bytes, and 256 for the end."""
    added = {"id": 256, "content": END, "special": True}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [added | flags],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {character: byte for byte, character in enumerate(_byte_characters())},
            "merges": [],
        },
    }


def _byte_characters() -> list[str]:
    """The printable character that stands for each byte in GPT-2's byte-level BPE: itself, or one from 256 on."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    unprintable = iter(range(256, 512))
    return [chr(byte if byte in printable else next(unprintable)) for byte in range(256)]
