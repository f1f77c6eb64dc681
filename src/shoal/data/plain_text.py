"""Text stays text: the name of a special token, spelled out in a document, is encoded as ordinary characters.

Who writes `<|endoftext|>` into a web page must not end a document with it. The library has a switch for that. It does
not help where the vocabulary holds the names as ordinary pieces too (Unigram: T5, many Japanese models): there the text
is encoded by a copy in which they have names that nobody can write.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Library


def plain_encoder(library: Library, spec: Mapping[str, Any]) -> Library:
    """A tokenizer that gives the same ids, but never that of a special token (the one for what is unknown apart)."""
    hidden = _reachable(spec)
    if hidden:
        library = type(library).from_str(json.dumps(_renamed(spec, hidden)))
    library.encode_special_tokens = True
    return library


def _reachable(spec: Mapping[str, Any]) -> set[str]:
    """Names of special tokens that the model itself could make out of ordinary text."""
    model = spec["model"]
    kind, vocab = model.get("type"), model["vocab"]
    pieces = {entry[0] for entry in vocab} if kind == "Unigram" else set(vocab)
    unknown = model.get("unk_token")
    if kind == "Unigram" and model.get("unk_id") is not None:
        unknown = vocab[model["unk_id"]][0]
    special = {t["content"] for t in spec.get("added_tokens") or [] if t.get("special")}
    names = (special & pieces) - {unknown}
    if kind == "BPE" and names and not model.get("ignore_merges"):
        names &= {_made(merge) for merge in model["merges"]} | {name for name in names if len(name) == 1}
    return names


def _renamed(spec: Mapping[str, Any], names: set[str]) -> dict[str, Any]:
    model = dict(spec["model"])
    new = {name: uuid.uuid4().hex for name in names}
    if model.get("type") == "Unigram":
        model["vocab"] = [[new.get(piece, piece), score] for piece, score in model["vocab"]]
    else:
        model["vocab"] = {new.get(piece, piece): i for piece, i in model["vocab"].items()}
    if "merges" in model:
        model["merges"] = [merge for merge in model["merges"] if names.isdisjoint({*_parts(merge), _made(merge)})]
    added = [t for t in spec.get("added_tokens") or [] if t["content"] not in names]
    return {**spec, "model": model, "added_tokens": added, "post_processor": None, "truncation": None, "padding": None}


def _made(merge: str | list[str]) -> str:
    return "".join(_parts(merge))


def _parts(merge: str | list[str]) -> list[str]:
    """Of a merge, which older files write as one string."""
    return merge.split(" ", 1) if isinstance(merge, str) else merge
