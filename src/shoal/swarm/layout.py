"""Who holds which stage of a model that is cut over peers: a list that the organiser signs before the first step, and
signs again with more peers at its end when somebody comes later.

Nobody says of itself which stage it holds: a peer asks the others for the list, and believes what the organiser has
signed. So any member can pass it on. Nobody in it ever moves or goes: the order in which siblings' gradients are
summed, the lead's turn and what is more than half rest on it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from shoal.errors import SetupError
from shoal.net.api import Message, PeerId
from shoal.net.identity import Identity, canonical
from shoal.plain_file import read_plain
from shoal.spec.cut import MOST_PEERS
from shoal.swarm.charter import Charter
from shoal.swarm.signed import Forged, check, sign
from shoal.values import BadValue, items, name, read_object, text, whole

LAYOUT = "layout"  # the question for it; the answer has no body where nothing newer is known
MOST_LAYOUT = 1 << 18
Stages = tuple[tuple[PeerId, ...], ...]


@dataclass(frozen=True)
class SignedLayout:
    stages: Stages
    first: tuple[int, ...]  # of each stage: how many were there before the first step
    signature: str

    @classmethod
    def new(cls, swarm: str, organiser: Identity, peers: Sequence[PeerId], stages: int) -> SignedLayout:
        """In turn: the first peer in the first stage, and so on; with more peers than stages some have siblings."""
        seated = tuple(tuple(peers[stage::stages]) for stage in range(stages))
        return cls._signed(swarm, organiser, seated, tuple(map(len, seated)))

    def with_more(self, swarm: str, organiser: Identity, added: Mapping[PeerId, int]) -> SignedLayout:
        """`added`: who comes later, and the stage of each."""
        grown = ((*stage, *(p for p, at in added.items() if at == i)) for i, stage in enumerate(self.stages))
        return self._signed(swarm, organiser, tuple(grown), self.first)

    @classmethod
    def _signed(cls, swarm: str, organiser: Identity, stages: Stages, first: tuple[int, ...]) -> SignedLayout:
        return cls(stages, first, sign("layout", _body(swarm, stages, first), organiser))

    def to_bytes(self) -> bytes:
        return canonical({"stages": self.stages, "first": self.first, "signature": self.signature})

    @classmethod
    def of(cls, data: bytes | memoryview, charter: Charter) -> SignedLayout:
        """BadValue for what the organiser of that swarm has not signed, or what is no layout of its model."""
        s = read_object(data, most_bytes=MOST_LAYOUT)
        stages = tuple(tuple(map(name, items(one, MOST_PEERS))) for one in items(s.get("stages"), MOST_PEERS))
        first = tuple(whole(n, MOST_PEERS) for n in items(s.get("first"), MOST_PEERS))
        signature = text(s.get("signature"), 128)
        try:
            check("layout", _body(charter.swarm, stages, first), charter.organiser, signature)
        except Forged as e:
            raise BadValue(str(e)) from None
        found = cls(stages, first, signature)
        whole_cut = len(stages) == len(first) == charter.stages
        if not whole_cut or not all(0 < n <= len(peers) for n, peers in zip(first, stages, strict=True)):
            raise BadValue(f"a layout that does not give each of {charter.stages} stages a peer")
        if not len(set(found.peers)) == len(found.peers) <= MOST_PEERS:
            raise BadValue(f"a layout with a peer in two places, or with more than {MOST_PEERS}")
        return found

    @property
    def peers(self) -> list[PeerId]:
        return [peer for stage in self.stages for peer in stage]

    def stage_of(self, peer: PeerId) -> int | None:
        return next((i for i, stage in enumerate(self.stages) if peer in stage), None)

    def late(self, peer: PeerId) -> bool:
        """It came after the first step: the beginning is no state of its own."""
        return not any(peer in stage[:n] for n, stage in zip(self.first, self.stages, strict=True))

    def extends(self, before: SignedLayout) -> bool:
        """The same with more peers. What does not is older, or a second beginning that nobody can go by."""
        kept = all(new[: len(old)] == old for new, old in zip(self.stages, before.stages, strict=True))
        return kept and self.first == before.first and len(self.peers) > len(before.peers)

    def save(self, file: Path) -> None:
        part = file.with_name(f".{file.name}.{os.getpid()}")
        with open(part, "wb") as f:
            f.write(self.to_bytes())
            f.flush()
            os.fsync(f.fileno())  # the organiser must not begin a second one after a power cut
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


def read_layout(answer: Message, charter: Charter) -> SignedLayout | None:
    """Of a peer that was asked; None: it knows none, or none with more peers."""
    return SignedLayout.of(answer.body, charter) if len(answer.body) else None


def _body(swarm: str, stages: Stages, first: tuple[int, ...]) -> dict[str, object]:
    return {"swarm": swarm, "stages": stages, "first": first}
