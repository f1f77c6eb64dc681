"""One connection that carries frames in order: over TCP with keys of our own, or a stream of QUIC."""

from __future__ import annotations

import base64
from dataclasses import dataclass, field
from typing import Protocol

from shoal.net.api import Address
from shoal.net.frames import Data
from shoal.net.identity import canonical
from shoal.values import flag, items, read_object, text

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


def read_greeting(data: bytes) -> Greeting:
    """`Broken` for anything else."""
    try:
        said = read_object(data)
        if said.get("version") != VERSION:
            theirs = repr(said.get("version"))[:20]
            raise Broken(f"it speaks version {theirs} of the protocol, this side speaks {VERSION}")
        boot, link, you = (text(said.get(key), 64) for key in ("boot", "link", "you"))
        proof = base64.b64decode(text(said.get("proof"), 2 * MOST_GREETING), validate=True)
        return Greeting(boot, link, flag(said.get("bulk")), _address(said.get("address")), you, proof)
    except ValueError as e:  # BadValue, or no base64
        raise Broken(f"its greeting is none: {e}") from None


def _address(said: object) -> Address:
    relays, direct, tcp = [*items(said, 3), (), (), ()][:3]
    return Address(*(tuple(text(one, 256) for one in items(part, 16)) for part in (relays, direct, tcp)))
