"""Questions to peers, each with the reader of its answer: what the rest sees is typed, or nothing has come.

An answer that cannot be read is a `Refused` for whoever has asked, so that it asks somebody else. The peer is named in
the journal, once; it is asked less and less, and after some such answers not at all for a while. It proves no lie, so
nobody is put out for it: a defect, or another version, would look the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from shoal.net.api import Endpoint, Event, Message, PeerId, Refused
from shoal.values import BadValue

AGAIN_S = (1.0, 30.0)  # before it is asked the same again: after the first bad answer, at most
MOST_BAD = 5  # in FORGIVEN_S; with more it is left out
FORGIVEN_S = 120.0
LEFT_OUT_S = 60.0
NAMED_S = 600.0  # between two words on one peer

T = TypeVar("T")


class BadAnswer(Refused):
    """The peer has answered, and nobody can read it."""


@dataclass
class _Account:
    at: float
    bad: float = 0.0
    again: dict[str, float] = field(default_factory=dict)  # kind of question: not before
    out_until: float = float("-inf")
    named: float = float("-inf")


class Answers:
    """Belongs to the endpoint's loop."""

    def __init__(
        self,
        endpoint: Endpoint,
        event: Event,
        name_of: Callable[[PeerId], str] = lambda peer: peer[:8],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._endpoint, self._event, self._name_of, self._clock = endpoint, event, name_of, clock
        self._accounts: dict[PeerId, _Account] = {}

    async def ask(
        self,
        peer: PeerId,
        message: Message,
        read: Callable[[Message], T],
        timeout_s: float = 10.0,
        most_body: int = 1 << 20,
    ) -> T:
        """What `read` makes of the answer. Raises `Unreachable` or `Refused`, also for what cannot be read, and for a
        peer that is not asked now. `read` raises `BadValue`, and nothing else."""
        if self.rests(peer, message.kind):
            raise Refused(f"{self._name_of(peer)} is not asked now: its answers make no sense")
        answer = await self._endpoint.ask(peer, message, timeout_s, most_body)
        try:
            return read(answer)
        except BadValue as e:
            self.bad(peer, message.kind, str(e))
            raise BadAnswer(f"the answer of {self._name_of(peer)} to {message.kind!r} makes no sense: {e}") from None

    def bad(self, peer: PeerId, kind: str, why: str) -> None:
        """What it has said makes no sense."""
        now = self._clock()
        account = self._account(peer, now)
        account.again[kind] = now + min(AGAIN_S[0] * 2 ** int(account.bad), AGAIN_S[1])
        account.bad += 1
        if now - account.named >= NAMED_S:
            account.named = now
            text = f"what {self._name_of(peer)} says makes no sense ({kind}: {why[:200]}); others are asked"
            self._event("nonsense", peer=peer, message=kind, why=why[:200], text=text)
        if account.bad > MOST_BAD:
            account.bad, account.out_until = float(MOST_BAD), now + LEFT_OUT_S

    def rests(self, peer: PeerId, kind: str) -> bool:
        """Whether it is not asked this now."""
        if peer not in self._accounts:
            return False
        now = self._clock()
        account = self._account(peer, now)
        return now < max(account.out_until, account.again.get(kind, now))

    def left_out(self, peer: PeerId) -> bool:
        """Whether it is asked nothing now."""
        return peer in self._accounts and self._clock() < self._accounts[peer].out_until

    def forget(self, peer: PeerId) -> None:
        self._accounts.pop(peer, None)

    def _account(self, peer: PeerId, now: float) -> _Account:
        account = self._accounts.setdefault(peer, _Account(now))
        passed, account.at = now - account.at, now
        account.bad = max(0.0, account.bad - MOST_BAD * passed / FORGIVEN_S)
        if not account.bad:
            account.again.clear()
        return account
