"""The relay: iroh's clients accept it, strangers and nonsense are refused, and a slow client harms nobody else."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import iroh
import pytest
from blake3 import blake3
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from shoal.cli.swarm.relay import _admit
from shoal.errors import SetupError
from shoal.net.endpoint import connect as connect_peer
from shoal.net.identity import Identity
from shoal.net.relay import Relay, proof_of, token
from shoal.net.relay_client import MOST_PROOF, MOST_QUEUE
from shoal.net.relay_room import OWN, Room
from shoal.net.rendezvous import call, where
from shoal.net.websocket import BINARY, BadFrame, Inbox, header
from shoal.swarm.invite import Admission, Invitation
from tests.net.ends import until

ALICE, BOB, EVE = (Identity(bytes([i]) * 32) for i in (1, 2, 3))


def finish(body: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(body, 300))


@asynccontextmanager
async def relay(**given: Any) -> AsyncIterator[Relay]:
    found = Relay("127.0.0.1", 0, **given)
    await found.start()
    try:
        yield found
    finally:
        await found.close()


@asynccontextmanager
async def client(to: Relay, who: Identity, signer: Identity | None = None, shown: str = "") -> AsyncIterator[Any]:
    """As iroh's does, without iroh: signs the challenge, then is handed the relay's answer."""
    headers = {"Authorization": f"Bearer {shown}"} if shown else {}
    async with connect(
        f"ws://127.0.0.1:{to.port}/relay",
        subprotocols=["iroh-relay-v2", "iroh-relay-v1"],  # type: ignore[list-item]
        additional_headers=headers,
        max_size=None,
        compression=None,
    ) as ws:
        challenge = await ws.recv()
        assert isinstance(challenge, bytes)
        assert challenge[0] == 0
        signed = blake3(challenge[1:], derive_key_context="iroh-relay handshake v1 challenge signature").digest()
        await ws.send(b"\x01" + bytes.fromhex(who.id) + b"\x40" + (signer or who).sign(signed))
        ws.answer = await ws.recv()  # type: ignore[attr-defined]
        yield ws


def packet(to: Identity, content: bytes) -> bytes:
    return b"\x04" + bytes.fromhex(to.id) + b"\x00" + content


async def closed(ws: ClientConnection) -> int | None:
    try:
        async with asyncio.timeout(60):
            while True:
                await ws.recv()
    except ConnectionClosed:
        return ws.close_code


def test_packets_arrive_with_their_senders_key_and_who_leaves_is_told_of() -> None:
    async def body() -> None:
        async with relay() as r, client(r, BOB) as bob:
            async with client(r, ALICE) as alice:
                assert alice.answer == b"\x02"
                await alice.send(packet(BOB, b"hello"))
                assert await bob.recv() == b"\x06" + bytes.fromhex(ALICE.id) + b"\x00hello"
                await alice.send(packet(EVE, b"nobody"))
                await alice.send(b"\x0912345678")
                assert await alice.recv() == b"\x0a12345678"
            assert await bob.recv() == b"\x08" + bytes.fromhex(ALICE.id)
            assert (r.counters.packets, r.counters.bytes, r.counters.nobody) == (1, 6, 1)
            assert r.clients() == [BOB.id]

    finish(body())


def test_of_two_with_one_key_the_newer_gets_the_packets_until_it_leaves() -> None:
    async def body() -> None:
        async with relay() as r, client(r, ALICE) as alice, client(r, BOB) as old:
            async with client(r, BOB) as new:
                assert await old.recv() == b"\x0d\x01"
                await alice.send(packet(BOB, b"1"))
                assert (await new.recv())[-1:] == b"1"
            await asyncio.sleep(0.05)
            await alice.send(packet(BOB, b"2"))
            assert (await old.recv())[-1:] == b"2"

    finish(body())


def test_who_cannot_prove_a_key_or_was_not_invited_is_refused() -> None:
    organiser = Identity.new()
    invitation = Invitation.new("5" * 64, organiser, "run", time.time() + 3600, {})
    other = Invitation.new("5" * 64, EVE, "run", time.time() + 3600, {})
    good = token(json.dumps(invitation.admit(ALICE.id).to_json()).encode())
    direct = token(json.dumps(Admission.direct("5" * 64, BOB.id, organiser).to_json()).encode())
    forged = token(json.dumps(other.admit(EVE.id).to_json()).encode())
    assert proof_of("no token") is None

    async def body() -> None:
        told: list[str] = []
        async with relay(admit=_admit([invitation.line()]), event=lambda kind, **f: told.append(kind)) as r:
            for who, shown in ((ALICE, good), (BOB, direct), (organiser, "")):
                async with client(r, who, shown=shown) as ws:
                    assert ws.answer == b"\x02"
            for who, signer, shown in (
                (ALICE, EVE, good),  # somebody else's key
                (EVE, EVE, good),  # somebody else's admission
                (EVE, EVE, forged),  # another organiser's
                (EVE, EVE, ""),
                (EVE, EVE, "~~"),
            ):
                async with client(r, who, signer, shown) as ws:
                    assert ws.answer[0] == 3
                    assert ws.answer[2:].decode().startswith(("the signature", "this relay"))
                    assert await closed(ws) == 1008
            assert told.count("relay_refused") == r.counters.odd == 5
            assert r.clients() == []

    finish(body())


def test_a_client_that_does_not_read_loses_packets_and_nobody_else_does() -> None:
    async def body() -> None:
        async with relay() as r, client(r, ALICE) as alice, client(r, BOB) as bob, client(r, EVE) as slow:
            slow.transport.pause_reading()
            content = os.urandom(60_000)
            for _ in range(300):  # 18 MB, more than its queue and the kernel's buffers hold
                await alice.send(packet(EVE, content))
            await alice.send(packet(BOB, b"quick"))
            assert (await bob.recv())[-5:] == b"quick"  # while nothing of what is for Eve has been taken
            assert r.counters.dropped > 0
            assert all(c._waiting() <= MOST_QUEUE for c in r._connections)
            slow.transport.abort()

    finish(body())


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        (b"\x04short", 1002),
        (b"\x63", 1002),
        (b"", 1003),
        ("text", 1003),
        (b"\x04" + bytes(200_000), 1009),
    ],
)
def test_what_is_no_message_ends_the_connection(sent: bytes | str, code: int) -> None:
    async def body() -> None:
        async with relay() as r, client(r, ALICE) as alice:
            await alice.send(sent)
            assert await closed(alice) == code
            assert r.counters.odd == 1

    finish(body())


def test_what_is_no_request_is_answered_and_forgotten() -> None:
    async def ask(r: Relay, request: bytes) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", r.port)
        writer.write(request)
        answer = await reader.read(1000)
        writer.close()
        return answer.split(b"\r\n")[0]

    async def body() -> None:
        async with relay() as r:
            assert b"200" in await ask(r, b"GET /ping HTTP/1.1\r\nHost: x\r\n\r\n")
            assert b"404" in await ask(r, b"GET /secret HTTP/1.1\r\n\r\n")
            assert b"405" in await ask(r, b"\x16\x03\x01 \r\n\r\n")
            assert b"426" in await ask(r, b"GET /relay HTTP/1.1\r\n\r\n")
            assert b"431" in await ask(r, b"GET /" + b"a" * 20_000)
            await asyncio.sleep(0.05)
            assert not r._connections

    finish(body())


def test_one_address_cannot_take_all_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.net.relay_room.MOST_FROM_ONE", 3)

    async def body() -> None:
        async with relay() as r:
            held = [await asyncio.open_connection("127.0.0.1", r.port) for _ in range(3)]
            reader, writer = await asyncio.open_connection("127.0.0.1", r.port)
            assert b"503" in await reader.readline()
            for _, other in (*held, (reader, writer)):
                other.close()
            await until(lambda: not r._connections)
            async with client(r, ALICE) as alice:
                assert alice.answer == b"\x02"
            await until(lambda: not r.room.places)

    finish(body())


def test_a_client_that_asks_on_after_watch_or_reads_nothing_makes_the_relay_hold_nothing() -> None:
    """Forty connections, 3,000 requests each, nothing read: the relay is a process of its own, so that its memory can
    be told from the test's."""
    started = subprocess.Popen(
        [sys.executable, "-m", "shoal", "swarm", "relay", "--host", "127.0.0.1", "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert started.stdout is not None
        found = re.search(r"http://127.0.0.1:(\d+)", started.stdout.readline())
        assert found is not None
        port = int(found[1])

        def told() -> dict[str, Any]:
            with urlopen(f"http://127.0.0.1:{port}/info") as answer:
                return dict(json.load(answer))

        def memory() -> int:
            pages = Path(f"/proc/{started.pid}/statm").read_text().split()[1]
            return int(pages) * os.sysconf("SC_PAGE_SIZE")

        before, refused = memory(), told()["counters"]["odd"]
        threading.Thread(target=lambda: [None for _ in started.stdout or ()], daemon=True).start()
        ended = 0
        for _ in range(40):
            with socket.create_connection(("127.0.0.1", port)) as sock:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                with contextlib.suppress(ConnectionError):
                    for _ in range(30):
                        sock.sendall(b"GET /watch HTTP/1.1\r\n\r\n")
                        sock.sendall(b"GET /watch HTTP/1.1\r\n\r\n" * 100)
                    sock.shutdown(socket.SHUT_WR)
                    while sock.recv(65536):
                        pass
                ended += 1
        assert ended == 40
        assert told()["counters"]["odd"] - refused >= 40  # each was put off, at the second request at the latest
        assert memory() - before < 8 << 20
    finally:
        started.kill()
        started.wait()


def test_what_waits_for_clients_is_bounded_for_one_address_and_for_all() -> None:
    room = Room(shared=1000, by_one=600)
    assert room.fits("a", OWN, 600)
    assert not room.fits("a", OWN, 601)  # of one address
    room.move("a", 0, OWN + 600)
    assert room.fits("a", 0, OWN)  # another client of it has a little of its own
    assert room.fits("b", OWN, 400)
    assert not room.fits("b", OWN, 401)  # of all
    room.move("a", OWN + 600, 0)
    assert (room.taken, room.fits("b", OWN, 600)) == (0, True)


def test_clients_that_send_and_never_read_hold_no_more_than_the_room() -> None:
    async def body() -> None:
        async with relay() as r:
            r.room = Room(shared=1 << 20, by_one=1 << 20)
            async with client(r, ALICE) as alice, client(r, BOB) as bob, client(r, EVE) as eve:
                for slow in (bob, eve):
                    slow.transport.pause_reading()
                for _ in range(200):
                    for to in (BOB, EVE):
                        await alice.send(packet(to, bytes(60_000)))
                    assert r.room.taken <= 1 << 20
                assert r.counters.dropped > 0
                assert sum(c._waiting() for c in r._connections) <= (1 << 20) + 4 * OWN
                for slow in (bob, eve):
                    slow.transport.abort()
            await until(lambda: not r._connections)
            assert r.room.taken == 0

    finish(body())


def test_one_that_takes_nothing_of_what_waits_for_it_is_put_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.net.relay_client.STALLED_S", 0.2)
    monkeypatch.setattr("shoal.net.relay_client.ASK_S", 0.1)

    async def body() -> None:
        async with relay() as r, client(r, ALICE) as alice, client(r, EVE) as slow:
            slow.transport.pause_reading()
            while not r.counters.dropped:
                await alice.send(packet(EVE, bytes(60_000)))
            await until(lambda: r.clients() == [ALICE.id])
            slow.transport.abort()

    finish(body())


def test_before_a_key_is_proven_there_is_no_large_buffer() -> None:
    async def body() -> None:
        async with relay() as r:
            url = f"ws://127.0.0.1:{r.port}/relay"
            async with connect(url, subprotocols=["iroh-relay-v2"], compression=None) as ws:  # type: ignore[list-item]
                await ws.recv()
                assert all(len(c.get_buffer(-1)) < 2048 for c in r._connections)
                await ws.send(bytes(MOST_PROOF + 1))
                assert await closed(ws) == 1009

    finish(body())


def masked(opcode: int, content: bytes, final: bool = True) -> bytes:
    head = bytearray(header(opcode, len(content)))
    head[0] = head[0] if final else head[0] & 0x7F
    head[1] |= 0x80
    mask = os.urandom(4)
    return bytes(head) + mask + bytes(b ^ mask[i % 4] for i, b in enumerate(content))


def fed(inbox: Inbox, data: bytes, cuts: list[int]) -> list[tuple[int, bytes]]:
    found = []
    for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True):
        part = data[a:b]
        while part:
            room = inbox.room()
            count = min(len(room), len(part))
            room[:count] = part[:count]
            found += list(inbox.filled(count))
            part = part[count:]
    return found


def test_frames_are_read_however_they_are_cut() -> None:
    chance = random.Random(0)
    for _ in range(50):
        messages = [chance.randbytes(chance.choice((0, 1, 125, 126, 900, 1000))) for _ in range(20)]
        data = b"".join(masked(BINARY, m) for m in messages)
        long = masked(BINARY, b"ab", final=False) + masked(9, b"between") + masked(0, b"cd")
        cuts = sorted(chance.randrange(len(data + long)) for _ in range(chance.randrange(40)))
        found = fed(Inbox(1000), data + long, cuts)
        assert found == [*((BINARY, m) for m in messages), (9, b"between"), (BINARY, b"abcd")]


def test_random_bytes_are_refused_and_never_more_than_that() -> None:
    chance = random.Random(1)
    for _ in range(2000):
        data = bytearray(masked(BINARY, chance.randbytes(40)) + chance.randbytes(200))
        for _ in range(chance.randrange(4)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        codes = {1002, 1009}
        try:
            fed(Inbox(1000), bytes(data), [])
        except BadFrame as e:
            codes &= {e.code}
        assert codes


async def started_again(port: int) -> Relay:
    for _ in range(50):
        again = Relay("127.0.0.1", port)
        try:
            await again.start()
            return again
        except SetupError:  # in the same process iroh takes a moment to let go of its port
            await asyncio.sleep(0.1)
    raise AssertionError("the port is not free")


def test_a_relay_that_is_gone_is_noticed_and_another_becomes_home() -> None:
    async def body() -> None:
        said: list[tuple[str, str]] = []
        async with relay() as first, relay() as second:
            urls = [f"http://127.0.0.1:{r.port}" for r in (first, second)]
            peer = connect_peer(
                Identity.new(),
                lambda peer, proof: True,
                lambda kind, **f: said.append((kind, str(f.get("at")))),
                relays=urls,
                host="127.0.0.1",
            )
            await peer.start()
            try:
                await until(lambda: all(("relay_up", url) in said for url in urls))
                await until(lambda: peer.id in (*first.clients(), *second.clients()))
                home = peer.address().relays[0]
                gone, other = (first, second) if home == urls[0] else (second, first)
                await gone.close()
                await until(lambda: ("relay_down", home) in said, 2)
                await until(lambda: peer.id in other.clients(), 5)
                assert peer.address().relays[0] != home
                again = await started_again(gone.port)
                await until(lambda: said.count(("relay_up", home)) == 2)
                await again.close()
            finally:
                await peer.close()

    finish(body())


def test_a_peer_that_is_closed_lets_go_of_its_port() -> None:
    async def body() -> None:
        async with relay() as r:
            port = 0
            for _ in range(3):  # as `shoal swarm create` does: first to learn its address, then to train
                said: list[str] = []
                peer = connect_peer(
                    Identity.new(),
                    lambda peer, proof: True,
                    lambda kind, said=said, **f: said.append(kind),
                    relays=[f"http://127.0.0.1:{r.port}"],
                    host="127.0.0.1",
                    port=port,
                )
                await peer.start()
                await until(lambda said=said: "relay_up" in said and "address_seen" in said)  # type: ignore[misc]
                port = int(peer.address().tcp[0].rpartition(":")[2])
                await peer.close()

    finish(body())


def test_iroh_connects_through_it_and_learns_where_it_is_seen() -> None:
    async def bind(r: Relay) -> iroh.Endpoint:
        relays = iroh.RelayMap.empty()
        relays.insert(iroh.RelayConfig(url=f"http://127.0.0.1:{r.port}", quic_port=None, auth_token="t"))
        options = iroh.EndpointOptions(
            preset=iroh.preset_minimal(),
            relay_mode=iroh.RelayMode.custom(relays),
            bind_addr="127.0.0.1:0",
            alpns=[b"test"],
        )
        endpoint = await iroh.Endpoint.bind(options)
        await endpoint.online()
        return endpoint

    async def body() -> None:
        async with relay() as r:
            a, b = await bind(r), await bind(r)
            url = f"http://127.0.0.1:{r.port}"

            async def accept() -> iroh.Connection:
                incoming = await b.accept_next()
                assert incoming is not None
                return await (await incoming.accept()).connect()

            accepted = asyncio.create_task(accept())
            there = await a.connect(iroh.EndpointAddr(b.id(), url, []), b"test")  # no address but the relay's
            here = await accepted
            assert str(here.remote_id()) == str(a.id())
            assert r.counters.packets > 0
            info = json.loads(await asyncio.to_thread(lambda: urlopen(f"{url}/info").read()))
            assert info["clients"] == 2
            known = await call(a, info["rendezvous"]["id"], info["rendezvous"]["addr"])
            seen = await where(known)
            assert seen in a.bound_sockets()
            assert await where(known) == seen  # as often as one likes
            del there
            await a.close()
            await b.close()

    finish(body())
