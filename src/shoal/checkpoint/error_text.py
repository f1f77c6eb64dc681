"""What went wrong, in the words that travel between processes."""

from __future__ import annotations

from shoal.errors import ShoalError


def words_of(e: Exception) -> str:
    if isinstance(e, OSError):
        return f"{e.strerror or e} ({e.filename})" if e.filename else f"{e.strerror or e}"
    return str(e) if isinstance(e, ShoalError) else f"{type(e).__name__}: {e}"


def not_saved(step: int, rank: int, why: str) -> str:
    why = why.rstrip(".")
    return f"the checkpoint of step {step} was not saved: rank {rank}: {why}. Older checkpoints are untouched."
