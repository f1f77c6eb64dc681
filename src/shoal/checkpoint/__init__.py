"""Checkpoints: saved by all ranks as one or not at all, verified when read, loaded into any layout.

    saved = save(root, step, tensors, extra, term)     all ranks together
    found = restore(root, tensors)                        all ranks together: the newest good one, into `tensors`
    found = newest(root); load(found, tensors)            the same in two steps
    read_full(found)                                      whole weights on one process
    verify(found), prune(root, keep)                      one process

Finding, verifying and pruning need no torch (the supervisor and `shoal checkpoint ls` use them), so what needs it is
imported when it is first asked for. The format is docs/reference/checkpoint.md.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from shoal.checkpoint.find import Found, Skipped, damage, newest, open_checkpoint, published, verify
from shoal.checkpoint.manifest import Corrupt
from shoal.checkpoint.names import Name
from shoal.checkpoint.publish import prune

if TYPE_CHECKING:
    from shoal.checkpoint.loading import load, read_full, restore
    from shoal.checkpoint.saving import Saved, SaveError, save

_WITH_TORCH = {
    **dict.fromkeys(("load", "read_full", "restore"), "shoal.checkpoint.loading"),
    **dict.fromkeys(("Saved", "SaveError", "save"), "shoal.checkpoint.saving"),
}

__all__ = [
    "Corrupt",
    "Found",
    "Name",
    "SaveError",
    "Saved",
    "Skipped",
    "damage",
    "load",
    "newest",
    "open_checkpoint",
    "prune",
    "published",
    "read_full",
    "restore",
    "save",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in _WITH_TORCH:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return getattr(import_module(_WITH_TORCH[name]), name)
