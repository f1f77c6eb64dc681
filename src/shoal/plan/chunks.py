"""How many tokens' logits the loss holds at a time: as `shoal.model.head` does it, without torch."""

from __future__ import annotations

CHUNK_BYTES = {"cpu": 64 << 20, "cuda": 4 << 30}  # counted in float32


def chunk_tokens(rows: int, limit: int) -> int:
    """Of a vocabulary of `rows`, as far as it is here."""
    tokens = limit // (4 * rows)
    return max(128, tokens // 1024 * 1024 or tokens)
