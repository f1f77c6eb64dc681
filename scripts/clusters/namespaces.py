"""What emulated networks need of the machine: `python -m scripts.clusters.namespaces` installs it, or says why not."""

from __future__ import annotations

import sys

from scripts.clusters import debian
from scripts.clusters.debian import Missing

from shoal.emulate import possible

PACKAGES = ("iproute2", "nftables")
PROGRAMS = ("ip", "nft")


def ready() -> str:
    """Why this machine cannot emulate networks; empty if it can, with what was missing installed."""
    try:
        debian.get("nftables", PACKAGES, PROGRAMS)
    except Missing as e:
        return possible() or str(e)
    return possible()


if __name__ == "__main__":
    sys.exit(ready() and f"namespaces: {ready()}")
