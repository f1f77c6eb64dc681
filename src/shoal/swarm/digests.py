"""What members say their weights are after a record. One who computes others than most has made an error, whoever it
is: also the first member, who makes the records. Where no weights are most's, nobody can tell yet who is wrong: that is
a split (`doubt` says what is done then)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shoal.net.api import PeerId
from shoal.swarm.chain import Chain, majority

REMEMBERED = 16  # records
AGREED = 256  # records
LATE = 2  # records later: who has not told by then may never do


@dataclass(frozen=True)
class Told:
    digest: str
    life: int = 0  # of the state that it is of: what was told of one that was given up counts no more
    twice: bool = False  # computed a second time, since others have told other weights


@dataclass(frozen=True)
class Split:
    """Members have told different weights after a record, and none of them are most's."""

    record: str
    round: int
    sides: Mapping[str, tuple[PeerId, ...]]  # digest → who has told it
    twice: bool  # all of them have computed it again
    counts: str | None  # the digest that counts if they do not change


class Digests:
    def __init__(self, chain: Chain) -> None:
        self._chain = chain
        self._said: dict[str, dict[PeerId, Told]] = {}
        self._lives: dict[PeerId, int] = {}
        self._agreed: dict[str, str] = {}

    def hear(self, peer: PeerId, record: str, told: Told) -> None:
        if record not in self._chain:
            return
        if self._lives.get(peer, told.life) != told.life:
            for said in self._said.values():
                said.pop(peer, None)
        self._lives[peer] = told.life
        self._said.setdefault(record, {})[peer] = told
        if len(self._said) > REMEMBERED:
            del self._said[min(self._said, key=self._round)]
        if (most := self.most(record)) is not None:
            self._agreed[record] = most
            if len(self._agreed) > AGREED:
                del self._agreed[min(self._agreed, key=self._round)]

    def sides(self, record: str) -> dict[str, tuple[PeerId, ...]]:
        """Members in their order, by what they have told."""
        said, found = self._said.get(record, {}), dict[str, tuple[PeerId, ...]]()
        for peer in self._chain.get(record).members:
            if peer in said:
                found[said[peer].digest] = (*found.get(said[peer].digest, ()), peer)
        return found

    def most(self, record: str) -> str | None:
        """The digest that more than half of the members of a record have told, if there is one. Half of them are not
        enough, whoever is among them: the first member's memory is no better than another's."""
        members = self._chain.get(record).members
        return next((d for d, peers in self.sides(record).items() if 2 * len(peers) > len(members)), None)

    def agreed(self, record: str) -> str | None:
        """What most had told when the record after it was made; else what most have told here."""
        for after in (one.record for one in self._chain.after(record)):
            if after.kind == "round" and after.state is not None:  # a branch counts by one liar's signature too
                return after.state
        return self._agreed.get(record)

    def differs(self, mine: dict[str, str]) -> int | None:
        """The round after which most have other weights than these, by record."""
        for record in self._said:
            most = self.most(record) if record in mine else None
            if most is not None and most != mine[record]:
                return self._round(record)
        return None

    def split(self, me: PeerId) -> Split | None:
        """The newest that this peer is part of, unless most have agreed on something newer. Somebody who has told
        nothing is late, and no side; it is waited for a little."""
        for record in sorted(self._said, key=self._round, reverse=True):
            sides, members = self.sides(record), self._chain.get(record).members
            if not any(me in peers for peers in sides.values()):
                continue
            if self.most(record) is not None:
                return None
            tellers = [peer for peers in sides.values() for peer in peers]
            all_told = len(tellers) == len(members)
            if len(sides) > 1 and (all_told or self._round(record) + LATE <= self._chain.head.round):
                # Most peers; among equally many, the side of whoever stands first in the record. Where some have told
                # nothing that takes half of all members, so that none of the silent could be needed for more.
                first = max(sides, key=lambda digest: (len(sides[digest]), -members.index(sides[digest][0])))
                counts = first if all_told or majority(sides[first], members) else None
                twice = all(self._said[record][peer].twice for peer in tellers)
                return Split(record, self._round(record), sides, twice, counts)
        return None

    def _round(self, record: str) -> int:
        return self._chain.get(record).round
