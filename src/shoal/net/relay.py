"""A relay that anybody can host: carries the packets of peers that cannot reach each other, and tells peers where
they are seen from, so that most of them need it for a moment only.

It serves iroh's own clients (relay_client.py says how) in bounded memory: a buffer for each client, and one room for
all that waits (relay_room.py). Packets that do not fit are dropped, which QUIC takes for what it is. It holds no state
that matters: after a restart the clients come back by themselves.
"""

from __future__ import annotations

import asyncio
import base64
import ipaddress
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from shoal import wire
from shoal.errors import SetupError
from shoal.net.api import Event, PeerId
from shoal.net.link_journal import Limited
from shoal.net.relay_client import MOST_KNOWN, Client
from shoal.net.relay_room import Room
from shoal.net.rendezvous import Rendezvous
from shoal.values import read_json

PORT = 3340

# Why a peer may not use the relay (empty: it may), given its proven key and what it sent as its Bearer token.
Admit = Callable[[PeerId, str], str]


@dataclass
class Counters:
    """Since the start."""

    packets: int = 0
    bytes: int = 0
    dropped: int = 0  # the receiver's queue was full
    nobody: int = 0  # the receiver is not here
    odd: int = 0  # connections that were refused, or did not keep to the protocol


def token(proof: bytes) -> str:
    """The Bearer token by which a peer shows a relay that it is a member: `RelayConfig(auth_token=…)`."""
    return base64.urlsafe_b64encode(proof).decode()


def proof_of(text: str) -> Any:
    """The JSON value in a token; None for what is none."""
    try:
        return read_json(base64.urlsafe_b64decode(text.encode()))
    except ValueError:
        return None


class Relay:
    def __init__(
        self,
        host: str = "0.0.0.0",
        port: int = PORT,
        admit: Admit | None = None,
        public: str = "",
        event: Event | None = None,
    ) -> None:
        """`public`: the IP address that peers reach it by, where it cannot be told from their connections."""
        self.host, self.port, self.counters = host, port, Counters()
        self.room = Room()
        self._admit, self._public = admit, public
        self._event = None if event is None else Limited(event, ("relay_client", "relay_gone", "relay_refused"))
        self._connections: set[Client] = set()
        self._clients: dict[bytes, list[Client]] = {}  # the last one of a key gets its packets
        self._server: asyncio.Server | None = None
        self._rendezvous: Rendezvous | None = None

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            self._server = await loop.create_server(lambda: Client(self), self.host, self.port, backlog=512)
        except OSError as e:
            raise SetupError(f"TCP port {self.host}:{self.port} cannot be used ({e.strerror}).") from e
        self.port = self._server.sockets[0].getsockname()[1]
        self._rendezvous = Rendezvous(wire.text_of((self.host, self.port)))
        try:
            await self._rendezvous.start()
        except SetupError:
            await self.close()
            raise

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for client in list(self._connections):
            client.close(1001)
        if self._rendezvous is not None:
            await self._rendezvous.close()

    def clients(self) -> list[PeerId]:
        return [key.hex() for key in self._clients]

    # What connections ask for

    def opened(self, client: Client) -> bool:
        self._connections.add(client)
        return self.room.enter(client.host)

    def refusal(self, key: bytes, token: str) -> str:
        return "" if self._admit is None else self._admit(key.hex(), token)

    def joined(self, client: Client) -> None:
        same = self._clients.setdefault(client.key, [])
        for other in same:
            other.replaced()
        same.append(client)
        self._journal("relay_client", peer=client.key.hex(), where=client.where)

    def left(self, client: Client) -> None:
        self._connections.discard(client)
        self.room.leave(client.host)
        same = self._clients.get(client.key, [])
        if client not in same:
            return
        same.remove(client)
        if not same:
            del self._clients[client.key]
            for key in client.known:
                if others := self._clients.get(key):
                    others[-1].gone(client.key)
        self._journal("relay_gone", peer=client.key.hex(), where=client.where)

    def deliver(self, client: Client, kind: int, to: bytes, rest: bytes) -> None:
        counters, others = self.counters, self._clients.get(to)
        if not others:
            counters.nobody += 1
            return
        if len(client.known) < MOST_KNOWN:
            client.known.add(others[-1].key)  # not the bytes of this packet: one object for all who send there
        if others[-1].packet(kind, client.key, rest):
            counters.packets += 1
            counters.bytes += len(rest)
        else:
            counters.dropped += 1

    def info(self, client: Client, host: str) -> dict[str, Any]:
        """The address is the one by which the client has reached this machine, if it is one that others can use."""
        seen = self._public or _literal(host) or client.address_here()
        told: dict[str, Any] = {
            "shoal": "relay",
            "clients": len(self._clients),
            "only_invited": self._admit is not None,
            "you": client.where,  # for TCP through NATs (punch.py)
        }
        if self._rendezvous is not None:
            where = wire.text_of((seen, self.port))
            told["rendezvous"] = {"id": self._rendezvous.id, "addr": where, "port": self.port}
        return {**told, "counters": asdict(self.counters)}

    def odd(self, client: Client, why: str) -> None:
        self.counters.odd += 1
        self._journal("relay_refused", where=client.where, why=why)

    def _journal(self, kind: str, **fields: Any) -> None:
        if self._event is not None:
            self._event(kind, **fields)


def _literal(host: str) -> str:
    """The IP address of a Host header; empty if it is a name."""
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
    try:
        return str(ipaddress.ip_address(name.strip("[]")))
    except ValueError:
        return ""
