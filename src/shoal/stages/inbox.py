"""What neighbours and siblings send to a peer: checked where it arrives, kept until its step counts, and counted once.

Everything is keyed by era, step, phase and micro-batch, and may come twice, early or in any order.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from shoal.net.api import Handler, Message, PeerId, Refused
from shoal.stages.routes import MOST_COUNT, When
from shoal.values import BadValue, items, whole

if TYPE_CHECKING:
    from shoal.stages.peer import Peer

REFUSES_S = 2.0  # for so long the lead is told whose message could not be read; its sender tries again all the time


class Inbox:
    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self._box: dict[tuple[When, str, int], bytes] = {}
        self._refuses: dict[PeerId, float] = {}  # whose messages cannot be read here, since when
        endpoint, work = peer.endpoint, peer.work
        endpoint.on("act", self.guarded(self._on_message), work.message_bytes)
        endpoint.on("grad", self.guarded(self._on_message), work.message_bytes)
        endpoint.on("part", self.guarded(self._on_part), work.part_bytes)

    def has(self, when: When, kind: str, m: int) -> bool:
        return (when, kind, m) in self._box

    def get(self, when: When, kind: str, m: int) -> bytes:
        return self._box[when, kind, m]

    def forget(self, before: When) -> None:
        """What is of steps and phases before this one."""
        self._box = {k: v for k, v in self._box.items() if k[0] >= before}

    def refuses(self) -> tuple[PeerId, ...]:
        """Whose messages could not be read lately."""
        return tuple(p for p, at in self._refuses.items() if time.monotonic() - at < REFUSES_S)

    def guarded(self, handler: Callable[[PeerId, Message], Awaitable[Message]]) -> Handler:
        """What a peer of the layout says is understood, or refused; nobody else is listened to."""

        async def handle(peer: PeerId, message: Message) -> Message:
            if peer not in self._peer.known:
                raise Refused("no peer of this pipeline")
            try:
                return await handler(peer, message)
            except BadValue as e:
                self._peer.answers.bad(peer, message.kind, str(e))
                raise Refused(f"{message.kind}: {e}"[:200]) from None

        return handle

    async def _on_message(self, peer: PeerId, message: Message) -> Message:
        era, step, phase, m = (whole(message.fields.get(k), MOST_COUNT) for k in ("era", "step", "phase", "m"))
        beside = self._peer.stage + (1 if message.kind == "grad" else -1)
        if (
            not 0 <= beside < len(self._peer.layout)
            or peer not in self._peer.layout[beside]
            or not 0 <= m < self._peer.work.micro_batches
        ):
            raise Refused("no message for this stage")
        when = (era, step, phase)
        key = (when, message.kind, m)
        if self._is_due(when) and key not in self._box:
            await self._check(peer, message)
            if self._is_due(when):  # still
                if len(self._box) >= 4 * self._peer.work.micro_batches:
                    raise Refused("too many messages wait here")
                self._box.setdefault(key, bytes(message.body))
                self._peer.changed.set()
        return Message("ok")

    def _is_due(self, when: When) -> bool:
        return self._peer.plan is None or when >= self._peer.plan.when

    async def _check(self, peer: PeerId, message: Message) -> None:
        """Before anything of it is kept: what is not finite must not get into a sum. The lead hears of it."""
        try:
            await asyncio.to_thread(self._peer.work.check, message.kind, message.body)
        except BadValue:
            self.cannot_read(peer)
            raise

    def cannot_read(self, peer: PeerId) -> None:
        self._refuses[peer] = time.monotonic()
        self._peer.changed.set()

    async def _on_part(self, peer: PeerId, message: Message) -> Message:
        if peer not in self._peer.layout[self._peer.stage]:
            raise Refused("no sibling")
        era, step = (whole(message.fields.get(k), MOST_COUNT) for k in ("era", "step"))
        of = [
            whole(m, self._peer.work.micro_batches - 1)
            for m in items(message.fields.get("of"), self._peer.work.micro_batches)
        ]
        await self._check(peer, message)
        self._peer.history.add_part(era, step, peer, of, bytes(message.body))
        self._peer.changed.set()
        return Message("ok")
