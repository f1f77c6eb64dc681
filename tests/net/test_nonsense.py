"""Strangers, relays and peers that send nonsense over real sockets: refused, bounded, and the next one is served."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

pytest.importorskip("iroh", reason="QUIC needs the extra [swarm]")

import iroh

from shoal import wire
from shoal.net import punch, quic, relays, tcp
from shoal.net.api import Address, Message, Refused
from shoal.net.identity import Identity
from shoal.net.pipe import MOST_GREETING, Broken, Greeting, read_greeting
from tests.islands.nonsense import RAW
from tests.net.ends import end, until

Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
OK = b"HTTP/1.1 200 OK\r\n\r\n"


def _at(place: str) -> bytes:
    return json.dumps({"you": place, "rendezvous": {"id": "ab" * 32, "addr": place}}).encode() + b"\n"


ODD_RELAYS: dict[str, bytes] = {
    "nothing": b"",
    "no HTTP": b"\x16\x03\x01" * 50,
    "404": b"HTTP/1.1 404 Not Found\r\n\r\n",
    "no JSON": OK + b"hello\n",
    "a number": OK + b"5\n",
    "null": OK + b"null\n",
    "deep": OK + b"[" * 30_000 + b"\n",
    "NaN": OK + b'{"you": NaN, "rendezvous": NaN}\n',
    "odd types": OK + b'{"you": 5, "rendezvous": {"id": 5, "addr": []}}\n',
    "no port": OK + _at("1.2.3.4:99999"),
    "a huge port": OK + _at("h:" + "9" * 5000),
    "no address": OK + _at("\x00"),
    "no end": OK + b"x" * 300_000,
    "headers": b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 20_000,
}  # fmt: skip


@asynccontextmanager
async def server(answer: Answer) -> AsyncIterator[str]:
    """host:port of somebody who answers so."""

    async def guarded(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.CancelledError):
            await answer(reader, writer)
        writer.close()

    listening = await asyncio.start_server(guarded, "127.0.0.1", 0)
    try:
        yield wire.text_of(listening.sockets[0].getsockname())
    finally:
        listening.close()


@pytest.mark.parametrize("odd", ODD_RELAYS)
def test_a_relay_that_answers_nonsense_is_none_and_no_more(odd: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(punch, "ASK_S", 5.0)

    async def say(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(ODD_RELAYS[odd])
        await writer.drain()

    async def main() -> None:
        async with server(say) as at:
            with pytest.raises((ValueError, OSError)):
                async with relays._opened(f"http://{at}"):
                    pass
            with pytest.raises(Broken, match="does not tell where"):
                await punch.door(f"http://{at}")

    asyncio.run(main())


def test_a_relay_or_a_peer_that_says_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(punch, "ASK_S", 0.2)
    monkeypatch.setattr(relays, "CALL_S", 0.2)
    monkeypatch.setattr(tcp, "CONNECT_S", 0.2)

    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            writer.write(b"H")
            await asyncio.sleep(0.05)

    async def main() -> None:
        async with server(drip) as at:
            with pytest.raises(TimeoutError):
                async with relays._opened(f"http://{at}"):
                    pass
            with pytest.raises(Broken):
                await punch.door(f"http://{at}")
            with pytest.raises(Broken, match="no answer in time"):
                await tcp.reach(Identity.new(), "ab" * 32, at, lambda own: Greeting("b", "l", False), "")

    asyncio.run(main())


@pytest.mark.parametrize("sent", [b"", b"\xff" * 5, os.urandom(31), os.urandom(400), b"\0" * 4000])
def test_who_is_dialed_and_answers_with_nonsense_is_no_peer(sent: bytes) -> None:
    async def say(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(100)
        writer.write(sent)

    async def main() -> None:
        async with server(say) as at:
            with pytest.raises((Broken, Refused)):
                await tcp.reach(Identity.new(), "ab" * 32, at, lambda own: Greeting("b", "l", False), "")

    asyncio.run(main())


def test_half_open_strangers_are_few_and_do_not_keep_a_friend_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp, "MOST_STRANGERS", 4)
    monkeypatch.setattr(tcp, "GREETING_S", 1.0)

    async def main() -> None:
        a, said = end()
        await a.start()
        held = [await asyncio.open_connection(*wire.address_of(a.address().tcp[0])) for _ in range(20)]
        for _, writer in held:
            writer.write(b"shoal")  # and no more
        most = 0

        def looked() -> bool:
            nonlocal most
            most = max(most, len(a.listener._tasks))
            return len(said.of("link_refused")) >= 4 and not a.listener._tasks

        await until(looked)
        assert most <= 4
        b, _ = end()
        await b.start()
        b.know(a.id, a.address())
        assert (await b.ask(a.id, Message("echo", {"x": 1}))).fields["x"] == 1
        for _, writer in held:
            writer.close()
        for one in (a, b):
            await one.close()
        assert not said.of("task-failed")

    asyncio.run(main())


def test_greetings_of_nonsense_are_refused() -> None:
    good = json.loads(Greeting("b", "l", False, Address(tcp=("1.2.3.4:5",)), "1.2.3.4:5", b"proof").encode())
    assert read_greeting(json.dumps(good).encode()).proof == b"proof"
    for key in good:
        for odd in (None, 5, [], {}, "x" * 100_000, [[[]]], ["a"] * 20, True):
            if odd != good[key]:
                with contextlib.suppress(Broken):
                    read_greeting(json.dumps({**good, key: odd}).encode())
    for raw in RAW:
        with pytest.raises(Broken):
            read_greeting(raw)


async def raw_endpoint() -> iroh.Endpoint:
    iroh.iroh_ffi.uniffi_set_event_loop(asyncio.get_running_loop())  # type: ignore[arg-type]
    options = iroh.EndpointOptions(
        preset=iroh.preset_minimal(),
        relay_mode=iroh.RelayMode.disabled(),
        bind_addr="127.0.0.1:0",
        alpns=[quic.PROTOCOL],
        secret_key=Identity.new().secret,
    )
    return await iroh.Endpoint.bind(options)


def framed(data: bytes) -> bytes:
    return len(data).to_bytes(4, "big") + data


def test_quic_strangers_that_send_nonsense_are_refused_and_a_friend_gets_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quic, "GREETING_S", 2.0)
    sent = [
        b"", b"\xff" * 9, b"\0\0\0\0", (MOST_GREETING + 1).to_bytes(4, "big"), framed(b"5"), framed(b"[" * 20_000),
        framed(b'{"version": 2}'), framed(b'{"version": NaN}'), framed(b"{}")[:5], framed(os.urandom(300)),
    ]  # fmt: skip

    async def main() -> None:
        a, said = end(quic=True)
        await a.start()
        stranger = await raw_endpoint()
        to = iroh.EndpointAddr(iroh.EndpointId.from_string(a.id), None, list(a.address().direct))
        kept: list[Any] = []
        for data in sent:
            connection = await stranger.connect(to, quic.PROTOCOL)
            stream = await connection.open_bi()
            kept += [connection, stream]  # half open
            if data:
                await stream.send().write_all(data)
        assert a.quic is not None
        await until(lambda: len(said.of("link_refused")) >= len(sent))
        await until(lambda: a.quic is not None and a.quic._strangers == 0)
        b, _ = end(quic=True)
        await b.start()
        b.know(a.id, Address(direct=a.address().direct))
        assert (await b.ask(a.id, Message("echo", {"x": 1}), 60)).fields["x"] == 1
        assert not said.of("task-failed")
        del kept
        await stranger.close()
        for one in (a, b):
            await one.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    "sent", [framed(b"\1[" + b"[" * 9000), framed(b"\1{}"), framed(b"\0" + b"\xff" * 5000), b"\xff" * 8, framed(b"\2")]
)
def test_who_is_dialed_by_quic_and_answers_with_nonsense_is_no_peer(sent: bytes) -> None:
    async def main() -> None:
        odd = await raw_endpoint()

        async def answer() -> None:
            incoming = await odd.accept_next()
            assert incoming is not None
            connection = await (await incoming.accept()).connect()
            stream = await connection.accept_bi()
            await stream.send().write_all(sent)
            await asyncio.sleep(30)
            del connection

        task = asyncio.create_task(answer())
        a, _ = end(quic=True)
        await a.start()
        assert a.quic is not None
        there = Address(direct=tuple(odd.bound_sockets()))
        with pytest.raises((Broken, Refused)):
            await a.quic.dial(str(odd.id()), there, lambda: Greeting("b", "l", False))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await odd.close()
        await a.close()

    asyncio.run(main())
