"""One connection that carries frames in order: over TCP with keys of our own, or a stream of QUIC."""

from __future__ import annotations

import base64
from dataclasses import dataclass, field
from typing import Any, Protocol

from shoal.fleet.net.api import Address
from shoal.fleet.net.frames import Data
from shoal.fleet.net.identity import canonical

VERSION = 2  # 2: members vote for a term; messages about the history are signed
MOST_GREETING = 32 << 10


class Broken(ConnectionError):
    """The other side is gone, does not keep to the protocol, or is not who it should be."""


@dataclass(frozen=True)
class Counts:
    """Of packets, as the kernel or QUIC counts them."""

    sent: int = 0
    lost: int = 0


class Pipe(Protocol):
    seen: str  # the other's ip:port, as seen from here; empty through a relay

    async def send(self, parts: list[Data]) -> None:
        """One frame; returns when there is room for the next."""
        ...

    async def receive(self) -> Data:
        """One frame. `Broken` when there will be no more, `BadFrame` for what is none."""
        ...

    def counts(self) -> Counts: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Greeting:
    """What each side says of itself before the first frame, once its key is proven."""

    boot: str  # of the process: another one with the same key takes over
    link: str  # which connections belong together; the dialer's choice
    bulk: bool  # a further connection of that link, for large bodies
    address: Address = field(default_factory=Address)
    you_are: str = ""  # the other's ip:port, as seen from here
    proof: bytes = b""

    def encode(self) -> bytes:
        a = self.address
        return canonical(
            {
                "version": VERSION,
                "boot": self.boot,
                "link": self.link,
                "bulk": self.bulk,
                "address": [list(a.relays), list(a.direct), list(a.tcp)],
                "you": self.you_are,
                "proof": base64.b64encode(self.proof).decode(),
            }
        )


def read_greeting(said: Any) -> Greeting:
    """`Broken` for anything else."""
    if not isinstance(said, dict):
        raise Broken("its greeting is no JSON object")
    if said.get("version") != VERSION:
        raise Broken(f"it speaks version {str(said.get('version'))[:20]} of the protocol, this side speaks {VERSION}")
    boot, link, bulk, you, proof = (said.get(k) for k in ("boot", "link", "bulk", "you", "proof"))
    try:
        if not (isinstance(boot, str) and isinstance(link, str) and isinstance(bulk, bool) and isinstance(you, str)):
            raise ValueError
        if len(boot) > 64 or len(link) > 64 or len(you) > 64 or not isinstance(proof, str):
            raise ValueError
        return Greeting(boot, link, bulk, _address(said.get("address")), you, base64.b64decode(proof, validate=True))
    except ValueError as e:
        raise Broken("its greeting is malformed") from e


def _address(said: Any) -> Address:
    if not isinstance(said, list) or len(said) != 3:
        raise ValueError
    for part in said:
        if not isinstance(part, list) or len(part) > 16 or not all(isinstance(x, str) and len(x) <= 256 for x in part):
            raise ValueError
    return Address(*(tuple(part) for part in said))
