"""How a rank's checkpoints are kept: what its persister has to know. No torch here."""

from __future__ import annotations

from dataclasses import dataclass, field

from shoal.checkpoint.part import ReadBack
from shoal.checkpoint.store import Folder, Store


@dataclass(frozen=True)
class Setup:
    rank: int
    world: int
    term: int
    from_step: int  # that this term goes on from; -1: from nothing
    stores: tuple[str, ...]  # the one that is written to, then the one that it is copied to from there
    memory: str | None  # this node's folder in RAM
    next_keeper: str | None = None  # the address of the next node's, which holds a copy
    token: str = field(default="", repr=False)  # that it knows this run by
    keep: int = 3
    keep_every: int = 0
    keep_best: int = 0
    read_back: str = "auto"
    patience_s: float = 180.0  # of rank 0, for the other ranks to have written
    backoff_s: float = 1.0  # before a write that has failed is tried again; then twice that, and twice that

    def read_back_of(self, store: Store) -> ReadBack:
        """`auto`: what is on a disk is read again in full; a bucket has compared checksums as it took it in."""
        if self.read_back == "auto":
            return "full" if isinstance(store, Folder) else "headers"
        return "full" if self.read_back == "full" else "headers"

    def verifies(self, store: Store) -> bool:
        """Whether a save that is published there is good to its last byte: read back, or compared by the store."""
        return self.read_back_of(store) == "full" or store.compares
