"""Is anybody there? Asked before a client is loaded: MLflow's costs 6 s of CPU, which a dead server is not worth."""

from __future__ import annotations

import socket
from urllib.parse import urlsplit
from urllib.request import getproxies

TIMEOUT_S = 10.0


def knock(address: str) -> None:
    """Raises at once when nobody listens at an http(s) address; says nothing about what answers there."""
    url = urlsplit(address)
    if url.scheme not in ("http", "https") or not url.hostname or getproxies().get(url.scheme):
        return  # a file, a database, or behind a proxy that alone can tell
    port = url.port or (443 if url.scheme == "https" else 80)
    socket.create_connection((url.hostname, port), timeout=TIMEOUT_S).close()
