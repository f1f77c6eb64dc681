"""What the rest of a swarm knows of the network: peers by their keys, messages, and how each link stands.

Nothing here says how a message travels. An `Endpoint` finds a way (a TCP connection, QUIC through a punched hole,
a relay), keeps it alive with heartbeats of its own, and changes it when it breaks or a better one is found.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

PeerId = str  # the public ed25519 key, 64 hexadecimal digits
Way = Literal["tcp", "direct", "relay"]  # a TCP connection, QUIC straight to the peer, QUIC through a relay


class Unreachable(ConnectionError):
    """No way to the peer, or none that answered in time."""


class Refused(ConnectionError):
    """The peer has answered, and says no; the reason is the message."""


@dataclass(frozen=True)
class Address:
    """Where a peer may be found. Travels in its signed record; any part may be empty or out of date."""

    relays: tuple[str, ...] = ()  # http://host:port
    direct: tuple[str, ...] = ()  # ip:port for QUIC, as the peer or others see it
    tcp: tuple[str, ...] = ()  # ip:port of its listener for TCP


@dataclass(frozen=True)
class Message:
    """A small JSON object, and bytes that go with it."""

    kind: str
    fields: dict[str, Any] = field(default_factory=dict)
    body: bytes | memoryview = b""


Handler = Callable[[PeerId, Message], Awaitable[Message | None]]  # the answer, where one was asked for
Event = Callable[..., None]  # (kind, **fields): for the journal

# A newcomer is not known yet when it greets: both sides send a proof with the greeting (`Roster.proof`, at most
# MOST_PROOF bytes), and the connection lives on only if `admit` says so of the proven key and those bytes.
MOST_PROOF = 8192
Proof = Callable[[], bytes]
Admit = Callable[[PeerId, bytes], bool]


@dataclass(frozen=True)
class LinkState:
    """How the link to one peer stands, as this side has measured it."""

    peer: PeerId
    way: Way | None  # None: not connected
    rtt_s: float | None = None
    loss: float | None = None  # of packets
    up_bytes_per_s: float | None = None  # what transfers got lately
    down_bytes_per_s: float | None = None
    heard_s: float | None = None  # ago
    sent_bytes: int = 0
    received_bytes: int = 0


class Endpoint(Protocol):
    """One peer's end of all its links. All methods belong to one asyncio loop."""

    id: PeerId

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    def address(self) -> Address:
        """Where this peer is, as far as it knows; it may change."""
        ...

    def on(self, kind: str, handler: Handler, most_body: int = 1 << 20) -> None:
        """Who answers messages of a kind. Larger bodies are refused before they are read."""
        ...

    def know(self, peer: PeerId, address: Address) -> None:
        """A peer to keep a link to, and where it may be."""
        ...

    def forget(self, peer: PeerId) -> None:
        """Closes the link; the peer's messages are refused from now on unless it is known again."""
        ...

    async def ask(self, peer: PeerId, message: Message, timeout_s: float = 10.0, most_body: int = 1 << 20) -> Message:
        """One question, one answer. Raises `Unreachable` or `Refused`."""
        ...

    def tell(self, peer: PeerId, message: Message) -> None:
        """Without an answer, and without a promise that it arrives."""
        ...

    def links(self) -> dict[PeerId, LinkState]: ...
