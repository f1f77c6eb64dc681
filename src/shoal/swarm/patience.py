"""How much a node hears of one peer: so many messages at once and in a second, and so much that makes no sense.

A peer that says more is answered "later"; one whose words make no sense again and again is not listened to for a while.
Neither is proof of a lie, so nobody is put out for it: a defect or a full line would look the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shoal.net.api import PeerId

BURST, PER_S = 400.0, 100.0  # messages; an honest peer says a few a second, and more when a history is fetched
MOST_REFUSED = 20  # in FORGIVEN_S
FORGIVEN_S = 60.0
DEAF_S = 60.0


@dataclass
class _Account:
    left: float
    at: float
    refused: float = 0.0
    deaf_until: float = float("-inf")


class Patience:
    def __init__(self, muted: Callable[[PeerId], None] = lambda peer: None) -> None:
        """`muted` is told when a peer is not listened to from now on."""
        self._accounts: dict[PeerId, _Account] = {}
        self._muted = muted

    def allows(self, peer: PeerId, now: float) -> str:
        """Why a message of this peer is not looked at; empty: it is."""
        account = self._account(peer, now)
        if now < account.deaf_until:
            return "what you say makes no sense; you are not listened to for a while"
        if account.left < 1:
            return "too many messages; ask again later"
        account.left -= 1
        return ""

    def refused(self, peer: PeerId, now: float) -> bool:
        """A message of it made no sense; whether that is worth a word."""
        account = self._account(peer, now)
        account.refused += 1
        if account.refused > MOST_REFUSED:
            account.refused, account.deaf_until = 0.0, now + DEAF_S
            self._muted(peer)
        return account.refused > 0

    def forget(self, peer: PeerId) -> None:
        self._accounts.pop(peer, None)

    def _account(self, peer: PeerId, now: float) -> _Account:
        account = self._accounts.setdefault(peer, _Account(BURST, now))
        passed, account.at = now - account.at, now
        account.left = min(BURST, account.left + PER_S * passed)
        account.refused = max(0.0, account.refused - MOST_REFUSED * passed / FORGIVEN_S)
        return account
