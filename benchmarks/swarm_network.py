"""What the emulated network and the relay can carry, and what they cost.

    python benchmarks/swarm_network.py

First 8 sites of 100 Mbit/s, 100 ms apart, send to each other in a ring over one TCP connection each: what arrives, and
what the emulator takes of a core for it, compiled and, beside it, in Python. Then two peers behind symmetric NATs move
64 MiB through a relay, on links without a limit; beside it the same behind cones, through a punched hole. Exits with 1
when either program carries less than 1,000 Mbit for a second of its CPU: speeds themselves depend on what else runs.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from shoal.emulate import Site, Wan, possible, wan
from shoal.net.api import Address, Message, PeerId
from shoal.net.endpoint import connect
from shoal.net.identity import Identity

SITES, MBIT, RTT_MS = 8, 100.0, 100.0
BAR_MBIT_A_CPU_S = 1000.0
PIECE, PIECES = 8 << 20, 8
SEND = """
import socket, sys, threading, time
def take():
    taken, _ = socket.create_server(("", 5001)).accept()
    room = bytearray(1 << 20)
    while taken.recv_into(room):
        pass
threading.Thread(target=take, daemon=True).start()
time.sleep(1)
sock, data, end = socket.create_connection((sys.argv[1], 5001)), bytes(1 << 18), time.monotonic() + 14
while time.monotonic() < end:
    sock.sendall(data)
"""


def emulated(python: bool) -> tuple[float, float]:
    """Mbit/s that arrived, and seconds of CPU a second, while all send."""
    compiled = wan.program
    if python:
        wan.program = lambda: [sys.executable, "-m", "shoal.emulate.forward"]
    names = [f"s{i}" for i in range(SITES)]
    try:
        with Wan([Site(name, up_mbit=MBIT, down_mbit=MBIT) for name in names], rtt_ms=RTT_MS) as net:
            for a, b in zip(names, [*names[1:], names[0]], strict=True):
                net.run(a, [sys.executable, "-c", SEND, net.address(b)], stderr=subprocess.DEVNULL)
            time.sleep(4)  # connections are there, and past their slow start
            begun, cpu_s, carried = time.monotonic(), net.cpu_s(), sum(net.carried().values())
            time.sleep(8)
            took_s = time.monotonic() - begun
            return (sum(net.carried().values()) - carried) * 8 / 1e6 / took_s, (net.cpu_s() - cpu_s) / took_s
    finally:
        wan.program = compiled


async def peer(argv: list[str]) -> None:
    """In a namespace: `take` prints who and where it is; `give ID RELAY ADDRESS…` moves the pieces there."""

    async def swallow(peer: PeerId, message: Message) -> Message:
        return Message("taken", {"bytes": len(message.body)})

    ends = connect(Identity.new(), lambda peer, proof: True, relays=argv[1:2])
    ends.on("piece", swallow, most_body=PIECE)
    await ends.start()
    if argv[0] == "take":
        while not ends.address().direct:
            await asyncio.sleep(0.1)
        at = ends.address()
        print(json.dumps([ends.id, at.relays, at.direct]), flush=True)
        await asyncio.sleep(120)
    peer, relays, direct = json.loads(argv[2])
    ends.know(peer, Address(tuple(relays), tuple(direct)))
    await ends.ask(peer, Message("piece", {}, b"x"), 20)
    data = os.urandom(PIECE)
    begun = time.monotonic()
    for _ in range(PIECES):
        await ends.ask(peer, Message("piece", {}, data), 60)
    took_s = time.monotonic() - begun
    print(json.dumps([PIECE * PIECES * 8 / 1e6 / took_s, ends.links()[peer].way]), flush=True)


def relayed(nat: Any) -> tuple[float, str, float]:
    """Mbit/s, the way they went, and the relay's seconds of CPU."""
    sites = [Site("a", nat, 0, 0), Site("b", nat, 0, 0), Site("relay", "open", 0, 0)]
    with Wan(sites, rtt_ms=2) as net:
        shoal = [sys.executable, "-c", "from shoal.cli.main import main; raise SystemExit(main())"]
        relay = net.run("relay", [*shoal, "swarm", "relay"], stdout=subprocess.PIPE, text=True)
        assert relay.stdout is not None
        relay.stdout.readline()
        url = f"http://{net.address('relay')}:3340"
        me = [sys.executable, __file__]
        taker = net.run("b", [*me, "take", url], stdout=subprocess.PIPE, text=True)
        assert taker.stdout is not None
        where = taker.stdout.readline().strip()
        before_s = _cpu_s(relay.pid)
        giver = net.run("a", [*me, "give", url, where], stdout=subprocess.PIPE, text=True)
        assert giver.stdout is not None
        mbit, way = json.loads(giver.stdout.readline())
        return mbit, way, _cpu_s(relay.pid) - before_s


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> int:
    if len(sys.argv) > 1:
        asyncio.run(peer(sys.argv[1:]))
        return 0
    if why := possible():
        print(f"left out: {why}")
        return 0
    print(f"{SITES} sites of {MBIT:g} Mbit/s, {RTT_MS:g} ms: all send at once")
    print(f"{'emulator':<12}{'arrived':>15}{'of the links':>14}{'of a core':>11}{'Mbit/CPU-s':>12}")
    rows = {name: emulated(python) for name, python in (("compiled", False), ("in Python", True))}
    for name, (mbit, core) in rows.items():
        print(f"{name:<12}{mbit:>8.0f} Mbit/s{mbit / SITES / MBIT:>14.0%}{core:>11.0%}{mbit / core:>12.0f}")
    cost, other = (mbit / core for mbit, core in rows.values())
    good = [cost >= BAR_MBIT_A_CPU_S]
    print(f"{_word(good[-1])}: {cost / other:.1f} times what Python carries for the same CPU\n")
    print(f"{PIECE * PIECES >> 20} MiB between two peers, no limits but this machine's {os.cpu_count()} cores")
    print(f"{'NATs':<12}{'way':>8}{'speed':>15}{'Mbit/CPU-s of the relay':>26}")
    straight, way, _ = relayed("cone")
    print(f"{'cone':<12}{way:>8}{straight:>8.0f} Mbit/s")
    through, way, cpu_s = relayed("symmetric")
    cost = PIECE * PIECES * 8 / 1e6 / cpu_s
    print(f"{'symmetric':<12}{way:>8}{through:>8.0f} Mbit/s{cost:>26.0f}")
    good.append(cost >= BAR_MBIT_A_CPU_S and way == "relay")
    print(f"{_word(good[-1])}: {through / straight:.2f} of the speed through a punched hole")
    return int(not all(good))


def _word(good: bool) -> str:
    return "PASS" if good else "MISS"


if __name__ == "__main__":
    sys.exit(main())
