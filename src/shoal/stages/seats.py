"""How a peer of a swarm comes to know which stage it holds: it asks the others for the layout that the organiser has
signed (`shoal.swarm.layout`). The organiser's own peer signs it when as many as `swarm.peers` are here and wait, and
again for whoever waits later: that one becomes a sibling in the stage that has the fewest peers."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

from shoal.net.answers import Answers
from shoal.net.api import Endpoint, Event, Message, PeerId, Refused, Unreachable
from shoal.net.identity import Identity
from shoal.spec.cut import MOST_PEERS
from shoal.spec.run import Run
from shoal.swarm.charter import Charter
from shoal.swarm.config import NodeConfig
from shoal.swarm.layout import LAYOUT, MOST_LAYOUT, SignedLayout, read_layout
from shoal.swarm.roster import Roster
from shoal.values import BadValue, whole

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
        self._me, self._peers, self._said = roster.me.id, run.swarm.peers, ""
        self._asking: set[PeerId] = set()
        self.grown: Callable[[SignedLayout], None] = lambda layout: None  # told of each newer one
        self.layout = SignedLayout.load(self._file, charter)
        endpoint.on(LAYOUT, self._on_layout, 0)

    async def settled(self) -> tuple[SignedLayout, int]:
        """And the stage of this peer, as soon as that is signed and known here."""
        while True:
            stage = None if self.layout is None else self.layout.stage_of(self._me)
            if self.layout is not None and stage is not None:
                return self.layout, stage
            await self._look()
            await asyncio.sleep(0.0 if self._is_seated() else ASK_S)

    async def follow(self) -> None:
        """For ever: others may come."""
        while True:
            await asyncio.sleep(ASK_S * random.uniform(1.0, 3.0))
            here = self._here()
            if self._organiser is not None:
                await self._look()
            elif here:
                await self.learn_from(random.choice(here))

    async def learn_from(self, peer: PeerId) -> None:
        """From a peer that may know of a newer layout."""
        if peer not in self._asking:
            self._asking.add(peer)
            try:
                self._take((await self._ask(peer))[1])
            finally:
                self._asking.discard(peer)

    def _is_seated(self) -> bool:
        return self.layout is not None and self.layout.stage_of(self._me) is not None

    def _here(self) -> list[PeerId]:
        """Others, in the order in which they came."""
        links = self._endpoint.links()
        return [p for p in self._roster.summary() if p in links and links[p].way is not None]

    async def _look(self) -> None:
        """Asks all who may know more than this peer, or wait as it does."""
        here = self._here()
        answers = await asyncio.gather(*map(self._ask, here))
        for _, found in answers:
            self._take(found)
        waiting = [p for p, (answered, _) in zip(here, answers, strict=True) if answered]
        if self.layout is not None:
            self._add(waiting)
            if not self._is_seated():
                self._say("Waiting: the organiser's peer gives this one a stage when it is here.")
        elif self._organiser is not None and len(waiting) + 1 >= self._peers:
            first = [self._me, *waiting][:MOST_PEERS]
            self._take(SignedLayout.new(self._charter.swarm, self._organiser, first, self._charter.stages))
        else:
            signs = "" if self._organiser is not None else "; the organiser's peer then says who holds which stage"
            self._say(f"Waiting for peers before the first step: {len(waiting) + 1} of {self._peers} are here{signs}.")

    def _add(self, waiting: list[PeerId]) -> None:
        """To the stage with the fewest peers that are here, of those that have one: the state comes from a sibling."""
        layout, here = self.layout, {self._me, *self._here()}
        if layout is None or self._organiser is None:
            return
        count = {i: n for i, stage in enumerate(layout.stages) if (n := sum(p in here for p in stage))}
        added: dict[PeerId, int] = {}
        for peer in waiting[: MOST_PEERS - len(layout.peers)]:
            if layout.stage_of(peer) is None and count:
                added[peer] = min(count, key=lambda i: (count[i], i))
                count[added[peer]] += 1
        if added:
            self._take(layout.with_more(self._charter.swarm, self._organiser, added))

    def _take(self, found: SignedLayout | None) -> None:
        if found is None or (self.layout is not None and not found.extends(self.layout)):
            return
        found.save(self._file)  # before anybody is told
        self.layout = found
        self.grown(found)

    async def _ask(self, peer: PeerId) -> tuple[bool, SignedLayout | None]:
        """Whether it has answered, and what it knows more. Who only visits has no answer to this question."""
        question = Message(LAYOUT, {"known": 0 if self.layout is None else len(self.layout.peers)})
        try:
            found = await self._answers.ask(
                peer, question, lambda answer: read_layout(answer, self._charter), most_body=MOST_LAYOUT
            )
        except (Unreachable, Refused):
            return False, None
        return peer in self._roster, found  # it may have been revoked meanwhile

    async def _on_layout(self, peer: PeerId, message: Message) -> Message:
        try:
            known = whole(message.fields.get("known"), MOST_PEERS)
        except BadValue as e:
            raise Refused(f"no question for a layout: {e}") from None
        if peer not in self._roster:
            raise Refused("not a member")
        newer = self.layout is not None and len(self.layout.peers) > known
        body = self.layout.to_bytes() if self.layout is not None and newer else b""
        return Message(LAYOUT, {}, body)

    def _say(self, text: str) -> None:
        if text != self._said:
            self._said = text
            self._event("waiting", text=text)
