"""Stands in for the real xxhash in a process of Shoal's, to learn how long a save takes without checksums."""

from __future__ import annotations

from typing import Any


class _Hash:
    def __init__(self, data: object = b"") -> None: ...

    def update(self, data: object) -> None: ...

    def hexdigest(self) -> str:
        return "0" * 32


def __getattr__(name: str) -> Any:
    return (lambda data: "0" * 32) if name.endswith("hexdigest") else _Hash
