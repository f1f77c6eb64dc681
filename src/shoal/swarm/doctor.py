"""What keeps a machine from a swarm, found out before training: each cause by its name, with what to do about it.

It does what a newcomer does (asks the relays, greets the peers that the invitation names, compares clocks) and looks at
what happened on the way. docs/decisions/041 has the list of what others' users were left alone with.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

from shoal import wire
from shoal.net.api import LinkState, PeerId, Refused, Unreachable
from shoal.readable import duration, short
from shoal.swarm.config import NodeConfig
from shoal.swarm.enter import Heard, newcomer, only_looked, visit
from shoal.swarm.invite import SKEW_S, Invitation

LOOK_S = 12.0
HTTP_S = 5.0
FAR = ("2001:db8::1", 9)  # an address of no machine: whether there is a way towards it is asked of this one alone
_PRIVATE = [
    ipaddress.ip_network(net)
    for net in (
        *("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16"),
        *("::1/128", "fc00::/7", "fe80::/10"),
    )
]
Level = Literal["good", "note", "bad"]


@dataclass(frozen=True)
class Finding:
    level: Level
    about: str
    text: str  # what it is, and what to do


async def examine(invitation: Invitation, config: NodeConfig, look_s: float = LOOK_S) -> list[Finding]:
    """In the order in which one would look."""
    heard = Heard()
    roster = newcomer(invitation, config, heard)
    relays = await asyncio.gather(*(asyncio.to_thread(relay_answers, url) for url in config.relays))
    async with visit(config, roster, heard) as (endpoint, gossip):
        for peer, address in invitation.peers.items():
            endpoint.know(peer, address)
        until = time.monotonic() + look_s
        while time.monotonic() < until and not _seen_all(invitation, config, endpoint.links(), heard):
            await asyncio.sleep(0.1)
        links = endpoint.links()
        for peer in [peer for peer, link in links.items() if link.way is not None]:
            with contextlib.suppress(Unreachable, Refused):
                await gossip.ask(peer, timeout_s=5.0)
                break
        skew = gossip.skew_s
        await only_looked(gossip)
    answered = dict(zip(config.relays, relays, strict=True))
    return [
        _expiry(invitation, skew),
        *(_relay(url, why, heard) for url, why in answered.items()),
        *_udp(config, answered, heard),
        *_nat(heard, _own_hosts()),
        *_ipv6(config.relays, answered),
        *(_peer(peer, roster.name(peer), links.get(peer), heard) for peer in invitation.peers),
        *_clock(skew),
        *_together(invitation, links),
    ]


def _seen_all(invitation: Invitation, config: NodeConfig, links: dict[PeerId, LinkState], heard: Heard) -> bool:
    settled = {e["peer"] for e in heard.of("link_denied")}
    settled |= {peer for peer, link in links.items() if link.way is not None}
    told = {e.get("at") for e in heard.of("relay_down", "relay_refused")}
    told |= {e.get("by") for e in heard.of("address_seen")}
    udp = config.tcp_only or bool(heard.of("rendezvous_failed")) or told >= set(config.relays)
    return settled >= invitation.peers.keys() and udp


def relay_answers(url: str) -> str:
    """Why a relay does not answer to HTTP; empty: it does."""
    try:
        with urllib.request.urlopen(f"{url.rstrip('/')}/ping", timeout=HTTP_S):
            return ""
    except urllib.error.HTTPError as e:
        return "" if e.code < 500 else f"it answers with an error ({e.code})"
    except urllib.error.URLError as e:
        return _cause(e.reason)
    except (OSError, ValueError) as e:
        return _cause(e)


def _cause(e: object) -> str:
    if isinstance(e, socket.gaierror):
        return "its name is not known to this machine's DNS"
    if isinstance(e, ConnectionRefusedError):
        return "nothing listens there"
    if isinstance(e, TimeoutError) or "timed out" in str(e):
        return f"no answer within {HTTP_S:g} s (a firewall, or it is down)"
    return str(getattr(e, "strerror", None) or e)


def _expiry(invitation: Invitation, skew: float | None) -> Finding:
    left = invitation.ticket.expires - (time.time() + (skew or 0.0))
    if left < 0:
        return Finding("bad", "invitation", f"it expired {duration(-left)} ago; ask the organiser for a new one")
    return Finding("good", "invitation", f"for run {invitation.name}, good for another {duration(left)}")


def _relay(url: str, why: str, heard: Heard) -> Finding:
    if why:
        return Finding("bad", "relay", f"{url} cannot be reached: {why}; ask for another relay, or host one")
    if refused := [e["reason"] for e in heard.of("relay_refused") if e.get("at") == url]:
        return Finding("bad", "relay", f"{url} refuses this peer ({refused[-1]}); ask whoever hosts it")
    return Finding("good", "relay", f"{url} answers")


def _udp(config: NodeConfig, answered: dict[str, str], heard: Heard) -> list[Finding]:
    if config.tcp_only:
        return [Finding("note", "UDP", "not looked at: --tcp-only")]
    alive = [url for url, why in answered.items() if not why]
    if heard.of("address_seen"):
        return [Finding("good", "UDP", "packets come through")]
    if alive:
        return [
            Finding(
                "note",
                "UDP",
                "none comes back from the relay although it answers over TCP: a firewall drops UDP; everything goes "
                "through TCP or the relay, which is slower. Let UDP out if you can",
            )
        ]
    return [Finding("note", "UDP", "not known: there is no relay to ask")]


def _nat(heard: Heard, own: set[str]) -> list[Finding]:
    """By the addresses that several others have seen this machine's one socket at."""
    seen: dict[str, tuple[str, int]] = {}
    for event in heard.of("address_seen"):
        with contextlib.suppress(ValueError):
            seen[str(event.get("by"))] = wire.address_of(str(event.get("at")))
    public = {by: at for by, at in seen.items() if not _private(at[0]) or at[0] in own}
    if not public:
        return [Finding("note", "NAT", "not known: nobody outside has seen this machine")]
    if all(host in own for host, _ in public.values()):
        return [Finding("good", "NAT", "none: this machine has a public address")]
    if len({port for _, port in public.values()}) > 1:
        return [
            Finding(
                "note",
                "NAT",
                "symmetric: it shows each peer another port, so no hole can be punched towards other NATs; a relay "
                "carries what TCP cannot. A forwarded port, or another router setting, would help",
            )
        ]
    if len(public) > 1:
        return [Finding("good", "NAT", "one that keeps its ports: holes can be punched, no open port is needed")]
    return [Finding("good", "NAT", "there is one; whether it keeps its ports shows with a second relay")]


def _ipv6(relays: Iterable[str], answered: dict[str, str]) -> list[Finding]:
    """A machine that believes to have IPv6 and has not makes every first attempt time out."""
    with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect(FAR)  # sends nothing
            own = ipaddress.ip_address(sock.getsockname()[0])
        except OSError:
            return [Finding("good", "IPv6", "none, and none is needed")]
    if own.is_loopback or own.is_link_local or own.is_private:
        return [Finding("good", "IPv6", "none that leads outside, and none is needed")]
    for url in relays:
        host, port = urlsplit(url).hostname or "", urlsplit(url).port or 80
        try:
            there = socket.getaddrinfo(host, port, socket.AF_INET6, socket.SOCK_STREAM)
        except OSError:
            continue
        try:
            with socket.create_connection((str(there[0][4][0]), port), timeout=2.0):
                return [Finding("good", "IPv6", "works")]
        except OSError:
            if not answered.get(url):
                return [
                    Finding(
                        "note",
                        "IPv6",
                        f"broken: this machine has an address ({own}) but does not reach {host} by it, as IPv4 does: "
                        "mend IPv6 or switch it off, since attempts by it end only after a while",
                    )
                ]
    return [Finding("note", "IPv6", f"there is an address ({own}); no relay has one to try it with")]


def _peer(peer: PeerId, name: str, link: LinkState | None, heard: Heard) -> Finding:
    if link is not None and link.way is not None:
        way = {"tcp": "TCP", "direct": "QUIC, directly", "relay": "a relay"}[link.way]
        rtt = "" if link.rtt_s is None else f", {short(link.rtt_s)}"
        return Finding("good", "peer", f"{name} is reached by {way}{rtt}")
    if denied := [e["reason"] for e in heard.of("link_denied") if e["peer"] == peer]:
        return Finding("bad", "peer", f"{name} refuses this invitation: {denied[-1]}; ask for a new one")
    tried = {str(e.get("at")): str(e.get("reason")) for e in heard.of("link_failed") if e["peer"] == peer}
    what = "; ".join(f"{at}: {why}" for at, why in list(tried.items())[:4]) or "no address of it leads anywhere"
    return Finding("note", "peer", f"{name} is not reached ({what})")


def _clock(skew: float | None) -> list[Finding]:
    if skew is None:
        return []
    if abs(skew) <= 60:
        return [Finding("good", "clock", "right to the minute")]
    way = "behind" if skew > 0 else "ahead"
    text = f"{duration(abs(skew))} {way} of the other peers'; set it (NTP), or certificates and logs will mislead you"
    return [Finding("bad" if abs(skew) > SKEW_S else "note", "clock", text)]


def _together(invitation: Invitation, links: dict[PeerId, LinkState]) -> list[Finding]:
    if any(links[peer].way is not None for peer in invitation.peers if peer in links):
        return []
    return [
        Finding(
            "bad",
            "swarm",
            "no peer that the invitation names was reached: they are away, or have moved; ask somebody who is in for "
            "`shoal swarm invite`, which prints newer addresses",
        )
    ]


def _own_hosts() -> set[str]:
    from shoal.net.tcp import own_hosts

    return set(own_hosts())


def _private(host: str) -> bool:
    """Of a home, an office or a carrier: who sees it is on the same side of the NAT."""
    try:
        at = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return True
    return any(at.version == net.version and at in net for net in _PRIVATE)
