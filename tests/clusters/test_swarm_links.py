"""Links that break in part: another way is found within seconds, and the better one again when it is there."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from tests.namespaces import need_namespaces
from tests.net.talker import Talker
from tests.patience import Stopwatch

from shoal.emulate import Nat, Site, Wan

pytestmark = [pytest.mark.cluster, pytest.mark.uses("wan"), pytest.mark.timeout(200)]
RELAY = "import asyncio\nfrom shoal.net.relay import Relay\nasync def main():\n    r = Relay()\n    await r.start()\n"
RELAY += "    await asyncio.sleep(1e6)\nasyncio.run(main())\n"


@pytest.fixture(autouse=True)
def _namespaces() -> None:
    need_namespaces()


@contextmanager
def two(nat: Nat, **options: object) -> Iterator[tuple[Wan, Talker, Talker]]:
    """That have found each other by the best way there is."""
    with Wan([Site("relay"), Site("a", nat=nat), Site("b", nat=nat)], rtt_ms=60) as wan:
        wan.run("relay", [sys.executable, "-c", RELAY])
        relays = [f"http://{wan.address('relay')}:3340"]
        a, b = (Talker(wan, name, relays=relays, **options) for name in "ab")
        for peer in (a, b):
            peer.until(lambda t: t.of("address_seen"), 30)
        a.know(b)
        b.know(a)
        a.ask(b, timeout_s=20)
        yield wan, a, b


@pytest.mark.parametrize(
    ("nat", "through_nats", "way"), [("open", True, "tcp"), ("cone", True, "tcp"), ("cone", False, "direct")]
)
def test_a_cut_link_goes_on_through_the_relay_and_comes_back(nat: Nat, through_nats: bool, way: str) -> None:
    with two(nat, tcp_through_nats=through_nats) as (wan, a, b):
        a.until(lambda t: t.link(b)["way"] == way, 20)
        b.until(lambda t: t.link(a)["way"] == way, 20)
        time.sleep(2)
        wan.cut({"a"}, {"b"})
        cut = Stopwatch()
        while True:
            try:
                a.ask(b, timeout_s=0.5)
                break
            except ConnectionError:
                assert cut.quiet_s() < 20, a.events
        stall_s = cut.quiet_s()
        assert a.link(b)["way"] == "relay"
        wan.heal()
        back_s = a.until(lambda t: t.link(b)["way"] == way, 60)
        print(f"\n{nat}, {way}: through the relay after {stall_s:.1f} s, back after {back_s:.1f} s")
        assert stall_s < 6
        assert any(e["kind"] in ("link_failover", "link_lost") for e in a.events)
        a.until(lambda t: [e["way"] for e in t.of("link_upgrade")][-1:] == [way], 10)  # noted when it is next heard


def test_a_killed_peer_is_seen_within_seconds_and_its_successor_at_once() -> None:
    with two("cone") as (wan, a, b):
        secret = "07" * 32
        c = Talker(wan, "b", secret=secret, relays=b.do("address")[0])
        c.until(lambda t: t.of("address_seen"), 30)
        a.know(c)
        c.know(a)
        a.ask(c, timeout_s=20)
        wan.cut({"b"})  # a power cut: nobody says goodbye
        c.kill()
        watch = Stopwatch()
        a.until(lambda t: t.link(c)["way"] is None, 10)
        assert watch.quiet_s() < 7
        assert a.link(c)["heard_s"] > 2
        wan.heal()
        d = Talker(wan, "b", secret=secret, relays=b.do("address")[0])
        d.until(lambda t: t.of("address_seen"), 30)
        d.know(a)
        assert d.ask(a, timeout_s=20) < 5
        assert a.link(d)["way"] is not None


def test_a_peer_that_was_cut_off_is_back_seconds_after_the_cut() -> None:
    with two("cone") as (wan, a, b):
        wan.cut({"b"})
        a.until(lambda t: t.link(b)["way"] is None, 15)
        time.sleep(8)
        wan.heal()
        watch = Stopwatch()
        a.until(lambda t: t.link(b)["way"] is not None, 30)
        back_s = watch.quiet_s()
        print(f"\nback after {back_s:.1f} s")
        assert a.ask(b, timeout_s=10) < 5
        assert back_s < 12


def test_a_lossy_link_is_fast_and_its_loss_is_seen() -> None:
    with two("open") as (wan, a, b):
        wan.set(loss=0.01, between=("a", "b"))
        took_s = a.ask(b, down=24 << 20, timeout_s=60)
        link = a.link(b)
        assert link["way"] == "tcp"
        assert 24 * 8.39 / took_s > 20  # Mbit/s; one socket of CUBIC does 2
        assert link["down_bytes_per_s"] > 2e6
        b.until(lambda t: (t.link(a)["loss"] or 0) > 0.002, 5)  # who sends sees it
        there, back = (wan.counters()[site] for site in ("b", "a"))
        dropped = (there.lost + there.full_up + back.full_down) / there.sent  # BBR fills the queue before it slows down
        print(f"\nseen {b.link(a)['loss']:.3f}, dropped {dropped:.3f}")
        assert b.link(a)["loss"] < 4 * dropped
