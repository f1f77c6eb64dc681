"""What members have agreed to before, as they tell whoever leads in a later term."""

from __future__ import annotations

from shoal.net.api import PeerId
from shoal.swarm.chain import majority
from shoal.swarm.round_record import Record


class Promises:
    """Of one term. Whoever promises agrees to nothing in earlier terms from then on."""

    def __init__(self) -> None:
        self.of: dict[PeerId, tuple[int, Record] | None] = {}  # the last that it has agreed to, and in which term

    def reset(self) -> None:
        self.of = {}

    def enough(self, members: tuple[PeerId, ...]) -> bool:
        return majority(self.of, members)

    def perhaps_decided(self, members: tuple[PeerId, ...]) -> list[tuple[int, Record]]:
        """What was agreed to, newest first; not what too few can have agreed to. A member tells the last one only: it
        may have agreed to any before that."""
        agreed: dict[tuple[int, str], set[PeerId]] = {}
        records: dict[str, Record] = {}
        for peer, promise in self.of.items():
            if promise is not None:
                term, record = promise
                records[record.hash] = record
                agreed.setdefault((term, record.hash), set()).add(peer)
        perhaps = set(members) - self.of.keys()
        found = []
        for (term, name), peers in sorted(agreed.items(), reverse=True):
            perhaps |= peers
            if majority(perhaps, members):
                found.append((term, records[name]))
        return found
