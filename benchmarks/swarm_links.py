"""What a link between two peers carries over an emulated WAN, by way and loss.

    python benchmarks/swarm_links.py [--seconds 10] [--rtt-ms 100] [--mbit 100] [--losses 0,0.001,0.01]

Ways of Shoal's endpoint: TCP (both open, or both behind cone NATs), QUIC through a punched hole (both behind cone NATs,
TCP not tried), QUIC through a relay (both behind symmetric NATs). It moves bodies of 1 MiB, eight at a time, as blobs
do; what has arrived counts. Beside it: iroh as it comes, one connection with one stream (its Python package quickened
as ours is, or it would do 2 MB/s anywhere); and one TCP socket with CUBIC. Also how long a small question takes while
the link is full.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import socket
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any

from shoal.emulate import Nat, Site, Wan, possible
from shoal.net.api import Address, Message, PeerId
from shoal.net.endpoint import connect
from shoal.net.identity import Identity
from shoal.net.relay import PORT, Relay

BODY = 1 << 20
AT_ONCE = 8
SECRET = {"a": bytes(range(32)), "b": bytes(range(1, 33))}
PLAIN_PORT = 5001


@dataclass(frozen=True)
class Case:
    name: str
    nat: Nat
    way: str  # of Shoal's link; empty: a peer's own program


OURS = [
    Case("Shoal, TCP x4, BBR", "open", "tcp"),
    Case("Shoal, TCP punched x4, BBR", "cone", "punched"),
    Case("Shoal, QUIC punched x8", "cone", "direct"),
    Case("Shoal, QUIC relayed x8", "symmetric", "relay"),
]
BESIDE = [Case("iroh, one connection", "open", "iroh"), Case("TCP, one socket, CUBIC", "open", "cubic")]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--rtt-ms", type=float, default=100.0)
    parser.add_argument("--mbit", type=float, default=100.0)
    parser.add_argument("--losses", default="0,0.001,0.01")
    parser.add_argument("--role", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.role:
        asyncio.run(ROLES[args.role.split()[0]](*args.role.split()[1:]))
        return 0
    if why := possible():
        print(f"SKIP {why}")
        return 0
    losses = [float(x) for x in args.losses.split(",")]
    print(
        f"{args.mbit:g} Mbit/s, {args.rtt_ms:g} ms, {args.seconds:g} s each: Mbit/s of payload (a question meanwhile)"
    )
    print(f"{'':<28}" + "".join(f"{f'{loss:.1%} loss':>20}" for loss in losses))
    found: dict[tuple[str, float], float] = {}
    for case in OURS + BESIDE:
        cells = ""
        for loss in losses:
            mbit, pings = _measure(case, loss, args.rtt_ms, args.mbit, args.seconds)
            found[case.way, loss] = mbit
            cells += f"{mbit:>12.1f}" + (f" ({statistics.median(pings) * 1e3:>3.0f} ms)" if pings else " " * 9)
        print(f"{case.name:<28}{cells}", flush=True)
    checks = []
    for loss in losses:
        checks.append(
            (f"{loss:.1%} loss: TCP is as fast through NATs", found["punched", loss] > 0.8 * found["tcp", loss])
        )
        best = max(found["iroh", loss], found["cubic", loss])
        checks.append((f"{loss:.1%} loss: TCP at least as fast as the others' best", found["tcp", loss] >= 0.95 * best))
        lossy = loss >= 0.01
        quick = found["direct", loss] >= (2 if lossy else 0.9) * found["iroh", loss]
        claim = "twice as fast as one connection" if lossy else "as fast as one connection"
        checks.append((f"{loss:.1%} loss: striped QUIC {claim}", quick))
    for claim, held in checks:
        print(f"{'PASS' if held else 'MISS'} {claim}")
    return 0 if all(held for _, held in checks) else 1


def _measure(case: Case, loss: float, rtt_ms: float, mbit: float, seconds: float) -> tuple[float, list[float]]:
    sites = [Site("relay", up_mbit=0, down_mbit=0)]
    sites += [Site(name, nat=case.nat, up_mbit=mbit, down_mbit=mbit) for name in "ab"]
    with Wan(sites, rtt_ms=rtt_ms, loss=loss) as wan:
        url = f"http://{wan.address('relay')}:{PORT}"
        if case.way in ("iroh", "cubic"):
            server = _start(wan, "b", f"{case.way}_server")
            asker = _start(wan, "a", f"{case.way}_client {wan.address('b')} {seconds}")
            return json.loads(_line(asker)), []
        relay = _start(wan, "relay", "relay")
        server = _start(wan, "b", f"peer {case.way} {url}")
        asker = _start(wan, "a", f"peer {case.way} {url} {seconds}", stdin=subprocess.PIPE)
        assert asker.stdin is not None
        asker.stdin.write(_line(server))
        asker.stdin.flush()
        mbit_got, pings = json.loads(_line(asker))
        del relay
        return mbit_got, pings


def _start(wan: Wan, site: str, role: str, **given: Any) -> subprocess.Popen[str]:
    """Returns when it is up, which a line says."""
    process = wan.run(site, [sys.executable, __file__, "--role", role], stdout=subprocess.PIPE, text=True, **given)
    _line(process)
    return process


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise SystemExit("a process of the benchmark has ended early")
    return line


def _say(value: Any) -> None:
    print(json.dumps(value), flush=True)


async def relay() -> None:
    server = Relay()
    await server.start()
    _say("up")
    await asyncio.sleep(1e6)


async def peer(way: str, url: str, seconds: str = "") -> None:
    site = "a" if seconds else "b"
    ends = connect(
        Identity(SECRET[site]),
        lambda peer, proof: True,
        relays=() if way == "tcp" else [url],
        quic=way != "tcp",
        tcp_through_nats=way == "punched",
    )
    wanted = "tcp" if way == "punched" else way

    async def give(peer: PeerId, message: Message) -> Message:
        return Message("given", {}, bytes(message.fields["bytes"]))

    ends.on("give", give)
    await ends.start()
    while way != "tcp" and len(ends.address().direct) < 2:  # its own, and as the rendezvous sees it
        await asyncio.sleep(0.05)
    _say("up")
    if not seconds:
        at = ends.address()
        _say([at.relays, at.direct, at.tcp])
        await asyncio.sleep(1e6)
    other = Identity(SECRET["b"]).id
    told = json.loads(await asyncio.to_thread(sys.stdin.readline))
    ends.know(other, Address(*(tuple(x) for x in told)))
    while ends.links()[other].way != wanted:
        await asyncio.sleep(0.05)
    await ends.ask(other, Message("give", {"bytes": BODY}), 60)  # connections for bulk are opened
    pings, until = list[float](), time.monotonic() + float(seconds)
    before = ends.links()[other].received_bytes

    async def take() -> None:
        while time.monotonic() < until:
            await ends.ask(other, Message("give", {"bytes": BODY}), 60)

    async def ping() -> None:
        while time.monotonic() < until:
            began = time.monotonic()
            await ends.ask(other, Message("give", {"bytes": 0}), 60)
            pings.append(time.monotonic() - began)
            await asyncio.sleep(0.2)

    work = asyncio.gather(ping(), *(take() for _ in range(AT_ONCE)))
    await asyncio.sleep(float(seconds))
    got = ends.links()[other].received_bytes - before
    work.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await work
    _say([got * 8 / float(seconds) / 1e6, pings])


async def iroh_server() -> None:
    connection, endpoint = None, await _iroh(SECRET["b"], f"0.0.0.0:{PLAIN_PORT}")
    _say("up")
    incoming = await endpoint.accept_next()
    connection = await (await incoming.accept()).connect()
    stream, data = await connection.accept_bi(), bytes(1 << 18)
    while True:
        await stream.send().write_all(data)


async def iroh_client(host: str, seconds: str) -> None:
    import iroh

    endpoint = await _iroh(SECRET["a"], "0.0.0.0:0")
    _say("up")
    to = iroh.EndpointId.from_string(Identity(SECRET["b"]).id)
    connection = await endpoint.connect(iroh.EndpointAddr(to, None, [f"{host}:{PLAIN_PORT}"]), b"bench")
    stream = await connection.open_bi()
    await stream.send().write_all(b"go")
    await stream.recv().read_exact(1 << 16)
    got, until = 0, time.monotonic() + float(seconds)
    while (left := until - time.monotonic()) > 0:
        try:
            async with asyncio.timeout(left):
                got += len(await stream.recv().read(1 << 18))
        except TimeoutError:
            break
    _say(got * 8 / float(seconds) / 1e6)


async def _iroh(secret: bytes, at: str) -> Any:
    import iroh

    import shoal.net.quic  # noqa: F401  # quickens iroh's package

    options = iroh.EndpointOptions(
        preset=iroh.preset_minimal(),
        relay_mode=iroh.RelayMode.disabled(),
        bind_addr=at,
        alpns=[b"bench"],
        secret_key=secret,
    )
    return await iroh.Endpoint.bind(options)


def _cubic() -> socket.socket:
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"cubic")
    return made


async def cubic_server() -> None:
    with _cubic() as listener:
        listener.bind(("", PLAIN_PORT))
        listener.listen()
        _say("up")
        accepted, _ = listener.accept()
        while True:
            accepted.sendall(bytes(1 << 18))


async def cubic_client(host: str, seconds: str) -> None:
    _say("up")
    with _cubic() as sock:
        sock.connect((host, PLAIN_PORT))
        sock.recv(1 << 16)
        got, until = 0, time.monotonic() + float(seconds)
        while (left := until - time.monotonic()) > 0:
            sock.settimeout(left)
            try:
                got += len(sock.recv(1 << 18))
            except TimeoutError:
                break
    _say(got * 8 / float(seconds) / 1e6)


ROLES = {f.__name__: f for f in (relay, peer, iroh_server, iroh_client, cubic_server, cubic_client)}

if __name__ == "__main__":
    sys.exit(main())
