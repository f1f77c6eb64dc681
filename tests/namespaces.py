"""For tests that need an emulated network: skipped loudly where the machine cannot, a failure where CI requires it."""

from __future__ import annotations

import functools

from scripts.clusters.namespaces import ready

from tests.require import unavailable


def need_namespaces() -> None:
    if why := _ready():
        unavailable("namespaces", why)


@functools.cache
def _ready() -> str:
    return ready()
