"""What the address of a relay looks like. No iroh here: who names one need not have it."""

from __future__ import annotations

import re

MOST_RELAYS = 4  # of one endpoint
_URL = re.compile(r"https?://[^\s/:@]+(:\d+)?/?|https?://\[[0-9a-fA-F:]+\](:\d+)?/?")


def is_relay(url: str) -> bool:
    return _URL.fullmatch(url) is not None
