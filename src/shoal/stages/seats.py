"""How a peer of a swarm comes to know which stage it holds: it asks the others for the layout that the organiser has
signed (`shoal.swarm.layout`). The organiser's own peer signs it when as many as `swarm.peers` are here and wait."""

from __future__ import annotations

import asyncio

from shoal.net.answers import Answers
from shoal.net.api import Endpoint, Event, Message, PeerId, Refused, Unreachable
from shoal.net.identity import Identity
from shoal.spec.run import Run
from shoal.swarm.charter import Charter
from shoal.swarm.config import NodeConfig
from shoal.swarm.layout import LAYOUT, MOST_LAYOUT, SignedLayout, read_layout, seated
from shoal.swarm.roster import Roster

ASK_S = 1.0  # between two questions


class Seats:
    def __init__(
        self,
        config: NodeConfig,
        run: Run,
        charter: Charter,
        roster: Roster,
        endpoint: Endpoint,
        answers: Answers,
        event: Event,
    ) -> None:
        self._file, self._charter, self._roster, self._event = config.layout_file, charter, roster, event
        self._endpoint, self._answers = endpoint, answers
        self._organiser = Identity.load(config.organiser_file) if config.organiser_file.exists() else None
        self._peers, self._said = run.swarm.peers, ""
        self.layout = SignedLayout.load(self._file, charter)
        endpoint.on(LAYOUT, self._on_layout, 0)

    async def settled(self) -> SignedLayout:
        """As soon as it is signed and known here. SetupError where this peer has no place in it."""
        while self.layout is None:
            await self._look()
            if self.layout is None:
                await asyncio.sleep(ASK_S)
        self.layout.stage_of(self._roster.me.id)
        return self.layout

    async def _look(self) -> None:
        links = self._endpoint.links()
        here = [p for p in self._roster.summary() if p in links and links[p].way is not None]  # as they came
        answers = await asyncio.gather(*map(self._ask, here))
        known = next((found for _, found in answers if found is not None), None)
        waiting = [self._roster.me.id, *(p for p, (waits, _) in zip(here, answers, strict=True) if waits)]
        if known is None and self._organiser is not None and len(waiting) >= self._peers:
            known = SignedLayout.new(self._charter.swarm, self._organiser, seated(waiting, self._charter.stages))
        if known is not None:
            known.save(self._file)  # before anybody is told
            self.layout = known
            return
        signs = "" if self._organiser is not None else "; the organiser's peer then says who holds which stage"
        self._say(f"Waiting for peers before the first step: {len(waiting)} of {self._peers} are here{signs}.")

    async def _ask(self, peer: PeerId) -> tuple[bool, SignedLayout | None]:
        """Whether it waits too, and the layout if it knows that. Who only visits has no answer to this question."""
        try:
            question = Message(LAYOUT)
            found = await self._answers.ask(
                peer, question, lambda answer: read_layout(answer, self._charter), most_body=MOST_LAYOUT
            )
        except (Unreachable, Refused):
            return False, None
        return found is None and peer in self._roster, found

    async def _on_layout(self, peer: PeerId, message: Message) -> Message:
        if peer not in self._roster:
            raise Refused("not a member")
        return Message(LAYOUT, {}, b"" if self.layout is None else self.layout.to_bytes())

    def _say(self, text: str) -> None:
        if text != self._said:
            self._said = text
            self._event("waiting", text=text)
