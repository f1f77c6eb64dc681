"""Opens the data sets that a run file names, and refuses a mixture whose parts speak different tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from shoal.data.node_disk import cache_folder
from shoal.data.shards import TokenShards
from shoal.data.starts import NO_START, said
from shoal.data.tokenizer_folder import spec_of, text_of
from shoal.errors import DataError
from shoal.spec.run import Data, Source


def open_sources(sources: Sequence[Source], data: Data, workspace: Path, look: bool = True) -> list[TokenShards]:
    """Local paths are absolute by now. Without `look` by their indexes alone: nothing is asked of their files. (The
    processes of a run open them together: `shoal.train.open_data`.)"""
    way = TokenShards.open if look else TokenShards.unseen
    opened = [way(source.path, *cache_of(data, workspace)) for source in sources]
    refuse_mixed_tokens(opened)
    return opened


def cache_of(data: Data, workspace: Path) -> tuple[str | Path, int]:
    """Remote data is cached on a disk of this machine, or where the run file says; and in so many bytes."""
    return data.cache_dir or cache_folder(workspace), int(data.cache_gb * 1e9)


def refuse_mixed_tokens(opened: Sequence[TokenShards]) -> None:
    for other in opened[1:]:
        _same_tokens(opened[0], other)


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
    elif one.start_id != other.start_id:
        raise DataError(
            f"in {one.where} {said(one.start_id, one.eos_id)}, in {other.where} {said(other.start_id, other.eos_id)}: "
            f"one model cannot learn both ways; prepare the older one again, or the newer one with --start {NO_START}."
        )
    if difference:
        raise DataError(
            f"{one.where} and {other.where} have {difference}, so one model cannot read both; "
            "prepare them with the same tokenizer."
        )


def _tokenizer(data: TokenShards) -> object:
    """What the tokenizer does, without the settings that do not change the ids of a document."""
    where = f"{data.where}/{data.tokenizer}"
    value = spec_of(text_of(data.folder.read(data.tokenizer), where), where)
    return {k: v for k, v in value.items() if k not in ("truncation", "padding")}
