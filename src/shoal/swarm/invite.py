"""Invitations: one line of text that lets whoever holds it into a swarm, through any member, without the organiser.

The organiser signs a *ticket*: an invitation's public key and until when it is good. The line holds that key's secret
half, which signs the newcomer's own key. Ticket and signature together are the newcomer's *admission*; who knows the
organiser's public key can check it. The secret half never travels inside the swarm.

    organiser ──signs──▶ ticket {swarm, invite, expires} ──the invite's key signs──▶ {swarm, peer}

A line also says where peers were when it was written. That part is signed by the invitation's own key, so any member
can write the line anew with newer addresses, and a line that was damaged on its way is noticed.
"""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from shoal.errors import UsageError
from shoal.masking import INVITATION
from shoal.net.api import Address, PeerId
from shoal.net.identity import KEY_BYTES, Identity, is_peer
from shoal.swarm.signed import Forged, Object, check, decode64, encode64, sign
from shoal.values import items, name, read_json, shown, table, whole
from shoal.values import text as text_of

PREFIX = INVITATION
MOST_TEXT = 8192
MOST_JSON = 32768
MOST_PEERS = 8  # named in a line; any one of them is enough
MOST_ADDRESSES = 16  # of each kind, of one peer
MOST_ADDRESS = 256  # characters
MOST_NAME = 100
SKEW_S = 600.0  # by which clocks may differ


@dataclass(frozen=True)
class Ticket:
    """The organiser's word for an invitation's key."""

    swarm: str
    organiser: PeerId
    invite: str
    expires: int  # unix seconds
    signature: str

    @classmethod
    def new(cls, swarm: str, organiser: Identity, invite: str, expires: float) -> Ticket:
        body = {"swarm": swarm, "invite": invite, "expires": int(expires)}
        return cls(swarm, organiser.id, invite, int(expires), sign("ticket", body, organiser))

    def check(self) -> None:
        body = {"swarm": self.swarm, "invite": self.invite, "expires": self.expires}
        check("ticket", body, self.organiser, self.signature)

    def to_json(self) -> Object:
        return {"invite": self.invite, "expires": self.expires, "signature": self.signature}

    @classmethod
    def of(cls, found: object, swarm: str, organiser: PeerId) -> Ticket:
        """Of what came over the network: raises `Forged`."""
        if not isinstance(found, dict) or not is_peer(found.get("invite")) or type(found.get("expires")) is not int:
            raise Forged("a ticket that is none")
        ticket = cls(swarm, organiser, found["invite"], found["expires"], str(found.get("signature")))
        ticket.check()
        return ticket


@dataclass(frozen=True)
class Admission:
    """Why a peer may be in a swarm: a ticket and the signature of its key, or the organiser's own word."""

    peer: PeerId
    ticket: Ticket | None  # None: the organiser has signed the peer's key itself
    signature: str

    @classmethod
    def direct(cls, swarm: str, peer: PeerId, organiser: Identity) -> Admission:
        return cls(peer, None, sign("admission", {"swarm": swarm, "peer": peer}, organiser))

    def to_json(self) -> Object:
        if self.ticket is None:
            return {"signature": self.signature}
        return {"ticket": self.ticket.to_json(), "signature": self.signature}

    @classmethod
    def of(cls, found: object, peer: PeerId, swarm: str, organiser: PeerId) -> Admission:
        """Checked, but for the time: raises `Forged`."""
        if not isinstance(found, dict):
            raise Forged("an admission that is none")
        ticket = Ticket.of(found["ticket"], swarm, organiser) if "ticket" in found else None
        by = organiser if ticket is None else ticket.invite
        check("admission", {"swarm": swarm, "peer": peer}, by, found.get("signature"))
        return cls(peer, ticket, found["signature"])

    @property
    def invite(self) -> str | None:
        return None if self.ticket is None else self.ticket.invite

    def good_at(self, when: float) -> bool:
        return self.ticket is None or when <= self.ticket.expires + SKEW_S


@dataclass(frozen=True)
class Invitation:
    """What the line of text holds."""

    ticket: Ticket
    key: Identity = field(repr=False)  # the invitation's secret half
    name: str = ""  # of the run
    peers: dict[PeerId, Address] = field(default_factory=dict)  # where some were

    @classmethod
    def new(
        cls, swarm: str, organiser: Identity, name: str, expires: float, peers: dict[PeerId, Address]
    ) -> Invitation:
        key = Identity.new()
        return cls(Ticket.new(swarm, organiser, key.id, expires), key, name, peers)

    @property
    def swarm(self) -> str:
        return self.ticket.swarm

    @property
    def id(self) -> str:
        """By which it is revoked."""
        return self.ticket.invite

    def admit(self, peer: PeerId) -> Admission:
        return Admission(peer, self.ticket, sign("admission", {"swarm": self.swarm, "peer": peer}, self.key))

    def at(self, peers: dict[PeerId, Address]) -> Invitation:
        """The same, with other addresses."""
        return replace(self, peers=dict(list(peers.items())[:MOST_PEERS]))

    def expired(self, now: float | None = None) -> bool:
        return (time.time() if now is None else now) > self.ticket.expires + SKEW_S

    def line(self) -> str:
        held: Object = {
            "s": self.swarm,
            "o": self.ticket.organiser,
            "e": self.ticket.expires,
            "t": self.ticket.signature,
            "k": encode64(self.key.secret),
            "n": self.name,
            "p": [[peer, *_parts(address)] for peer, address in list(self.peers.items())[:MOST_PEERS]],
        }
        signature = sign("line", held, self.key)
        return PREFIX + encode64(zlib.compress(json.dumps([held, signature], separators=(",", ":")).encode(), 9))

    @classmethod
    def read(cls, text: str) -> Invitation:
        """Of what a person pasted; line breaks and blanks in it do no harm."""
        text = "".join(text.split())
        if not text.startswith(PREFIX):
            raise UsageError(f"'{shown(text[:24])}' is no invitation: it is one line that begins with {PREFIX}.")
        wrong = UsageError("the invitation is damaged (cut off, or a letter has changed); copy the whole line again.")
        if len(text) > MOST_TEXT:
            raise wrong
        try:
            unpack = zlib.decompressobj()
            unpacked = unpack.decompress(decode64(text.removeprefix(PREFIX)), MOST_JSON)
            if unpack.unconsumed_tail:
                raise ValueError("too long")
            held, signature = _two(read_json(unpacked))
            key = Identity(decode64(held.get("k")))
            if len(key.secret) != KEY_BYTES:
                raise ValueError("no key")
            check("line", held, key.id, signature)
            ids, expires = (name(held.get("s")), name(held.get("o"))), whole(held.get("e"))
            ticket = Ticket(*ids, key.id, expires, text_of(held.get("t"), MOST_TEXT))
            ticket.check()
            peers = dict(map(_peer, items(held.get("p"), MOST_PEERS)))
            return cls(ticket, key, plain(held.get("n"), MOST_NAME), peers)
        except (ValueError, zlib.error):  # BadValue, Forged
            raise wrong from None


_PARTS = ("relays", "direct", "tcp")


def _two(said: object) -> tuple[Object, object]:
    """What is said, and its signature."""
    held, signature = [*items(said, 2), None, None][:2]
    return table(held, 64), signature


def _peer(said: object) -> tuple[PeerId, Address]:
    peer, *parts = items(said, 1 + len(_PARTS))
    return name(peer), address_of(dict(zip(_PARTS, parts, strict=True)))


def _parts(address: Address) -> tuple[Sequence[str], Sequence[str], Sequence[str]]:
    return address.relays, address.direct, address.tcp


def address_of(found: Any) -> Address:
    """Of what came over the network: raises `Forged` for more than an address needs."""
    if not isinstance(found, dict):
        raise Forged("an address that is none")
    parts: dict[str, tuple[str, ...]] = {}
    for part in _PARTS:
        values = found.get(part, [])
        if not isinstance(values, list | tuple) or len(values) > MOST_ADDRESSES:
            raise Forged("an address that is none")
        parts[part] = tuple(plain(value, MOST_ADDRESS) for value in values)
    return Address(**parts)


def address_json(address: Address) -> Object:
    return {part: list(values) for part, values in zip(_PARTS, _parts(address), strict=True)}


def plain(value: object, most: int) -> str:
    """Text that may be shown to people: no control characters, no more than so many."""
    if not isinstance(value, str) or len(value) > most or not value.isprintable():
        raise Forged("a text that is too long or cannot be printed")
    return value
