"""The same as forward.c, command for command, in Python: for machines without a compiler, slower."""

from __future__ import annotations

import heapq
import itertools
import json
import os
import random
import select
import sys
import time
from dataclasses import dataclass, field

MOST_BYTES = 1600
MOST_HELD = 1 << 17


@dataclass
class Line:
    """An uplink or a downlink: one packet after the other, and a queue that may not get longer than `queue_s`."""

    s_a_byte: float = 0.0
    queue_s: float = 0.0
    free_at: float = 0.0

    def through(self, at: float, size: int) -> float | None:
        if self.s_a_byte == 0:
            return at
        start = max(at, self.free_at)
        if start - at > self.queue_s:
            return None
        self.free_at = start + self.s_a_byte * size
        return self.free_at


@dataclass
class Site:
    fd: int
    up: Line = field(default_factory=Line)
    down: Line = field(default_factory=Line)
    counters: list[int] = field(default_factory=lambda: [0] * 8)


SENT, SENT_BYTES, GOT, GOT_BYTES, LOST, CUT, FULL_UP, FULL_DOWN = range(8)


class Forward:
    def __init__(self, fds: list[int]) -> None:
        self.sites = [Site(fd) for fd in fds]
        self.links: dict[tuple[int, int], tuple[float, float]] = {}
        self.cut: set[tuple[int, int]] = set()
        self.bytes: dict[tuple[int, int], int] = {}
        self.due: list[tuple[float, int, bool, int, int, bytes]] = []
        self.order = itertools.count()
        self.random = random.Random(0)

    def leave(self, a: int, packet: bytes) -> None:
        b = packet[19] - 1 if len(packet) >= 20 and packet[0] >> 4 == 4 else -1
        if not 0 <= b < len(self.sites) or a == b:
            return
        counters = self.sites[a].counters
        counters[SENT] += 1
        counters[SENT_BYTES] += len(packet)
        out = self.sites[a].up.through(time.monotonic(), len(packet))
        delay_s, loss = self.links.get((a, b), (0.0, 0.0))
        if out is None or len(self.due) >= MOST_HELD:
            counters[FULL_UP] += 1
        elif (a, b) in self.cut:
            counters[CUT] += 1
        elif loss and self.random.random() < loss:
            counters[LOST] += 1
        else:
            heapq.heappush(self.due, (out + delay_s, next(self.order), False, a, b, packet))

    def arrive(self, now: float) -> None:
        at, _, arrived, a, b, packet = heapq.heappop(self.due)
        to = self.sites[b]
        if (a, b) in self.cut:
            self.sites[a].counters[CUT] += 1
            return
        if not arrived:
            passed = to.down.through(at, len(packet))
            if passed is None:
                to.counters[FULL_DOWN] += 1
                return
            if passed > now:
                heapq.heappush(self.due, (passed, next(self.order), True, a, b, packet))
                return
        try:
            os.write(to.fd, packet)
        except OSError:
            to.counters[FULL_DOWN] += 1
            return
        to.counters[GOT] += 1
        to.counters[GOT_BYTES] += len(packet)
        self.bytes[a, b] = self.bytes.get((a, b), 0) + len(packet)

    def obey(self, line: str) -> str:
        match line.split():
            case ["stat"]:
                used = os.times()
                return json.dumps(
                    {
                        "cpu_s": used.user + used.system,
                        "held": len(self.due),
                        "sites": [site.counters for site in self.sites],
                        "pairs": [[a, b, count] for (a, b), count in self.bytes.items()],
                    }
                )
            case ["site", i, up, down, queue]:
                site = self.sites[int(i)]
                for one, rate in ((site.up, int(up)), (site.down, int(down))):
                    one.s_a_byte, one.queue_s = 8 / rate if rate else 0.0, int(queue) / 1e6
            case ["link", a, b, delay, loss]:
                self.links[int(a), int(b)] = int(delay) / 1e6, float(loss)
            case ["cut", a, b]:
                self.cut.add((int(a), int(b)))
            case ["heal", a, b]:
                self.cut.discard((int(a), int(b)))
            case ["seed", seed]:
                self.random.seed(int(seed))
            case _:
                return f"error: {line}"
        return "ok"

    def run(self) -> None:
        poll = select.epoll()
        by_fd = {site.fd: i for i, site in enumerate(self.sites)}
        for fd in (0, *by_fd):
            poll.register(fd, select.EPOLLIN)
        print("ready", flush=True)
        rest = b""
        while True:
            now = time.monotonic()
            while self.due and self.due[0][0] <= now:
                self.arrive(now)
            wait_s = max(0.0, self.due[0][0] - now) if self.due else 1.0
            for fd, _ in poll.poll(wait_s):
                if fd == 0:
                    said = os.read(0, 4096)
                    if not said:
                        return
                    *lines, rest = (rest + said).split(b"\n")
                    for line in lines:
                        print(self.obey(line.decode()), flush=True)
                    continue
                for _ in range(64):
                    try:
                        packet = os.read(fd, MOST_BYTES)
                    except BlockingIOError:
                        break
                    self.leave(by_fd[fd], packet)


if __name__ == "__main__":
    Forward([int(fd) for fd in sys.argv[1:]]).run()
