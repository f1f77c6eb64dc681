"""What the members' agreement knows of the world: its rules, what peers say of themselves, and who judges records."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from shoal.net.api import PeerId
from shoal.swarm.round_record import Certified, Kind, Record
from shoal.swarm.terms import Agreed


@dataclass(frozen=True)
class Rules:
    silent_s: float = 5.0
    stuck_s: float = 120.0  # a first member that is heard and decides nothing
    peers: int = 2  # that the first round waits for
    branches: bool = True  # a half that is cut off goes on


@dataclass(frozen=True)
class Heard:
    """What a peer has said of itself lately."""

    at: float
    head: str
    wants: bool = False  # to be a member; it has the whole state
    leaving: bool = False


@dataclass(frozen=True)
class Out:
    """A message to send."""

    to: PeerId
    kind: str
    fields: dict[str, Any]


class World(Protocol):
    def offer(self, kind: Kind, members: tuple[PeerId, ...], other: str | None, now: float) -> Record | None:
        """The record to propose after the head, once it is time for one. `other`: of a merge, the other branch."""
        ...

    def objection(self, record: Record, again: bool) -> str | None:
        """Why this peer does not agree to it, if it does not. `again`: it may have been decided in an earlier term, by
        members of whom one was put out since; whoever comes next leaves it out."""
        ...

    def complete(self, record: Record) -> bool:
        """Whether all that the record refers to is here; what is not is fetched."""
        ...

    def admitted(self, peer: PeerId) -> bool:
        """False: it is in the swarm no more, by a proof or by the organiser's word."""
        ...

    def mergeable(self, other: str) -> bool:
        """Whether all of another branch is here; what is not is fetched."""
        ...

    def sign(self, text: bytes) -> str: ...

    def remember(self, agreed: Agreed) -> None:
        """On disk, before anybody is told."""
        ...

    def committed(self, new: Certified) -> None: ...
