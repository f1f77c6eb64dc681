"""The emulated network does what it says: distance, rates, loss, cuts, NATs; and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from shoal.emulate import Link, Nat, Site, Wan, spaces
from shoal.emulate import program as programs
from shoal.errors import UsageError
from tests.namespaces import need_namespaces
from tests.patience import Stopwatch, limit

PORT = 7000


@pytest.fixture(autouse=True)
def _namespaces() -> None:
    need_namespaces()


def udp(wan: Wan, site: str, port: int = PORT, timeout_s: float = 1.0) -> socket.socket:
    """A socket at the site; the test itself can be at all of them at once."""
    with wan.within(site):
        found = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
    found.bind(("", port))
    found.settimeout(timeout_s)
    return found


@contextmanager
def sockets(wan: Wan, *sites: str) -> Iterator[list[socket.socket]]:
    with ExitStack() as stack:
        yield [stack.enter_context(udp(wan, site)) for site in sites]


def crossing_s(wan: Wan, a: socket.socket, b: socket.socket, to: str) -> float:
    """The best of three: this machine has other things to do too."""
    took = []
    for _ in range(3):
        begun = time.perf_counter()
        a.sendto(b"?", (wan.address(to), PORT))
        b.recv(100)
        took.append(time.perf_counter() - begun)
    return min(took)


def count(sock: socket.socket, quiet_s: float = 0.5) -> int:
    """Packets that arrive until none does for a while."""
    sock.settimeout(quiet_s)
    found = 0
    try:
        while True:
            sock.recv(2000)
            found += 1
    except TimeoutError:
        return found


@pytest.mark.parametrize("native", [True, False])
def test_distance_loss_and_cuts_are_as_told(native: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if not native:  # as if there were no compiler
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        monkeypatch.setattr(programs.shutil, "which", lambda name: None)
        with pytest.warns(UserWarning, match="no C compiler"):
            assert programs.program()[0] == sys.executable
        monkeypatch.setattr(
            "shoal.emulate.wan.program", lambda: [sys.executable, "-m", f"{spaces.__package__}.forward"]
        )
    sites = [Site(name, up_mbit=20, down_mbit=20) for name in "abc"]
    with Wan(sites, rtt_ms=60, links={("a", "c"): Link(rtt_ms=10)}) as wan, sockets(wan, "a", "b", "c") as (a, b, c):
        assert 0.030 <= crossing_s(wan, a, b, "b") < 0.060
        assert 0.005 <= crossing_s(wan, a, c, "c") < 0.025
        wan.set(loss=0.2, between=("a", "b"))
        for _ in range(500):
            a.sendto(bytes(100), (wan.address("b"), PORT))
        assert 350 <= count(b) <= 450
        wan.set(loss=0.0)
        wan.cut({"a", "c"}, {"b"})
        a.sendto(b"lost", (wan.address("b"), PORT))
        assert count(b, 0.2) == 0
        assert crossing_s(wan, a, c, "c") < 0.025  # the same half
        wan.heal()
        assert crossing_s(wan, a, b, "b") < 0.060
        counters = wan.counters()
        assert counters["a"].cut == 1
        assert 50 <= counters["a"].lost <= 150
        assert wan.carried()["a", "c"] > 0


def test_a_link_carries_its_rate_and_drops_what_does_not_fit() -> None:
    slow = Site("slow", down_mbit=10, queue_ms=50)
    with Wan([Site("quick", up_mbit=0), slow], rtt_ms=20) as wan, sockets(wan, "quick", "slow") as (a, b):
        begun = time.perf_counter()
        for _ in range(300):  # 1,500 bytes with their headers: 1.2 ms each at 10 Mbit/s
            a.sendto(bytes(1472), (wan.address("slow"), PORT))
        sent_s = time.perf_counter() - begun
        arrived = count(b)
        took_s = time.perf_counter() - begun - 0.5
        assert 42 <= arrived <= 45 + sent_s / 0.0012  # the queue's 50 ms, and what passes meanwhile
        assert took_s >= arrived * 0.0012
        counters = wan.counters()
        assert counters["quick"].full_up == 0
        assert counters["slow"].full_down == 300 - arrived


def seen_ports(wan: Wan, peer: socket.socket, hosts: dict[str, socket.socket]) -> list[int]:
    found = []
    for name, host in hosts.items():
        peer.sendto(b"who", (wan.address(name), PORT))
        found.append(host.recvfrom(100)[1][1])
    return found


@pytest.mark.parametrize(("nat", "same"), [("open", True), ("cone", True), ("symmetric", False)])
def test_nats_map_and_filter_as_their_kind_does(nat: Nat, same: bool) -> None:
    sites = [Site("peer", nat=nat), Site("known"), Site("other"), Site("stranger")]
    with Wan(sites, rtt_ms=4) as wan, sockets(wan, *(s.name for s in sites)) as (peer, known, other, stranger):
        ports = seen_ports(wan, peer, {"known": known, "other": other})
        assert (ports[0] == ports[1] == PORT) is same
        known.sendto(b"answer", (wan.address("peer"), ports[0]))
        assert peer.recv(100) == b"answer"
        stranger.sendto(b"knock", (wan.address("peer"), ports[0]))
        assert count(peer, 0.2) == (1 if nat == "open" else 0)


def test_a_firewall_lets_tcp_out_and_no_udp() -> None:
    with Wan([Site("peer", nat="firewall"), Site("host")], rtt_ms=4) as wan, sockets(wan, "peer", "host") as (a, b):
        a.sendto(b"?", (wan.address("host"), PORT))
        assert count(b, 0.2) == 0
        with wan.within("host"):
            server = socket.create_server(("", PORT))
        with server, wan.within("peer"), socket.create_connection((wan.address("host"), PORT), timeout=limit(5)):
            pass


def test_programs_run_at_a_site_and_end_with_the_network() -> None:
    with Wan([Site("a", nat="cone")], rtt_ms=2) as wan:
        show = "import os, socket; s = socket.socket(type=socket.SOCK_DGRAM); s.connect(('198.51.100.9', 9)); "
        show += "print(s.getsockname()[0], os.environ['EXTRA'])"
        shown = wan.run("a", [sys.executable, "-c", show], {"EXTRA": "yes"}, stdout=subprocess.PIPE, text=True)
        assert shown.communicate()[0].split() == [wan.own_address("a"), "yes"]
        left = wan.run("a", ["sleep", "100"])
        with pytest.raises(UsageError, match="no site 'z'"):
            wan.cut({"z"})
    assert left.wait(limit(30)) == -signal.SIGKILL
    with pytest.raises(UsageError, match="not up"):
        wan.counters()


def test_nothing_is_left_when_the_user_is_killed() -> None:
    code = """
import sys, time
from shoal.emulate import Site, Wan
with Wan([Site("a", nat="cone"), Site("b")]) as wan:
    child = wan.run("a", ["sleep", "1000"])
    print(wan.namespace("a"), child.pid, flush=True)
    time.sleep(1000)
"""
    user = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert user.stdout is not None
    name, child = user.stdout.readline().split()
    assert (spaces.FOLDER / name).exists()
    user.kill()
    user.wait()
    watch = Stopwatch()
    prefix = name[: name.rindex("-") + 1]
    while list(spaces.FOLDER.glob(f"{prefix}*")) and watch.quiet_s() < 20:
        time.sleep(0.05)
    assert not list(spaces.FOLDER.glob(f"{prefix}*"))
    assert not Path(f"/proc/{child}").exists() or "zombie" in Path(f"/proc/{child}/status").read_text()


def test_a_start_removes_what_dead_processes_have_left_and_nothing_else() -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    dead, ours = f"shoal-{gone.pid}-1-1-a", f"{spaces.prefix()}a"
    spaces.make([dead, ours])
    try:
        left = subprocess.Popen(["ip", "netns", "exec", dead, "sleep", "1000"])
        while Path(f"/proc/{left.pid}/comm").read_text().strip() != "sleep":  # it is in there
            time.sleep(0.01)
        spaces.sweep()
        assert left.wait(limit(30)) == -signal.SIGKILL
        assert not (spaces.FOLDER / dead).exists()
        assert (spaces.FOLDER / ours).exists()
    finally:
        spaces.remove([dead, ours])


def test_two_networks_at_once_do_not_meet() -> None:
    with Wan([Site("a"), Site("b")], rtt_ms=2) as one, Wan([Site("a"), Site("b")], rtt_ms=2) as two:
        with sockets(one, "a", "b") as (a, b), sockets(two, "b") as (foreign,):
            assert crossing_s(one, a, b, "b") < 0.5
            assert count(foreign, 0.1) == 0
        assert not two.carried()


def test_this_process_stays_where_it_was() -> None:
    before = os.stat("/proc/thread-self/ns/net").st_ino
    with Wan([Site("a")], rtt_ms=2) as wan:
        with wan.within("a"):
            assert os.stat("/proc/thread-self/ns/net").st_ino != before
        assert os.stat("/proc/thread-self/ns/net").st_ino == before
