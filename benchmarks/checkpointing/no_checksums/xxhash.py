"""Stands in for the real xxhash in a process of Shoal's, to learn how long a save takes without checksums."""

from __future__ import annotations


def xxh3_128_hexdigest(data: object) -> str:
    return "0" * 32


class xxh3_128:  # the name of what it stands for
    def update(self, data: object) -> None:
        pass

    def hexdigest(self) -> str:
        return "0" * 32
