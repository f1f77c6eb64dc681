"""Endpoints over TCP on loopback: messages, limits, strangers, restarts, silence."""

from __future__ import annotations

import asyncio
import os
import time

import pytest

from shoal import wire
from shoal.net import frames, tcp
from shoal.net.api import Address, Message, PeerId, Refused, Unreachable
from shoal.net.identity import Identity
from shoal.net.pipe import Greeting
from tests.net.ends import drain, echo, end, pair, until


def test_messages_small_and_large_arrive_and_the_link_is_one() -> None:
    async def main() -> None:
        async with pair() as (a, b, said_a, _):
            assert (await a.ask(b.id, Message("echo", {"x": 1}, b"hi"))).fields == {"from": a.id, "x": 1}
            body = os.urandom(9 << 20)
            answers = await asyncio.gather(
                *(a.ask(b.id, Message("echo", {}, body), most_body=10 << 20, timeout_s=30) for _ in range(2)),
                b.ask(a.id, Message("echo", {}, memoryview(body)), most_body=10 << 20, timeout_s=30),
            )
            assert all(bytes(answer.body) == body for answer in answers)
            told: list[bytes] = []

            async def note(peer: PeerId, message: Message) -> None:
                told.append(bytes(message.body))

            b.on("note", note)
            a.tell(b.id, Message("note", {}, b"small"))
            a.tell(b.id, Message("note", {}, body[:100_000]))
            await until(lambda: len(told) == 2)
            assert sorted(told, key=len) == [b"small", body[:100_000]]
            # Both have dialed; one connection is left, and the bulk that was under way was not disturbed.
            await until(lambda: [len(e._peers[o.id].carriers) for e, o in ((a, b), (b, a))] == [1, 1])
            await until(lambda: a.links()[b.id].up_bytes_per_s is not None)
            link = a.links()[b.id]
            assert link.way == "tcp"
            assert link.rtt_s is not None
            assert link.rtt_s < 1
            assert link.heard_s is not None
            assert link.down_bytes_per_s
            assert link.sent_bytes > len(body)
            assert link.received_bytes > len(body)
            assert [e["way"] for e in said_a.of("link_up")] == ["tcp"]
            assert said_a.of("net_up")[0]["tcp"] == list(a.address().tcp)
            assert not said_a.of("link_lost")

    asyncio.run(main())


def test_what_is_too_large_or_nobody_answers_is_refused_and_the_link_lives() -> None:
    async def main() -> None:
        async with pair() as (a, b, *_):

            async def small(peer: PeerId, message: Message) -> Message:
                return Message("ok", {}, bytes(3 << 20))

            async def wrong(peer: PeerId, message: Message) -> Message:
                raise KeyError("x")

            b.on("small", small, most_body=1000)
            b.on("wrong", wrong)
            with pytest.raises(Refused, match="at most 1000"):
                await a.ask(b.id, Message("small", {}, bytes(30 << 20)))
            with pytest.raises(Refused, match="at most 1048576 were asked for"):
                await a.ask(b.id, Message("small"))
            with pytest.raises(Refused, match="nobody answers"):
                await a.ask(b.id, Message("unheard"))
            with pytest.raises(Refused, match="KeyError"):
                await a.ask(b.id, Message("wrong"))
            assert b.budget.free == a.budget.free
            assert (await a.ask(b.id, Message("echo", {}, bytes(1 << 20)), most_body=1 << 20)).body == bytes(1 << 20)

    asyncio.run(main())


def test_control_does_not_wait_for_bulk() -> None:
    async def main() -> None:
        async with pair() as (a, b, *_):
            await a.ask(b.id, Message("echo"))
            body = bytes(48 << 20)
            bulk = asyncio.ensure_future(a.ask(b.id, Message("echo", {}, body), most_body=48 << 20, timeout_s=60))
            answered = 0
            while not bulk.done():
                await a.ask(b.id, Message("echo"))
                answered += 1
            await bulk
            assert answered > 5  # behind it, it would be one

    asyncio.run(main())


def test_an_uninvited_key_is_refused_and_journaled() -> None:
    async def main() -> None:
        invited = Identity.new()
        a, said = end(admit=lambda peer, proof: peer == invited.id and proof == b"ticket")
        b, _ = end(invited, proof=lambda: b"ticket")
        c, told = end(proof=lambda: b"ticket")
        for e in (a, b, c):
            await e.start()
        b.know(a.id, a.address())
        c.know(a.id, a.address())
        assert (await b.ask(a.id, Message("echo"))).kind == "echo"
        with pytest.raises(Unreachable):
            await c.ask(a.id, Message("echo"), timeout_s=0.3)
        assert {(e["peer"], e["reason"]) for e in said.of("link_refused")} == {(c.id, "not invited")}
        assert told.of("link_denied")[0]["reason"] == "not invited"
        assert set(a.links()) == {b.id}
        # The other side judges too: what answers must be a member.
        a._admit = lambda peer, proof: False
        a.know(c.id, c.address())
        await until(lambda: any(e["peer"] == c.id and "at" in e for e in said.of("link_refused")[1:]))
        for e in (a, b, c):
            await e.close()

    asyncio.run(main())


def test_a_forgotten_peer_is_refused_until_it_is_known_again() -> None:
    async def main() -> None:
        async with pair() as (a, b, said, _):
            await b.ask(a.id, Message("echo"))
            a.forget(b.id)
            with pytest.raises((Unreachable, Refused)):
                await b.ask(a.id, Message("echo"), timeout_s=0.5)
            with pytest.raises(Unreachable):
                await a.ask(b.id, Message("echo"), timeout_s=0.5)
            await until(lambda: said.of("link_refused"))  # it dials again
            assert b.id not in a.links()
            a.know(b.id, b.address())
            assert (await a.ask(b.id, Message("echo"))).kind == "echo"

    asyncio.run(main())


def test_a_peer_that_restarts_with_its_key_is_taken_over_at_once() -> None:
    async def main() -> None:
        key = Identity.new()
        a, said = end()
        first, _ = end(key)
        await a.start()
        await first.start()
        first.know(a.id, a.address())
        await first.ask(a.id, Message("echo"))
        # It is killed: its sockets stay open and silent, as after a power cut.
        for entry in first._peers.values():
            for keeper in entry.keepers:
                keeper.cancel()
        await first.tasks.close()
        second, _ = end(key)
        await second.start()
        second.know(a.id, a.address())
        await second.ask(a.id, Message("echo"))
        assert said.of("link_taken_over")[0]["peer"] == key.id
        assert len(a._peers[key.id].carriers) == 1
        assert (await a.ask(key.id, Message("echo"))).kind == "echo"
        for e in (a, second, first):
            await e.close()

    asyncio.run(main())


def test_silence_is_seen_and_the_link_comes_back() -> None:
    async def main() -> None:
        async with pair(silent_s=2.0) as (a, b, said, _):
            await a.ask(b.id, Message("echo"))
            for entry in b._peers.values():  # b stands still: nothing is read or written any more
                for carrier in entry.carriers:
                    for task in carrier._tasks:
                        task.cancel()
            began = time.monotonic()
            await until(lambda: said.of("link_silent"))
            await until(lambda: any(c.born_s > began for c in a._peers[b.id].carriers))
            assert (await a.ask(b.id, Message("echo"), timeout_s=50)).kind == "echo"
            await until(lambda: len(a._peers[b.id].carriers) == 1)

    asyncio.run(main())


def test_the_address_is_learnt_from_the_greeting() -> None:
    """Only one of the two knows where the other is; when that one's connection breaks, the other dials back."""

    async def main() -> None:
        (a, _), (b, said) = end(), end()
        await a.start()
        await b.start()
        b.know(a.id, Address())
        a.know(b.id, b.address())
        await a.ask(b.id, Message("echo"))
        a._peers[b.id].told = Address(tcp=("127.0.0.1:1",))
        a._peers[b.id].said = Address()
        a._peers[b.id].carriers[0].close("test")
        await until(lambda: said.of("link_lost"))
        assert (await b.ask(a.id, Message("echo"))).kind == "echo"
        await a.close()
        await b.close()

    asyncio.run(main())


def test_a_peer_that_takes_no_answers_is_refused_more_of_them() -> None:
    async def main() -> None:
        a, _ = end()
        await a.start()

        async def large(peer: PeerId, message: Message) -> Message:
            return Message("large", {}, bytes(12 << 20))

        a.on("large", large)
        greet = lambda own: Greeting("boot", "link", False)  # noqa: E731
        _, pipe = await tcp.reach(Identity.new(), a.id, a.address().tcp[0], greet, "")
        refused: list[str] = []
        for i in range(12):  # and it opens no connection for what it has asked for
            await pipe.send(frames.head("ask", i, Message("large")))
            frame = None
            while not isinstance(frame, frames.Head | frames.Refuse):
                frame = frames.parse(await pipe.receive())
            if isinstance(frame, frames.Refuse):
                refused.append(frame.why)
        assert len(refused) == 6
        assert "too much" in refused[0]
        pipe.close()
        await until(lambda: not a.links())
        await a.close()

    asyncio.run(main())


def test_many_addresses_of_one_peer_are_one_link() -> None:
    async def main() -> None:
        (a, said), (b, told) = end(), end(host="0.0.0.0")
        await a.start()
        await b.start()
        a.know(b.id, Address(tcp=tuple(f"127.0.0.{i}:{b.listener.port}" for i in range(1, 9))))
        await a.ask(b.id, Message("echo"))
        await asyncio.sleep(1.5)  # longer than a connection that is replaced lives
        assert (await b.ask(a.id, Message("echo"))).kind == "echo"
        for e, other, journal in ((a, b, said), (b, a, told)):
            assert len(e._peers[other.id].carriers) == 1
            assert len(journal.of("link_up")) == 1
            assert not [x for x in journal.said if x["kind"] in ("link_lost", "link_down", "link_refused")]
        await a.close()
        await b.close()

    asyncio.run(main())


def test_strangers_and_malformed_frames_end_their_connection_and_are_journaled() -> None:
    async def main() -> None:
        a, said = end()
        await a.start()
        host, port = wire.address_of(a.address().tcp[0])
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\nAccept: everything\r\n\r\n")
        assert await reader.read(100) == b""
        writer.close()
        assert "does not speak" in said.of("link_refused")[0]["reason"]
        friend = Identity.new()
        for wrong in (b"\xff" * 10, b"".join(frames.piece("tell", 1, 5, b"x")), b"\x05short"):
            greet = lambda own: Greeting(os.urandom(4).hex(), "link", False)  # noqa: E731
            _, pipe = await tcp.reach(friend, a.id, a.address().tcp[0], greet, "")
            await pipe.send([wrong])
            with pytest.raises(ConnectionError):
                await drain(pipe)
        assert len(said.of("frame_refused")) == 3
        assert {e["peer"] for e in said.of("frame_refused")} == {friend.id}
        # A body of a thousand announced, nothing of it sent: what was set aside comes back with the connection.
        a.on("echo", echo, most_body=1 << 30)
        free = a.budget.free
        _, pipe = await tcp.reach(friend, a.id, a.address().tcp[0], greet, "")
        for i in range(4):
            await pipe.send([frames._HEAD.pack(2, i, len(b'["echo",{}]'), 100 << 20) + b'["echo",{}]'])
        await until(lambda: a.budget.free < free)
        assert a.budget.free >= 0
        pipe.close()
        await until(lambda: a.budget.free == free)
        await a.close()

    asyncio.run(main())
