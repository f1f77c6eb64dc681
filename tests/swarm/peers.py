"""Peers of a swarm on loopback: real endpoints, real keys, real rosters."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal.net.endpoint import Peers, connect
from shoal.net.identity import Identity
from shoal.swarm.gossip import Gossip
from shoal.swarm.invite import Admission, Invitation
from shoal.swarm.roster import Roster
from tests.net.ends import Journal, until

SWARM = "5a" * 32
DAY_S = 86400.0


@dataclass
class Member:
    roster: Roster
    endpoint: Peers
    gossip: Gossip
    journal: Journal
    task: asyncio.Task[None]

    @property
    def id(self) -> str:
        return self.endpoint.id

    def refused(self) -> list[str]:
        return [f"{e['what']}: {e['why']}" for e in self.journal.of("refused")]

    async def stop(self) -> None:
        self.task.cancel()
        await self.endpoint.close()


@dataclass
class Swarm:
    organiser: Identity = field(default_factory=Identity.new)
    members: list[Member] = field(default_factory=list)

    def invite(self, *through: Member, expires: float | None = None) -> Invitation:
        peers = {m.id: m.endpoint.address() for m in through}
        expires = time.time() + DAY_S if expires is None else expires
        return Invitation.new(SWARM, self.organiser, "demo", expires, peers)

    async def first(self, **options: Any) -> Member:
        me = Identity.new()
        return await self.start(me, Admission.direct(SWARM, me.id, self.organiser), name="first", **options)

    async def join(self, invitation: Invitation, me: Identity | None = None, **options: Any) -> Member:
        me = me or Identity.new()
        member = await self.start(me, invitation.admit(me.id), **options)
        member.roster.trust(invitation.peers)
        for peer, address in invitation.peers.items():
            member.endpoint.know(peer, address)
        return member

    async def start(
        self,
        me: Identity,
        admission: Admission | None,
        name: str = "",
        file: Path | None = None,
        clock: Callable[[], float] = time.time,
    ) -> Member:
        journal = Journal()
        if admission is None:
            assert file is not None
            roster = Roster.load(file, me, journal, clock)
        else:
            roster = Roster(SWARM, self.organiser.id, me, admission, name=name, file=file, event=journal, clock=clock)
        endpoint = connect(me, roster.admit, journal, proof=roster.proof, host="127.0.0.1", quic=False)
        await endpoint.start()
        gossip = Gossip(roster, endpoint, journal, every_s=0.1)
        member = Member(roster, endpoint, gossip, journal, asyncio.create_task(gossip.run()))
        self.members.append(member)
        return member


@asynccontextmanager
async def swarm() -> AsyncIterator[Swarm]:
    made = Swarm()
    try:
        yield made
    finally:
        await asyncio.gather(*(m.stop() for m in made.members), return_exceptions=True)


def agree(*members: Member) -> bool:
    """Each knows each, and has a link to it."""
    ids = {m.id for m in members}
    return all(
        set(m.roster.members()) == ids
        and all(m.endpoint.links()[p].way is not None for p in ids - {m.id} if p in m.endpoint.links())
        and ids - {m.id} <= m.endpoint.links().keys()
        for m in members
    )


__all__ = ["DAY_S", "SWARM", "Member", "Swarm", "agree", "swarm", "until"]
