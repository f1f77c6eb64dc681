"""Routes in use: parts between real endpoints on loopback, with links that are made up."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from shoal.net.api import LinkState
from shoal.swarm.announced_parts import Parts
from shoal.swarm.messages import read_links
from shoal.swarm.round_record import Part
from shoal.swarm.route_keeper import EVERY_S, Router
from shoal.values import BadValue
from tests.net.ends import until
from tests.swarm.test_blobs import Peer, peers
from tests.swarm.test_topology import INSIDE

SIZE = 1 << 20
PLACES = [0, 0, 0, 1, 1, 2, 2, 2]
SLOW = 50.0  # the made-up rates are so much lower, so that nobody loses patience on a busy machine


def links(made: list[Peer], me: int) -> dict[str, LinkState]:
    found = {}
    for i, other in enumerate(made):
        if i != me:
            rtt_s, rate = INSIDE[PLACES[i]] if PLACES[i] == PLACES[me] else (0.15, 3e6)
            found[other.endpoint.id] = LinkState(other.endpoint.id, "tcp", rtt_s, 0.0, rate / SLOW, rate / SLOW)
    return found


async def exchange(made: list[Peer], routed: bool) -> tuple[int, list[Router]]:
    """Everybody gets everybody's part; what crossed between places, in bytes."""
    ids = [peer.endpoint.id for peer in made]
    routers = [Router(one) for one in ids]
    own = []
    for peer in made:
        file = peer.blobs.store.folder.parent / f"{peer.endpoint.id}-{routed}"
        file.write_bytes(os.urandom(SIZE))
        name, size = peer.blobs.add_file(file)
        own.append(Part(peer.endpoint.id, 1, name, size, 0, 1, (), targets=0))
    for me, router in enumerate(routers):
        for other, it in enumerate(routers):
            if other != me:
                router.hear(ids[other], read_links(it.telling(links(made, other))))
                router.size(ids[other], SIZE)
        router.size(ids[me], SIZE)
        router.choose(ids, links(made, me), 0.0)
    before = [dict(peer.blobs.served.by_peer) for peer in made]
    every = []
    for peer, router in zip(made, routers, strict=True):
        choice = router.choice if routed else lambda owner: None
        parts = Parts(peer.blobs, lambda owner: ids, lambda kind, **fields: None, choice)
        parts.fetch(part for part in own if part.peer != peer.endpoint.id)
        every.append(parts)
    await until(lambda: all(not parts.missing(own) for parts in every), 30)
    place = dict(zip(ids, PLACES, strict=True))
    crossed = sum(
        count - was.get(to, 0)
        for peer, was in zip(made, before, strict=True)
        for to, count in peer.blobs.served.by_peer.items()
        if place[to] != place[peer.endpoint.id]
    )
    for parts in every:
        await parts.close()
    return crossed, routers


def test_parts_cross_between_regions_once(tmp_path: Path) -> None:
    asyncio.run(_parts_cross_between_regions_once(tmp_path))


async def _parts_cross_between_regions_once(tmp_path: Path) -> None:
    async with peers(tmp_path, len(PLACES)) as made:
        await until(lambda: all(len(_linked(peer)) == len(PLACES) - 1 for peer in made), 20)
        routed, routers = await exchange(made, routed=True)
        without, _ = await exchange(made, routed=False)
    assert routers[0].routes is not None
    assert sorted(map(len, routers[0].routes.regions)) == [2, 3, 3]
    assert len({router.routes.regions for router in routers if router.routes}) == 1
    fewest = routers[0].routes.crossing_bytes()
    print(
        f"{routed / 2**20:.0f} MiB crossed, {without / 2**20:.0f} when all are asked: {without / routed:.2f} times less"
    )
    assert fewest == 2 * len(PLACES) * SIZE
    assert fewest <= routed <= 1.25 * fewest  # a piece is asked for again where a busy machine loses a link
    assert without > 1.4 * routed


def test_a_gateway_that_brings_nothing_holds_nobody_up_for_long(tmp_path: Path) -> None:
    asyncio.run(_a_gateway_that_brings_nothing_holds_nobody_up_for_long(tmp_path))


async def _a_gateway_that_brings_nothing_holds_nobody_up_for_long(tmp_path: Path) -> None:
    async with peers(tmp_path, 3) as made:
        owner, gateway, me = made
        file = tmp_path / "part"
        file.write_bytes(os.urandom(SIZE))
        name, size = owner.blobs.add_file(file)
        part = Part(owner.endpoint.id, 1, name, size, 0, 1, (), targets=0)
        router = Router(me.endpoint.id)
        found = router.choose([p.endpoint.id for p in made], {}, 0.0)
        choice = found.choice(me.endpoint.id, owner.endpoint.id)
        first = type(choice)((gateway.endpoint.id,), (owner.endpoint.id,), 0.3)  # which has nothing
        parts = Parts(me.blobs, lambda owner: [], lambda kind, **fields: None, lambda owner: first)
        began = asyncio.get_running_loop().time()
        parts.fetch([part])
        await until(lambda: not parts.missing([part]), 10)
        assert asyncio.get_running_loop().time() - began >= 0.3
        await parts.close()


def test_what_peers_say_is_taken_with_care() -> None:
    events = []
    router = Router("a", lambda kind, **fields: events.append(kind))
    a, b = "a" * 64, "b" * 64
    told = Router(b).telling({a: LinkState(a, "tcp", 0.0123456, 0.0, 1e6, None)})
    assert told == [[a, "tcp", 0.01235, 1e6, None]]
    router.hear("b", {"a": read_links(told)[a]})
    for wrong in (
        None,
        {a: 1},
        [[a, "tcp", 0.1, 1e6]],
        [[a, "pigeon", 0.1, 1e6, 1e6]],
        [[a, "tcp", float("nan"), 1e6, 1e6]],
        [[a, "tcp", 0.1, float("inf"), 1e6]],
        [[a, "tcp", 0.1, -1, 1e6]],
        [[a, "tcp", 10**400, 1, 1e6]],
        [[a, "tcp", True, 1, 1e6]],
        [[3, "tcp", 0.1, 1, 1e6]],
        [["a", "tcp", 0.1, 1, 1e6]],
        [[a, ["tcp"], 0.1, 1, 1e6]],
        [[a, None, None, None, None]] * 1001,
    ):
        with pytest.raises(BadValue):
            read_links(wrong)
    assert router.choice("b") is None
    first = router.choose(["a", "b"], {}, 0.0)
    assert first.measured.rtt_s("a", "b") == 0.01235
    assert router.choose(["b", "a"], {}, EVERY_S / 2) is first
    assert router.choose(["a", "b"], {}, EVERY_S * 2) is not first
    assert router.choose(["a", "b", "c"], {}, EVERY_S * 2).measured.peers == ("a", "b", "c")
    assert router.choice("stranger") is None
    assert events == ["routes", "routes"]


def _linked(peer: Peer) -> list[str]:
    return [one for one, link in peer.endpoint.links().items() if link.way is not None]
