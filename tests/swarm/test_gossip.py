"""News in a swarm where each peer has a few links: endpoints in memory, so that there can be many."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

from shoal.net.api import Address, Handler, LinkState, Message, PeerId, Unreachable
from shoal.net.identity import Identity
from shoal.swarm.gossip import Gossip
from shoal.swarm.invite import Admission
from shoal.swarm.roster import Roster

SWARM = "5a" * 32
PEERS, LINKS = 40, 4


class Fake:
    """An endpoint whose links are given; it loses a fifth of what is only told."""

    def __init__(self, me: PeerId, all_of_them: dict[PeerId, Fake], rng: random.Random) -> None:
        self.id, self._all, self._rng = me, all_of_them, rng
        self._handlers: dict[str, Handler] = {}
        self.linked: set[PeerId] = set()
        self.known: set[PeerId] = set()
        self.bytes = 0
        all_of_them[me] = self

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    def address(self) -> Address:
        return Address(tcp=("10.0.0.1:1",))

    def on(self, kind: str, handler: Handler, most_body: int = 1 << 20) -> None:
        self._handlers[kind] = handler

    def know(self, peer: PeerId, address: Address) -> None:
        self.known.add(peer)

    def forget(self, peer: PeerId) -> None:
        self.known.discard(peer)
        self.linked.discard(peer)

    async def ask(self, peer: PeerId, message: Message, timeout_s: float = 10.0, most_body: int = 1 << 20) -> Message:
        if peer not in self.linked:
            raise Unreachable("no link")
        self.bytes += len(message.body)
        answer = await self._all[peer]._handlers[message.kind](self.id, message)
        assert answer is not None
        self.bytes += len(answer.body)
        return answer

    def tell(self, peer: PeerId, message: Message) -> None:
        self.bytes += len(message.body)
        if peer in self.linked and self._rng.random() > 0.2:
            task = asyncio.ensure_future(self._all[peer]._handlers[message.kind](self.id, message))
            _PENDING.add(task)
            task.add_done_callback(_PENDING.discard)

    def links(self) -> dict[PeerId, LinkState]:
        return {peer: LinkState(peer, "tcp") for peer in self.linked}


_PENDING: set[asyncio.Future[Message | None]] = set()


async def rounds(gossips: list[Gossip], done: Callable[[], bool], most: int = 40) -> int:
    for n in range(most):
        if done():
            return n
        for gossip in gossips:
            await gossip.round()
        while _PENDING:
            await asyncio.sleep(0)
    raise AssertionError("it did not get through")


def test_news_and_revocations_reach_forty_peers_with_four_links_each_in_a_few_rounds() -> None:
    async def play() -> None:
        organiser, rng = Identity.new(), random.Random(3)
        ends: dict[PeerId, Fake] = {}
        rosters, gossips = [], []
        for _ in range(PEERS):
            me = Identity.new()
            rosters.append(Roster(SWARM, organiser.id, me, Admission.direct(SWARM, me.id, organiser)))
            gossips.append(Gossip(rosters[-1], Fake(me.id, ends, rng)))
        ids = [r.me.id for r in rosters]
        for i, roster in enumerate(rosters):  # a ring, so that it hangs together, and some links by chance
            for other in {ids[i - 1], *rng.sample(ids, LINKS - 1)} - {roster.me.id}:
                for a, b in ((roster.me.id, other), (other, roster.me.id)):
                    ends[a].linked.add(b)
                entry = rosters[ids.index(other)].entry(other)
                assert entry is not None
                roster.take([entry.to_json()])
        assert await rounds(gossips, lambda: all(len(r.members()) == PEERS for r in rosters)) <= 7
        # In line: a question costs a hash.
        before = sum(e.bytes for e in ends.values())
        for gossip in gossips:
            await gossip.round()
        assert sum(e.bytes for e in ends.values()) == before
        # One is put out by a member far from most.
        bad = ids[20]
        rosters[0].revoke(organiser, "peer", bad)
        honest = [r for r in rosters if r.me.id != bad]
        assert await rounds(gossips, lambda: all(bad not in r for r in honest)) <= 7
        assert all(bad not in ends[r.me.id].known for r in honest)

    asyncio.run(play())


def test_two_halves_that_were_apart_know_all_once_two_of_them_meet() -> None:
    async def play() -> None:
        organiser, rng = Identity.new(), random.Random(4)
        ends: dict[PeerId, Fake] = {}
        rosters, gossips = [], []
        for _ in range(12):
            me = Identity.new()
            rosters.append(Roster(SWARM, organiser.id, me, Admission.direct(SWARM, me.id, organiser)))
            gossips.append(Gossip(rosters[-1], Fake(me.id, ends, rng)))
        halves = rosters[:6], rosters[6:]
        for half in halves:
            entries = [e.to_json() for r in half for e in r.newer({})]
            for r in half:
                r.take(entries)
                ends[r.me.id].linked = {o.me.id for o in half} - {r.me.id}
        half_a, half_b = halves
        half_a[1].revoke(organiser, "peer", Identity.new().id)
        await rounds(gossips, lambda: all(r.revoked() for r in half_a))
        a, b = half_a[0], half_b[0]
        a.take([e.to_json() for e in b.newer({}) if e.peer == b.me.id])
        ends[a.me.id].linked.add(b.me.id)
        ends[b.me.id].linked.add(a.me.id)
        await rounds(gossips, lambda: all(len(r.members()) == 12 and r.revoked() for r in rosters))

    asyncio.run(play())
