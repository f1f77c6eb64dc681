"""Peers behind every pair of NATs find each other with no open port, and links outlive their relay."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.namespaces import need_namespaces
from tests.patience import Stopwatch, limit

from shoal.emulate import Nat, Site, Wan

pytestmark = [pytest.mark.cluster, pytest.mark.uses("wan")]

ROOT = Path(__file__).parents[2]
PORT = 3340
RTT_MS = 40.0
# Nobody can dial into a NAT, but its peer can dial out: one that is open is enough for TCP. Two cones punch a hole, for
# UDP or TCP. A symmetric NAT shows each destination another port: the hole is never where the other side looks for it.
EXPECTED = {
    ("open", "open"): {"tcp"},
    ("open", "cone"): {"tcp"},
    ("open", "symmetric"): {"tcp"},
    ("cone", "cone"): {"direct", "tcp"},
    ("cone", "symmetric"): {"relay"},
    ("symmetric", "symmetric"): {"relay"},
    ("open", "firewall"): {"tcp"},
    ("cone", "firewall"): {"relay"},
    ("symmetric", "firewall"): {"relay"},
    ("firewall", "firewall"): {"relay"},
}


@dataclass
class Remote:
    """A peer in its namespace, driven from here."""

    name: str
    process: subprocess.Popen[str]
    id: str = ""

    def tell(self, **line: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(line) + "\n")
        self.process.stdin.flush()
        return self.hear()

    def hear(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        return dict(json.loads(self.process.stdout.readline()))

    def way(self, to: Remote) -> tuple[str | None, float]:
        """How the link stands, and for how long nothing was heard."""
        way, heard_s, _ = self.tell(links=True).get(to.id, [None, None, None])
        return way, 1e9 if heard_s is None else heard_s


@dataclass
class Place:
    wan: Wan
    peers: dict[str, Remote]
    relays: dict[str, subprocess.Popen[str]]

    def relay(self, name: str) -> None:
        shoal = [sys.executable, "-c", "from shoal.cli.main import main; raise SystemExit(main())"]
        command = [*shoal, "swarm", "relay", "--port", str(PORT)]
        self.relays[name] = self.wan.run(name, command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        told = self.relays[name].stdout
        assert told is not None
        assert told.readline().startswith("Relay at")

    def url(self, name: str) -> str:
        return f"http://{self.wan.address(name)}:{PORT}"

    def introduce(self, a: Remote, b: Remote) -> None:
        """As gossip does: each learns where the other says it is, as it says it now."""
        at_a, at_b = a.tell(where=True), b.tell(where=True)
        a.tell(know=b.id, address=at_b["address"])
        b.tell(know=a.id, address=at_a["address"])

    def linked(self, a: Remote, b: Remote, ways: set[str]) -> bool:
        """Seen from both ends."""
        return a.way(b)[0] in ways and b.way(a)[0] in ways


@contextmanager
def place(nats: dict[str, Nat], relays: int) -> Iterator[Place]:
    names = [f"relay{i}" for i in range(relays)]
    sites = [*(Site(name, nat=nat) for name, nat in nats.items()), *(Site(name) for name in names)]
    with Wan(sites, rtt_ms=RTT_MS) as wan:
        found = Place(wan, {}, {})
        for name in names:
            found.relay(name)
        command = [sys.executable, "-m", "tests.clusters.nat_peer", *map(found.url, names)]
        for name in nats:
            process = wan.run(name, command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
            found.peers[name] = Remote(name, process)
        for peer in found.peers.values():
            peer.id = peer.hear()["id"]
        await_(lambda: all(_seen(wan, peer) for peer in found.peers.values()), 30, "all peers know where they are seen")
        yield found


def _seen(wan: Wan, peer: Remote) -> bool:
    if wan.sites[peer.name].nat == "firewall":
        return any(event["kind"] == "relay_up" for event in peer.tell(events=True)["events"])
    return any(at.startswith(f"{wan.address(peer.name)}:") for at in peer.tell(where=True)["address"][1])


def await_(true: Callable[[], bool], within_s: float, what: str) -> float:
    watch = Stopwatch()
    while not true():
        assert watch.quiet_s() < within_s, f"not within {within_s:g} s: {what}"
        time.sleep(0.1)
    return watch.quiet_s()


@pytest.fixture(autouse=True)
def _namespaces() -> None:
    need_namespaces()


def test_every_pair_of_nats_connects_with_no_open_port() -> None:
    kinds: tuple[Nat, ...] = ("open", "cone", "symmetric", "firewall")
    with place({f"{kind}{i}": kind for kind in kinds for i in (1, 2)}, relays=1) as there:
        print(f"\n{'pair':<22}{'first answer':>14}{'final way':>12}{'after':>9}")
        for one, two in itertools.combinations_with_replacement(kinds, 2):
            a, b = there.peers[f"{one}1"], there.peers[f"{two}2"]
            begun = time.monotonic()
            there.introduce(a, b)
            answer = a.tell(ask=b.id, within_s=20)
            assert "failed" not in answer, (one, two, answer, a.tell(events=True), b.tell(events=True))
            await_(partial(there.linked, a, b, EXPECTED[one, two]), 15, f"{one}, {two}: {EXPECTED[one, two]}")
            after_s = time.monotonic() - begun
            print(f"{one + ', ' + two:<22}{answer['took_s']:>12.2f} s{a.way(b)[0]:>12}{after_s:>7.2f} s", flush=True)
            assert answer["took_s"] < limit(5)
            large = a.tell(ask=b.id, within_s=20, bytes=1 << 20)
            assert large["right"]
        time.sleep(5)  # what was found stays
        for one, two in itertools.combinations_with_replacement(kinds, 2):
            a, b = there.peers[f"{one}1"], there.peers[f"{two}2"]
            assert there.linked(a, b, EXPECTED[one, two])


def test_direct_links_stay_and_relayed_ones_come_back_when_the_relay_is_killed() -> None:
    nats: dict[str, Nat] = {"cone1": "cone", "cone2": "cone", "symmetric1": "symmetric"}
    with place(nats, relays=2) as there:
        cone1, cone2, symmetric = (there.peers[name] for name in nats)
        for a, b in itertools.combinations(there.peers.values(), 2):
            there.introduce(a, b)
        await_(lambda: there.linked(cone1, cone2, {"direct", "tcp"}), 20, "two cones are punched")
        await_(lambda: there.linked(cone1, symmetric, {"relay"}), 20, "a cone and a symmetric NAT are relayed")
        print()
        time.sleep(3)  # links that were found side by side have become one
        for name in list(there.relays):  # one after the other, so that one of them carries the link
            there.relays[name].kill()
            there.relays[name].wait()
            killed, since, watch = time.monotonic(), time.time(), Stopwatch()
            direct_s, answered = 0.0, False
            while not answered or time.monotonic() - killed < 6:
                assert there.linked(cone1, cone2, {"direct", "tcp"})
                direct_s = max(direct_s, cone1.way(cone2)[1])
                answered = "failed" not in cone1.tell(ask=symmetric.id, within_s=0)
                assert watch.quiet_s() < 40, (cone1.tell(events=True), symmetric.tell(events=True))
                time.sleep(0.1)
            print(f"{name} killed: the direct link was silent for {direct_s:.1f} s at most, ", end="")
            print(f"the relayed one was lost for {_gap(cone1, symmetric, since):.1f} s")
            assert direct_s < limit(3.5)
            there.relay(name)
            ups = len(there.relays)
            await_(lambda n=ups: _up(cone1) == _up(symmetric) == n, 20, "the relay is used again")  # type: ignore[misc]
            time.sleep(5)  # iroh waits longer and longer before it tries a relay again


def _up(peer: Remote) -> int:
    """Relays that it has a connection to."""
    last: dict[str, str] = {}
    for event in peer.tell(events=True)["events"]:
        if event["kind"] in ("relay_up", "relay_down"):
            last[event["at"]] = event["kind"]
    return list(last.values()).count("relay_up")


def _gap(peer: Remote, to: Remote, since: float) -> float:
    """For how long the link was lost."""
    found, lost = 0.0, None
    for event in peer.tell(events=True)["events"]:
        if event.get("peer") == to.id and event["at_s"] > since - 0.1:
            if event["kind"] == "link_lost":
                lost = event["at_s"]
            elif event["kind"] == "link_up" and lost is not None:
                found, lost = found + event["at_s"] - lost, None
    return found


def test_relayed_links_come_back_with_their_only_relay() -> None:
    nats: dict[str, Nat] = {"one": "symmetric", "two": "symmetric"}
    with place(nats, relays=1) as there:
        one, two = there.peers.values()
        there.introduce(one, two)
        await_(lambda: one.way(two)[0] == "relay", 20, "two symmetric NATs are relayed")
        there.relays["relay0"].kill()
        there.relays["relay0"].wait()
        await_(lambda: one.way(two)[0] is None, 20, "the loss is noticed")
        there.relay("relay0")
        took_s = await_(lambda: "failed" not in one.tell(ask=two.id, within_s=0), 60, "the link is back")
        print(f"\nback {took_s:.1f} s after the relay")
