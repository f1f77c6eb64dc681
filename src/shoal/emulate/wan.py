"""A wide area network on one machine: sites with their own addresses, rates, NATs, and a distance between them.

Every site is a network namespace (two where it has a NAT: the peer and its router) with a TUN device; one small
program (forward.c) carries the packets between the devices as the internet would. So real programs run in it
unchanged, with the kernel's own TCP and UDP, and links can be cut and healed while they do.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shlex
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from shoal.emulate import spaces
from shoal.emulate.nat import Nat, guard
from shoal.emulate.program import program
from shoal.errors import SetupError, UsageError

_PUBLIC = "198.51.100"  # TEST-NET-2 (RFC 5737): nobody's, and nobody outside sees it
_PRIVATE = "192.168"
_MOST_SITES = 250
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000


@dataclass(frozen=True)
class Site:
    """A place with one machine; relays and other public hosts are sites that are open."""

    name: str
    nat: Nat = "open"
    up_mbit: float = 100.0  # 0: no limit
    down_mbit: float = 100.0
    queue_ms: float = 100.0  # what may wait before a link; the rest is dropped


@dataclass(frozen=True)
class Link:
    """Between two sites, both ways."""

    rtt_ms: float
    loss: float = 0.0  # share of packets, each way


@dataclass(frozen=True)
class Counters:
    """Of one site since the start, in packets unless said otherwise."""

    sent: int
    sent_bytes: int
    got: int
    got_bytes: int
    lost: int  # of its own packets, at random
    cut: int  # of its own packets, because a link was cut
    full_up: int  # its uplink's queue was full
    full_down: int  # its downlink's queue was full


class Wan:
    """Up inside of `with`. Afterwards everything is gone, also the processes in it; also if its user is killed."""

    def __init__(
        self,
        sites: Sequence[Site],
        rtt_ms: float = 100.0,
        loss: float = 0.0,
        links: Mapping[tuple[str, str], Link] | None = None,
        seed: int = 1,
    ) -> None:
        if not 1 <= len(sites) <= _MOST_SITES or len({site.name for site in sites}) != len(sites):
            raise UsageError(f"An emulated network has 1 to {_MOST_SITES} sites, each with a name of its own.")
        for site in sites:
            if not re.fullmatch(r"[A-Za-z0-9_-]{1,40}", site.name):
                raise UsageError(f"A site's name has letters, digits, - and _; {site.name!r} does not do.")
        self.sites = {site.name: site for site in sites}
        self._index = {site.name: i for i, site in enumerate(sites)}
        self._prefix = spaces.prefix()
        self._lock = threading.Lock()
        self._forward: subprocess.Popen[str] | None = None
        self._started: list[subprocess.Popen[Any]] = []
        self._seed = seed
        self._links = {pair: Link(rtt_ms, loss) for pair in self._pairs()}
        for (a, b), link in (links or {}).items():
            self._links[self._pair(a, b)] = link

    def __enter__(self) -> Wan:
        spaces.sweep()
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    # What runs in it

    def address(self, site: str) -> str:
        """Under which others see it: its own, or its router's."""
        return f"{_PUBLIC}.{self._at(site) + 1}"

    def own_address(self, site: str) -> str:
        """Which it sees itself."""
        return self.address(site) if self.sites[site].nat == "open" else f"{_PRIVATE}.{self._at(site) + 1}.2"

    def namespace(self, site: str) -> str:
        self._at(site)
        return self._prefix + site

    def run(
        self, site: str, command: Sequence[str], env: Mapping[str, str] | None = None, **given: Any
    ) -> subprocess.Popen[Any]:
        """Starts a program at the site, with these variables besides the environment's; `given` goes to Popen."""
        enter = ["ip", "netns", "exec", self.namespace(site)]  # execs: the process is the program itself
        started = subprocess.Popen([*enter, *command], env={**os.environ, **(env or {})}, **given)
        self._started.append(started)
        return started

    @contextmanager
    def within(self, site: str) -> Iterator[None]:
        """Sockets that the calling thread opens meanwhile are at the site."""
        with spaces.entered(self.namespace(site)):
            yield

    # What happens to it

    def cut(self, some: Collection[str], others: Collection[str] | None = None) -> None:
        """No packet between the two groups, nor of those under way; by default from all others."""
        self._each("cut", some, others)

    def heal(self, some: Collection[str] | None = None, others: Collection[str] | None = None) -> None:
        """Between the two groups; by default everything."""
        self._each("heal", self.sites if some is None else some, others)

    def set(
        self,
        *,
        site: str | None = None,
        up_mbit: float | None = None,
        down_mbit: float | None = None,
        between: tuple[str, str] | None = None,
        rtt_ms: float | None = None,
        loss: float | None = None,
    ) -> None:
        """From now on: rates, of one site or all; distance and loss, of one pair or all."""
        for name in [site] if site is not None else list(self.sites):
            self._at(name)
            old = self.sites[name]
            up, down = _or(up_mbit, old.up_mbit), _or(down_mbit, old.down_mbit)
            if (up, down) != (old.up_mbit, old.down_mbit):
                self.sites[name] = replace(old, up_mbit=up, down_mbit=down)
                self._tell_site(name)
        for pair in [self._pair(*between)] if between is not None else list(self._links):
            link = Link(_or(rtt_ms, self._links[pair].rtt_ms), _or(loss, self._links[pair].loss))
            if link != self._links[pair]:
                self._links[pair] = link
                self._tell_link(pair)

    # What has happened

    def counters(self) -> dict[str, Counters]:
        found = json.loads(self._ask("stat"))["sites"]
        return {name: Counters(*found[i]) for name, i in self._index.items()}

    def carried(self) -> dict[tuple[str, str], int]:
        """Bytes that arrived, headers included, by sender and receiver."""
        names = list(self._index)
        return {(names[a], names[b]): count for a, b, count in json.loads(self._ask("stat"))["pairs"]}

    def cpu_s(self) -> float:
        """What carrying the packets has cost, without the sites' own processes."""
        return float(json.loads(self._ask("stat"))["cpu_s"])

    # How it is made

    def close(self) -> None:
        if self._forward is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._forward.pid, signal.SIGKILL)  # with its shell, which has nothing to clear now
            self._forward.wait()
            for pipe in (self._forward.stdin, self._forward.stdout):
                if pipe is not None:
                    with suppress(BrokenPipeError):
                        pipe.close()
            self._forward = None
        for started in self._started:  # also one that has not entered its namespace yet, where it would be found
            started.kill()
        spaces.remove(spaces.beginning(self._prefix))

    def _build(self) -> None:
        routers = [f"{self._prefix}{site.name}.nat" for site in self.sites.values() if site.nat != "open"]
        spaces.make([*map(self.namespace, self.sites), *routers])
        fds: list[int] = []
        try:
            for site in self.sites.values():  # one by one: those that are open are closed if the next one fails
                fds += [self._plug(site)]
            self._start(fds)
        finally:
            for fd in fds:
                os.close(fd)
        self._ask(f"seed {self._seed}")
        for name in self.sites:
            self._tell_site(name)
        for pair in self._links:
            self._tell_link(pair)

    def _plug(self, site: Site) -> int:
        """The device that its packets leave by."""
        outer = self.namespace(site.name) if site.nat == "open" else f"{self.namespace(site.name)}.nat"

        def public() -> int:
            fd = _tun("wan")
            _configure(f"address add {self.address(site.name)}/24 dev wan", "link set wan txqueuelen 5000 up")
            spaces.ip("route", "add", "default", "dev", "wan")
            return fd

        fd = spaces.inside(outer, public)
        if site.nat != "open":
            self._route(site, outer)
        return fd

    def _route(self, site: Site, router: str) -> None:
        peer, lan = self.namespace(site.name), f"{_PRIVATE}.{self._at(site.name) + 1}"
        spaces.ip(*f"link add lan netns {router} type veth peer name eth0 netns {peer}".split())

        def outside() -> None:
            _configure(f"address add {lan}.1/24 dev lan", "link set lan up")
            Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
            guard(site.nat)

        def within() -> None:
            _configure(f"address add {lan}.2/24 dev eth0", "link set eth0 up", f"route add default via {lan}.1")

        spaces.inside(router, outside)
        spaces.inside(peer, within)

    def _start(self, fds: Sequence[int]) -> None:
        # The forwarder ends when this process is gone, even by SIGKILL; its shell then removes what is left.
        after = shlex.join([sys.executable, "-m", "shoal.emulate.clear", self._prefix])
        self._forward = subprocess.Popen(
            ["sh", "-c", f'"$@"; exec {after}', "sh", *program(), *map(str, fds)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=fds,
            start_new_session=True,
        )
        assert self._forward.stdout is not None
        if self._forward.stdout.readline() != "ready\n":
            raise SetupError("The program that carries the emulated network's packets has not started.")

    def _ask(self, command: str) -> str:
        if self._forward is None:
            raise UsageError("The emulated network is not up: use it inside of `with Wan(…)`.")
        assert self._forward.stdin is not None
        assert self._forward.stdout is not None
        with self._lock:
            self._forward.stdin.write(f"{command}\n")
            self._forward.stdin.flush()
            answer = self._forward.stdout.readline().strip()
        if not answer or answer.startswith("error"):
            raise SetupError(f"The emulated network does not understand `{command}`: {answer or 'it has ended'}.")
        return answer

    def _tell_site(self, name: str) -> None:
        site = self.sites[name]
        rates = f"{round(site.up_mbit * 1e6)} {round(site.down_mbit * 1e6)}"
        self._ask(f"site {self._at(name)} {rates} {round(site.queue_ms * 1e3)}")

    def _tell_link(self, pair: tuple[str, str]) -> None:
        link = self._links[pair]
        for a, b in (pair, pair[::-1]):
            self._ask(f"link {self._at(a)} {self._at(b)} {round(link.rtt_ms * 500)} {link.loss}")

    def _each(self, verb: str, some: Collection[str], others: Collection[str] | None) -> None:
        for a in some:
            for b in self.sites if others is None else others:
                if a != b and (others is not None or verb == "heal" or b not in some):
                    self._ask(f"{verb} {self._at(a)} {self._at(b)}")
                    self._ask(f"{verb} {self._at(b)} {self._at(a)}")

    def _pairs(self) -> Iterator[tuple[str, str]]:
        names = list(self._index)
        for i, a in enumerate(names):
            for b in names[i + 1 :]:
                yield a, b

    def _pair(self, a: str, b: str) -> tuple[str, str]:
        if self._at(a) == self._at(b):
            raise UsageError(f"There is no link between {a} and itself.")
        return (a, b) if self._at(a) < self._at(b) else (b, a)

    def _at(self, site: str) -> int:
        if site not in self._index:
            raise UsageError(f"There is no site {site!r} in the emulated network; there are {', '.join(self._index)}.")
        return self._index[site]


def _or(new: float | None, old: float) -> float:
    return old if new is None else new


def _tun(name: str) -> int:
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH", name.encode(), _IFF_TUN | _IFF_NO_PI))
    return fd


def _configure(*commands: str) -> None:
    """IPv4 only, so that nothing but what a test sends is on the wire."""
    for which in ("all", "default"):
        with suppress(FileNotFoundError):
            Path(f"/proc/sys/net/ipv6/conf/{which}/disable_ipv6").write_text("1")
    spaces.ip("-batch", "-", given="".join(f"{line}\n" for line in ("link set lo up", *commands)))
