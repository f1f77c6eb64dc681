"""The data of a run, opened by all its processes together: one looks, the others hear.

Rank 0 reads each index and sends its bytes: all ranks have the same one, whatever a node's own copy says. Whether the
files are there and as long as they should be is looked at once where all nodes see one disk, else once a node: four
files a shard are 112,000 questions for ten trillion tokens, and a thousand ranks that ask them keep a file system busy
for minutes. What is read later is compared with its checksums by whoever reads it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from shoal.data.index import INDEX_FILE
from shoal.data.local_folder import LocalFolder
from shoal.data.node_disk import is_shared
from shoal.data.own_windows import OwnWindows
from shoal.data.shards import TokenShards, folder_at
from shoal.data.sources import cache_of, refuse_mixed_tokens
from shoal.errors import DataError, ShoalError
from shoal.parallel import agree
from shoal.spec.run import Data, Run, Source


def open_together(sources: Sequence[Source], data: Data, workspace: Path) -> list[TokenShards]:
    """Collective. What is wrong with the data ends all of them with the same sentence."""
    rank, _ = agree.here()
    cache_dir, cache_bytes = cache_of(data, workspace)
    folders = [folder_at(source.path, cache_dir, cache_bytes) for source in sources]
    read: list[bytes] = []
    _all_or_none(lambda: read.extend(folder.read(INDEX_FILE) for folder in folders if rank == 0))
    texts = [agree.bytes_from_rank_0(read[i] if rank == 0 else b"") for i in range(len(folders))]
    opened: list[TokenShards] = []

    def look() -> None:
        opened.extend(TokenShards.of(folder, text) for folder, text in zip(folders, texts, strict=True))
        if rank == 0:
            refuse_mixed_tokens(opened)
        for shards in opened:
            if _looks(shards, rank):
                shards.look()

    _all_or_none(look)
    return opened


def open_own(make: Callable[[Run], Any], run: Run) -> OwnWindows:
    """Collective. The windows of `own.data`: every process makes the source, and all must have made the same."""
    made: list[OwnWindows] = []
    _all_or_none(lambda: made.append(OwnWindows(make, run)))
    (mine,) = made
    words = f"{mine.sizes[0]:,} windows with the fingerprint {mine.said!r}"
    first = agree.text_from_rank_0(words)

    def same() -> None:
        if words != first:
            raise DataError(
                f"own.data {run.own.data} has {words} here and {first} in rank 0: every process must make the same."
            )

    _all_or_none(same)
    return mine


def _looks(shards: TokenShards, rank: int) -> bool:
    if not isinstance(shards.folder, LocalFolder) or is_shared(shards.folder.path):
        return rank == 0
    return os.environ.get("LOCAL_RANK", "0") == "0"


def _all_or_none(do: Callable[[], None]) -> None:
    """Every rank does its part, and all learn whether anybody failed, in the words of the lowest that did."""
    mine: ShoalError | None = None
    try:
        do()
    except ShoalError as e:
        mine = e
    found = agree.first_error(None if mine is None else str(mine))
    if mine is not None:
        raise mine
    if found is not None:
        raise DataError(f"rank {found[0]}: {found[1]}")
