"""The state of a stage, from a peer that has it to one that comes: in pieces, checked, while both go on."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import xxhash

from shoal.fleet.net.api import Endpoint, Message, PeerId, Refused
from shoal.values import BadValue, text, whole

PIECE = 1 << 20
AT_ONCE = 4
ANSWER_S = 60.0


class Donor:
    """Serves the state to siblings. A snapshot is kept for those who come later, until it is too old for them."""

    def __init__(
        self, endpoint: Endpoint, siblings: tuple[PeerId, ...], take: Callable[[], Awaitable[tuple[int, int, bytes]]]
    ) -> None:
        """`take` gives the state as it is now, with its era and step."""
        self._siblings, self._take = siblings, take
        self._snapshot: tuple[int, int, bytes, str] | None = None
        endpoint.on("state", self._on_state, 1 << 16)
        endpoint.on("piece", self._on_piece, 1 << 16)

    async def _on_state(self, peer: PeerId, message: Message) -> Message:
        if peer not in self._siblings:
            raise Refused("no sibling")
        try:
            wanted = whole(message.fields.get("era")), whole(message.fields.get("least"))
        except BadValue as e:
            raise Refused(f"no question for a state: {e}") from None
        if self._snapshot is None or self._snapshot[0] != wanted[0] or self._snapshot[1] < wanted[1]:
            era, step, data = await self._take()
            self._snapshot = era, step, data, xxhash.xxh3_128_hexdigest(data)
        era, step, data, digest = self._snapshot
        if era != wanted[0] or step < wanted[1]:
            return Message("later")  # the sibling has seen a plan that has not arrived here
        return Message("state", {"step": step, "bytes": len(data), "digest": digest})

    async def _on_piece(self, peer: PeerId, message: Message) -> Message:
        if peer not in self._siblings:
            raise Refused("no sibling")
        at = message.fields.get("at")
        if self._snapshot is None or self._snapshot[3] != message.fields.get("digest"):
            raise Refused("that state is no longer here")
        if type(at) is not int or not 0 <= at < len(self._snapshot[2]):
            raise Refused("no piece of the state")
        return Message("piece", {}, self._snapshot[2][at : at + PIECE])


async def fetch(endpoint: Endpoint, donor: PeerId, era: int, least: int, most: int) -> tuple[int, bytes] | None:
    """A state of step `least` or newer; None when the donor has none yet. Raises Unreachable or Refused."""
    answer = await endpoint.ask(donor, Message("state", {"era": era, "least": least}), timeout_s=ANSWER_S)
    if answer.kind != "state":
        return None
    about, limit = answer.fields, asyncio.Semaphore(AT_ONCE)
    try:
        size, step, digest = whole(about.get("bytes"), most), whole(about.get("step")), text(about.get("digest"), 64)
    except BadValue as e:
        raise Refused(f"no state of this stage, which has {most} bytes at most: {e}") from None

    async def piece(at: int) -> bytes:
        async with limit:
            asked = Message("piece", {"digest": digest, "at": at})
            return bytes((await endpoint.ask(donor, asked, timeout_s=ANSWER_S, most_body=PIECE)).body)

    data = b"".join(await asyncio.gather(*(piece(at) for at in range(0, size, PIECE))))
    if xxhash.xxh3_128_hexdigest(data) != digest:
        raise Refused("the state has changed on its way")
    return step, data
