"""Helpers of the reading tests: small data sets, and the slow obvious way to cut a window."""

from __future__ import annotations

from collections.abc import Sequence
from multiprocessing.queues import Queue
from pathlib import Path

import numpy as np
import xxhash

from shoal.data import cache as cache_module
from shoal.data.cache import Cache
from shoal.data.shards import ShardWriter, TokenShards, write_index

EOS = 256


def make_documents(count: int, seed: int = 0, longest: int = 40) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [[*rng.integers(0, 256, rng.integers(0, longest)).tolist(), EOS] for _ in range(count)]


def write_data_set(
    folder: Path,
    shards: Sequence[Sequence[Sequence[int]]],
    masks: Sequence[Sequence[Sequence[int]]] | None = None,
    vocab_size: int = 257,
    tokenizer: str = "byte",
) -> TokenShards:
    """`shards` is a list of lists of documents."""
    folder.mkdir(parents=True, exist_ok=True)
    infos = []
    for i, documents in enumerate(shards):
        writer = ShardWriter(folder, f"shard-{i:05d}", "uint16", with_mask=masks is not None)
        for j, document in enumerate(documents):
            writer.add(document, None if masks is None else masks[i][j])
        infos.append(writer.close())
    write_index(folder, infos, vocab_size=vocab_size, eos_id=EOS, tokenizer=tokenizer)
    return TokenShards.open(folder)


def slow_window(
    documents: Sequence[Sequence[int]], mask: Sequence[int] | None, window: int, length: int, mask_documents: bool
) -> tuple[list[int], list[int], list[int], list[int]]:
    """tokens, targets, positions, documents of one window, one token at a time, from the plain list of documents."""
    stream = [
        (token, number, place, place == len(document) - 1)
        for number, document in enumerate(documents)
        for place, token in enumerate(document)
    ]
    piece = stream[window * length : window * length + length + 1]
    tokens, targets, positions, numbers = [], [], [], []
    for i in range(length):
        token, number, place, last = piece[i]
        tokens.append(token)
        trained = not last and (mask is None or mask[window * length + i + 1] == 1)
        targets.append(piece[i + 1][0] if trained else -100)
        numbers.append(number - piece[0][1] if mask_documents else 0)
        positions.append(place - (piece[0][2] if number == piece[0][1] else 0) if mask_documents else i)
    return tokens, targets, positions, numbers


def key(i: int) -> str:
    """The name of the i-th blob of a cache."""
    return xxhash.xxh3_128_hexdigest(str(i).encode())


def blob(i: int, size: int = 1000) -> bytes:
    return (f"{i:09d}".encode() * (size // 9 + 1))[:size]


def use_a_shared_cache(folder: str, limit: int, seed: int, worst: Queue[int]) -> None:
    """What one of several processes does: read and fill, and note the most that it ever saw in the folder."""
    cache_module.SMALLEST_BYTES = 0
    cache = Cache(Path(folder), limit, touch_after_s=0)
    rng = np.random.default_rng(seed)
    most = 0
    for i in rng.integers(0, 60, 200).tolist():
        found = cache.read(key(i), 1000)
        assert found is None or found == blob(i)
        if found is None:
            cache.put(key(i), blob(i))
        with cache._locked():  # counted at one instant: no blob comes or goes meanwhile
            most = max(most, cache.used_bytes())
    worst.put(most)
