"""Who holds which stage of a model that is cut over peers: a list that the organiser signs once, before the first step.

The sum of siblings' gradients, the lead's turn and what is more than half rest on it, so it never changes. Nobody says
of itself which stage it holds: a peer asks the others for the list, and believes what the organiser has signed. So any
member can pass it on, and the organiser's machine is not needed after that.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shoal.errors import SetupError
from shoal.net.api import Message, PeerId
from shoal.net.identity import Identity, canonical
from shoal.plain_file import read_plain
from shoal.spec.cut import MOST_PEERS
from shoal.swarm.charter import Charter
from shoal.swarm.signed import Forged, check, sign
from shoal.values import BadValue, items, name, read_object, text

LAYOUT = "layout"  # the question for it; the answer has no body where nobody knows it yet
MOST_LAYOUT = 1 << 18
Stages = tuple[tuple[PeerId, ...], ...]


@dataclass(frozen=True)
class SignedLayout:
    stages: Stages
    signature: str

    @classmethod
    def new(cls, swarm: str, organiser: Identity, stages: Stages) -> SignedLayout:
        return cls(stages, sign("layout", _body(swarm, stages), organiser))

    def to_bytes(self) -> bytes:
        return canonical({"stages": self.stages, "signature": self.signature})

    @classmethod
    def of(cls, data: bytes | memoryview, charter: Charter) -> SignedLayout:
        """BadValue for what the organiser of that swarm has not signed, or what is no layout of its model."""
        s = read_object(data, most_bytes=MOST_LAYOUT)
        found = tuple(
            tuple(name(peer) for peer in items(stage, MOST_PEERS)) for stage in items(s.get("stages"), MOST_PEERS)
        )
        signature = text(s.get("signature"), 128)
        try:
            check("layout", _body(charter.swarm, found), charter.organiser, signature)
        except Forged as e:
            raise BadValue(str(e)) from None
        peers = [peer for stage in found for peer in stage]
        if len(found) != charter.stages or not all(found) or not len(set(peers)) == len(peers) <= MOST_PEERS:
            raise BadValue(f"a layout that does not give each of {charter.stages} stages peers of its own")
        return cls(found, signature)

    def stage_of(self, peer: PeerId) -> int:
        """SetupError for somebody who holds none."""
        found = next((i for i, stage in enumerate(self.stages) if peer in stage), None)
        if found is None:
            raise SetupError(
                f"the model of this swarm is cut over {sum(map(len, self.stages))} peers that were settled before this "
                "one came, and nobody can be added: ask the organiser for another swarm."
            )
        return found

    def save(self, file: Path) -> None:
        part = file.with_name(f".{file.name}.{os.getpid()}")
        with open(part, "wb") as f:
            f.write(self.to_bytes())
            f.flush()
            os.fsync(f.fileno())  # the organiser must not sign another after a power cut
        part.rename(file)

    @classmethod
    def load(cls, file: Path, charter: Charter) -> SignedLayout | None:
        """None: there is none yet."""
        try:
            return cls.of(read_plain(file, MOST_LAYOUT), charter)
        except FileNotFoundError:
            return None
        except (OSError, BadValue) as e:
            raise SetupError(
                f"{file} is not what the swarm's organiser has signed ({e}): delete it, and this peer asks the others."
            ) from None


def seated(peers: Sequence[PeerId], stages: int) -> Stages:
    """In turn: the first peer in the first stage, and so on; with more peers than stages some have siblings."""
    return tuple(tuple(peers[first::stages]) for first in range(stages))


def read_layout(answer: Message, charter: Charter) -> SignedLayout | None:
    """Of a peer that was asked; None: it does not know."""
    return SignedLayout.of(answer.body, charter) if len(answer.body) else None


def _body(swarm: str, stages: Stages) -> dict[str, object]:
    return {"swarm": swarm, "stages": stages}
