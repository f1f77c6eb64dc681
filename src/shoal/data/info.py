"""`shoal data info`: what is in a data set, whether it is whole, and how it reads."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from shoal.data.index import INDEX_FILE
from shoal.data.packs import shares, shares_in_words
from shoal.data.progress_line import ProgressLine
from shoal.data.shards import TokenShards
from shoal.data.starts import said
from shoal.data.tokenizer import tokenizer_of
from shoal.errors import DataError
from shoal.readable import count, size

SAMPLE_TOKENS = 120
USUAL_SEQ_LEN = 512  # data.seq_len, where a run file leaves it out


def describe(where: str, verify: bool = False, sample: int = 0, seq_len: int | None = None) -> list[dict[str, Any]]:
    """One entry a data set; a folder that was made with --eval-fraction holds two. How windows of `seq_len` hold its
    documents is said of prompts and answers, and of text where it is asked for."""
    return [{**_describe(path, verify, sample), **_packed(path, seq_len)} for path in sets_in(where)]


def _packed(path: str, seq_len: int | None) -> dict[str, Any]:
    shards = TokenShards.open(path)
    if seq_len is None and not shards.has_mask:
        return {}
    seq_len = seq_len or USUAL_SEQ_LEN
    return {"seq_len": seq_len, "packing": shares(shards, seq_len)}


def sets_in(where: str) -> list[str]:
    """The data sets at a place: it is one, or it holds those that --eval-fraction has made, train first."""
    inner = [os.path.join(where, side) for side in ("train", "eval")]
    if "://" in where or (Path(where) / INDEX_FILE).is_file():
        return [where]
    found = [path for path in inner if (Path(path) / INDEX_FILE).is_file()]
    if found:
        return found
    if (Path(where) / ".prepare").is_dir():
        raise DataError(f"{where} is not finished; run the `shoal data prepare` that began it again.")
    if not Path(where).is_dir():
        raise DataError(f"there is no folder {where}.")
    raise DataError(f"{where} is no data set: it has no {INDEX_FILE}; make one with `shoal data prepare`.")


def _describe(path: str, verify: bool, sample: int) -> dict[str, Any]:
    shards = TokenShards.open(path)
    index = shards.index
    if verify:
        with ProgressLine("verify", index.tokens * shards.dtype.itemsize) as line:
            shards.verify(lambda n: line.add(n, text_bytes=n))
    return {
        "path": path,
        "documents": index.documents,
        "tokens": index.tokens,
        "tokens_per_document": index.tokens / index.documents,
        "tokenizer": index.tokenizer,
        "vocab_size": index.vocab_size,
        "start_id": index.start_id,
        "eos_id": index.eos_id,
        "dtype": index.dtype,
        "has_mask": index.has_mask,
        "shards": len(index.shards),
        "size_bytes": index.size_bytes,
        "fingerprint": index.fingerprint,
        "verified": verify,
        "source": index.source,
        "samples": _samples(shards, sample) if sample > 0 else [],
    }


def _samples(shards: TokenShards, number: int) -> list[str]:
    """The beginnings of documents spread evenly over the data set."""
    tokenizer = tokenizer_of(shards)
    texts = []
    for i in np.linspace(0, len(shards.index.shards), num=number, endpoint=False):
        which, within = int(i), i - int(i)
        ends = shards.shard(which).ends
        document = int(within * len(ends))
        begin = int(shards.starts[which]) + (int(ends[document - 1]) if document else 0)
        stop = min(int(shards.starts[which]) + int(ends[document]), begin + SAMPLE_TOKENS)
        texts.append(tokenizer.decode(shards.read(begin, stop)[0].tolist()))
    return texts


def describe_text(sets: list[dict[str, Any]]) -> str:
    lines = []
    for one in sets:
        lines += [
            f"{one['path']}",
            f"  {one['documents']:,} documents, {count(one['tokens'])} tokens, {one['tokens_per_document']:.0f} each",
            f"  {size(one['size_bytes'])} of {one['dtype']}, shards: {one['shards']}"
            + (", prompts masked out of the loss" if one["has_mask"] else ""),
            f"  tokenizer {one['tokenizer']}, {one['vocab_size']:,} ids; {said(one['start_id'], one['eos_id'])}",
            f"  fingerprint {one['fingerprint']}" + (", every checksum is right" if one["verified"] else ""),
        ]
        if "packing" in one:
            lines.append(f"  in windows of {one['seq_len']:,} tokens, {shares_in_words(one['packing'])}")
        if named := one["source"].get("named"):
            lines.append(f"  made from {', '.join(named[:5])}" + (" …" if len(named) > 5 else ""))
        for reason, entry in one["source"].get("skipped", {}).items():
            lines.append(f"  skipped {entry['count']:,}: {reason}, first at {entry['first']}")
        for text in one["samples"]:
            lines += ["  ---", *(f"  {line}" for line in text.splitlines())]
    return "\n".join(lines)
