"""What members say their weights are after a record. One who computes others than most has made an error, whoever it
is: also the first member, who makes the records."""

from __future__ import annotations

from shoal.fleet.net.api import PeerId
from shoal.fleet.swarm.chain import Chain, majority

REMEMBERED = 16  # records


class Digests:
    def __init__(self, chain: Chain) -> None:
        self._chain = chain
        self._said: dict[str, dict[PeerId, str]] = {}

    def hear(self, peer: PeerId, record: str, digest: object) -> None:
        if record not in self._chain or not isinstance(digest, str):
            return
        self._said.setdefault(record, {})[peer] = digest[:128]
        if len(self._said) > REMEMBERED:
            del self._said[min(self._said, key=lambda name: self._chain.get(name).round)]

    def most(self, record: str) -> str | None:
        """The digest that most members of a record have told, if there is one."""
        said, members = self._said.get(record, {}), self._chain.get(record).members
        for digest in set(said.values()):
            if majority([peer for peer, told in said.items() if told == digest], members):
                return digest
        return None

    def agreed(self, record: str) -> str | None:
        """What most have signed in the record after it; else what most say now."""
        for after in self._chain.known():
            if after.parents[:1] == (record,) and after.state is not None:
                return after.state
        return self.most(record)

    def differs(self, mine: dict[str, str]) -> int | None:
        """The round after which most have other weights than these, by record."""
        for record in self._said:
            most = self.most(record) if record in mine else None
            if most is not None and most != mine[record]:
                return self._chain.get(record).round
        return None
