"""What node 0 spends on the agents of a large run: 1,000 nodes of 8 processes each, played by one other process.

    python benchmarks/many_nodes.py [--nodes 1000] [--seconds 20]

Real connections, real greetings, the messages of a run in which every rank marks phases all the time. Printed: how long
it takes until all are here, and which share of a core node 0's agent needs to hear them. Bar: half of one.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import secrets
import socket
import sys
import tempfile
import threading
import time
from pathlib import Path

from shoal import wire
from shoal.guard.nodes.group import NodeGroup, Seat
from shoal.guard.nodes.head import Head
from shoal.guard.nodes.share import RANKS_PER_S
from shoal.guard.nodes.talk import EVERY_S, HELLO, Line, packed
from shoal.guard.signs import Signs
from shoal.guard.workers import Share
from shoal.journal.beat import PHASES
from shoal.journal.pulse import Pulse
from shoal.journal.pulse_file import news, pulse_file

PROCESSES = 8
BAR = 0.5


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=20.0)
    args = parser.parse_args()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    token = secrets.token_bytes(32)
    head = Head(0, token, args.nodes, "127.0.0.1")
    others = multiprocessing.get_context("spawn").Process(
        target=play, args=(head.port, token, args.nodes, args.seconds), daemon=True
    )
    began = time.monotonic()
    others.start()
    while len(head.nodes) < args.nodes - 1:
        time.sleep(0.05)
    here_s = time.monotonic() - began
    world = args.nodes * PROCESSES
    master = ("127.0.0.1", 1)
    seats = [Seat(None, Share(0, 0, 0, master))]
    seats += [
        Seat(node, Share(i, i * PROCESSES, PROCESSES, master))
        for i, (_, node) in enumerate(sorted(head.nodes.items()), 1)
    ]
    with tempfile.TemporaryDirectory() as logs:
        group = NodeGroup(
            head, seats, ["true"], world, 0, Path(logs), 1,
            lambda share: {"first": share.first, "count": share.count, "world": world}, args.nodes,
        )  # fmt: skip
        heard, hear = [0], group.kernel.hear

        def count(rank: int, signs: Signs, on_disk: bool) -> None:
            heard[0] += 1
            hear(rank, signs, on_disk)

        group.kernel.hear = count  # type: ignore[method-assign]  # only to count
        cpu, wall, died = time.process_time(), time.monotonic(), 0
        while time.monotonic() - wall < args.seconds:
            died += len(group.reap())
            time.sleep(0.2)
        share = (time.process_time() - cpu) / (time.monotonic() - wall)
        group.close()
    others.kill()
    print(f"{args.nodes} nodes, {world} ranks: all here after {here_s:.1f} s")
    told = heard[0] / args.seconds
    print(f"node 0 hears of {told:,.0f} ranks a second and needs {share:.0%} of a core for it; {died} were lost")
    ok = share <= BAR and not died
    print(f"{'PASS' if ok else 'MISS'}  {share:.2f} of a core (bar {BAR})")
    return int(not ok)


def play(port: int, token: bytes, nodes: int, seconds: float) -> None:
    """All nodes but the first."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    folder = Path(tempfile.mkdtemp())
    pulse = Pulse(folder, 0)
    lines: list[Line] = []
    for node in range(1, nodes):
        sock = socket.create_connection(("127.0.0.1", port))
        wire.greet(sock, token, HELLO)
        lines.append(Line(sock))
        lines[-1].send("node", node=node, host=f"n{node}", processes=PROCESSES)
    threading.Thread(target=_start, args=(lines,), daemon=True).start()
    every_s, n = max(EVERY_S, nodes * PROCESSES / RANKS_PER_S), 0
    while True:
        began, n = time.monotonic(), n + 1
        pulse.mark(PHASES[3 + n % 8], step=n)
        one = {"state": "R", "io_bytes": 0}  # they mark all the time, so nothing is told of their threads
        data, _ = news(pulse_file(folder, 0).read_bytes(), (0, 0))
        for i, line in enumerate(lines, 1):
            ranks = {str(r): {**one, "pulse": packed(data)} for r in range(i * PROCESSES, (i + 1) * PROCESSES)}
            line.send("pulse", attempt=0, now=began, ranks=ranks)
        time.sleep(max(0.0, every_s - (time.monotonic() - began)))


def _start(lines: list[Line]) -> None:
    """They are told in the order of their numbers, so that one thread can listen to all."""
    for i, line in enumerate(lines, 1):
        while line.receive()["kind"] != "start":
            pass
        line.send("started", attempt=0, pids={str(r): 10_000 + r for r in range(i * PROCESSES, (i + 1) * PROCESSES)})


if __name__ == "__main__":
    sys.exit(main())
