"""The state of a stage, from a peer that has it to one that comes: in pieces, checked, while both go on."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import xxhash

from shoal.net.answers import Answers, BadAnswer
from shoal.net.api import Endpoint, Message, PeerId, Refused
from shoal.stages.routes import MOST_COUNT
from shoal.values import BadValue, text, whole

PIECE = 1 << 20
AT_ONCE = 4
ANSWER_S = 60.0
STATE, PART, LATER = "state", "piece", "later"  # kinds of messages


class Donor:
    """Serves the state to siblings. A snapshot is kept for those who come later, until it is too old for them."""

    def __init__(
        self,
        endpoint: Endpoint,
        siblings: Callable[[], tuple[PeerId, ...]],
        take: Callable[[], Awaitable[tuple[int, int, bytes]]],
    ) -> None:
        """`siblings`: as of now. `take` gives the state as it is now, with its era and step."""
        self._siblings, self._take = siblings, take
        self._snapshot: tuple[int, int, bytes, str] | None = None
        endpoint.on(STATE, self._on_state, 1 << 16)
        endpoint.on(PART, self._on_piece, 1 << 16)

    async def _on_state(self, peer: PeerId, message: Message) -> Message:
        if peer not in self._siblings():
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
            return Message(LATER)  # the sibling has seen a plan that has not arrived here
        return Message(STATE, {"step": step, "bytes": len(data), "digest": digest})

    async def _on_piece(self, peer: PeerId, message: Message) -> Message:
        if peer not in self._siblings():
            raise Refused("no sibling")
        at = message.fields.get("at")
        if self._snapshot is None or self._snapshot[3] != message.fields.get("digest"):
            raise Refused("that state is no longer here")
        if type(at) is not int or not 0 <= at < len(self._snapshot[2]):
            raise Refused("no piece of the state")
        return Message(PART, {}, self._snapshot[2][at : at + PIECE])


@dataclass(frozen=True)
class Offer:
    step: int
    size: int  # bytes
    digest: str


def read_offer(answer: Message, most: int) -> Offer | None:
    """Of a donor that was asked for a state of at most so many bytes; None: it has none yet."""
    if answer.kind == LATER:
        return None
    s = answer.fields
    return Offer(whole(s.get("step"), MOST_COUNT), whole(s.get("bytes"), most), text(s.get("digest"), 64))


def read_piece(answer: Message, size: int) -> bytes:
    if len(answer.body) != size:
        raise BadValue(f"{len(answer.body)} bytes where a piece of the state has {size}")
    return bytes(answer.body)


async def fetch(answers: Answers, donor: PeerId, era: int, least: int, most: int) -> tuple[int, bytes] | None:
    """A state of step `least` or newer; None when the donor has none yet. Raises Unreachable or Refused."""
    question = Message(STATE, {"era": era, "least": least})
    offer = await answers.ask(donor, question, lambda answer: read_offer(answer, most), ANSWER_S)
    if offer is None:
        return None
    limit = asyncio.Semaphore(AT_ONCE)

    async def piece(at: int) -> bytes:
        size = min(PIECE, offer.size - at)
        async with limit:
            asked = Message(PART, {"digest": offer.digest, "at": at})
            return await answers.ask(donor, asked, lambda answer: read_piece(answer, size), ANSWER_S, PIECE)

    data = b"".join(await asyncio.gather(*(piece(at) for at in range(0, offer.size, PIECE))))
    if xxhash.xxh3_128_hexdigest(data) != offer.digest:
        answers.bad(donor, STATE, "a state that is not what its digest says")
        raise BadAnswer("the state has changed on its way")
    return offer.step, data
