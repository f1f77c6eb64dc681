"""Endpoints over QUIC on loopback: the same messages and limits as over TCP."""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any

import pytest

pytest.importorskip("iroh", reason="QUIC needs the extra [swarm]")

from shoal.net import quic
from shoal.net.api import Address, Message, Unreachable
from shoal.net.endpoint import Peers
from shoal.net.identity import Identity
from tests.net.ends import Journal, end, until


def quic_only(*identity: Identity, **options: Any) -> tuple[Peers, Journal]:
    """One that cannot be dialed by TCP."""
    made, journal = end(*identity, quic=True, **options)
    whole = made.address
    made.address = lambda: Address(whole().relays, whole().direct)  # type: ignore[method-assign]
    return made, journal


def test_messages_small_and_large_arrive_over_one_link() -> None:
    async def main() -> None:
        (a, said), (b, _) = quic_only(), quic_only()
        await a.start()
        await b.start()
        a.know(b.id, b.address())
        b.know(a.id, a.address())
        assert (await a.ask(b.id, Message("echo", {"x": 1}, b"hi"))).fields == {"from": a.id, "x": 1}
        body = os.urandom(3 << 20)
        answers = await asyncio.gather(
            a.ask(b.id, Message("echo", {}, body), 60, most_body=4 << 20),
            b.ask(a.id, Message("echo", {}, body), 60, most_body=4 << 20),
        )
        assert all(bytes(answer.body) == body for answer in answers)
        await until(lambda: [len(e._peers[o.id].carriers) for e, o in ((a, b), (b, a))] == [1, 1])
        await until(lambda: a.links()[b.id].rtt_s is not None)
        assert a.links()[b.id].way == "direct"
        assert [e["way"] for e in said.of("link_up")] == ["direct"]
        await b.close()
        await until(lambda: said.of("link_lost"))
        assert "leaving" in said.of("link_lost")[0]["reason"] or "closed" in said.of("link_lost")[0]["reason"].lower()
        await a.close()

    asyncio.run(main())


def test_an_uninvited_key_is_refused_and_a_restarted_peer_taken_over() -> None:
    async def main() -> None:
        friend = Identity.new()
        a, said = quic_only(admit=lambda peer, proof: peer == friend.id)
        b, _ = quic_only(friend)
        c, told = quic_only()
        for e in (a, b, c):
            await e.start()
            e.know(a.id, a.address())
        assert (await b.ask(a.id, Message("echo"))).kind == "echo"
        with pytest.raises(Unreachable):
            await c.ask(a.id, Message("echo"), timeout_s=1)
        assert [e["reason"] for e in said.of("link_refused") if e["peer"] == c.id][:1] == ["not invited"]
        assert told.of("link_denied")[0]["reason"] == "not invited"
        again, _ = quic_only(friend)
        await again.start()
        again.know(a.id, a.address())
        assert (await again.ask(a.id, Message("echo"))).kind == "echo"
        assert said.of("link_taken_over")[0]["peer"] == friend.id
        for e in (a, b, c, again):
            await e.close()

    asyncio.run(main())


def test_large_writes_do_not_copy_byte_by_byte() -> None:
    """Either this version of iroh's package is fast by itself, or it is quickened when it is loaded."""
    builder = quic.iroh_ffi._UniffiRustBufferBuilder
    data, made = os.urandom(8 << 20), builder()
    began = time.process_time()
    made.write(data)
    took = time.process_time() - began
    assert made.finalize().len == len(data)
    assert took < 0.2  # the loop takes seconds
