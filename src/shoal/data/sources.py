"""Opens the data sets that a run file names, and refuses a mixture whose parts speak different tokens."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from shoal.data.node_disk import cache_folder
from shoal.data.shards import TokenShards
from shoal.errors import DataError
from shoal.spec.run import Data, Source


def open_sources(sources: Sequence[Source], data: Data, workspace: Path) -> list[TokenShards]:
    """Local paths are absolute by now. Remote data is cached on a disk of this machine, or where the run file says."""
    cache = data.cache_dir or cache_folder(workspace)
    opened = [TokenShards.open(s.path, cache_dir=cache, cache_bytes=int(data.cache_gb * 1e9)) for s in sources]
    for other in opened[1:]:
        _same_tokens(opened[0], other)
    return opened


def _same_tokens(one: TokenShards, other: TokenShards) -> None:
    difference = None
    if one.vocab_size != other.vocab_size:
        difference = f"vocabularies of {one.vocab_size:,} and {other.vocab_size:,} tokens"
    elif one.eos_id != other.eos_id:
        difference = f"end-of-document ids {one.eos_id} and {other.eos_id}"
    elif one.tokenizer != other.tokenizer:
        difference = f"tokenizers '{one.tokenizer}' and '{other.tokenizer}'"
    elif one.tokenizer.endswith(".json") and _tokenizer(one) != _tokenizer(other):
        difference = "different tokenizers of the same size"
    if difference:
        raise DataError(
            f"{one.where} and {other.where} have {difference}, so one model cannot read both; "
            "prepare them with the same tokenizer."
        )


def _tokenizer(data: TokenShards) -> object:
    """What the tokenizer does, without the settings that do not change the ids of a document."""
    value = json.loads(data.folder.read(data.tokenizer))
    return {k: v for k, v in value.items() if k not in ("truncation", "padding")}
