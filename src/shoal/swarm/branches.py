"""Branches that part from ours: who is on which, which of them can be merged now, and how long one waits for that.

What cannot be merged holds nobody up for long, and is tried more and more seldom: a member that lies may be alone in as
many branches as it likes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from shoal.net.api import PeerId
from shoal.swarm.chain import Chain, majority
from shoal.swarm.round_record import Record
from shoal.swarm.world import Heard, Rules, World

LINKS_COME_S = 1.5  # after a cut they come one by one: a merge waits a little for the last of them
MOST_MERGES = 3  # that a member agrees to at one head; each keeps it from agreeing to anything else for a while
MOST_BACKOFF = 64  # times as long until a branch that could not be merged is tried again

Found = dict[str, set[PeerId]]  # heads of other branches, and who is heard there


class Branches:
    def __init__(self, chain: Chain, rules: Rules, world: World) -> None:
        self._chain, self._rules, self._world = chain, rules, world
        self.apart: dict[PeerId, str] = {}  # peers on a branch that parts from ours, and its head as we know it
        self._unmerged: dict[PeerId, tuple[int, float]] = {}  # how often its branch was not to be merged, until when
        self.stand()

    def stand(self) -> None:
        """At a new head all is open again."""
        self._met: float | None = None  # since then a branch is heard that can be merged with this head
        self._merging, self._merges = float("-inf"), 0  # a merge was agreed to then: it goes first

    def put_out(self, peer: PeerId) -> None:
        self.apart.pop(peer, None)
        self._unmerged.pop(peer, None)

    # A merge that this member has agreed to.

    def agreed(self, now: float) -> None:
        """For a while nothing else is agreed to."""
        self._merging, self._merges = now, self._merges + 1

    def may_agree(self) -> bool:
        return self._merges < MOST_MERGES

    def merging(self, now: float) -> bool:
        return now - self._merging < 2 * self._rules.silent_s

    def failed(self, record: Record, now: float) -> None:
        """A merge that somebody does not agree to."""
        self._not_merged(self.apart.keys() & set(record.members), now)

    def _not_merged(self, peers: Iterable[PeerId], now: float) -> None:
        for peer in peers:
            times = self._unmerged.get(peer, (0, 0.0))[0] + 1
            self._unmerged[peer] = times, now + self._rules.silent_s * min(2**times, MOST_BACKOFF)

    # What can be merged.

    def found(self, heard: Mapping[PeerId, Heard], now: float) -> Found:
        """Other branches that are heard and can be tried. Not one that goes on from our own head: it is merged when we
        have gone on too. Between two merges there is a round."""
        heads: Found = {}
        if self._chain.head.kind == "merge":
            return heads
        for peer, head in self.apart.items():
            near = peer in heard and now - heard[peer].at < self._rules.silent_s
            if near and head in self._chain and now >= self._unmerged.get(peer, (0, now))[1]:
                heads.setdefault(head, set()).add(peer)
        mine = self._chain.head.hash
        return {head: peers for head, peers in heads.items() if not self._chain.is_ancestor(mine, head)}

    def held_up(self, heard: Mapping[PeerId, Heard], now: float) -> bool:
        """Branches that can be merged are, before either goes on; not for long, since that may fail."""
        if self.merging(now):
            return True
        if not any(self._world.mergeable(other) for other in self.found(heard, now)):
            return False
        if self._met is None:
            self._met = now
        return now - self._met < 2 * self._rules.silent_s

    def offer(self, found: Found, here: set[PeerId], now: float) -> Record | None:
        """The merge to propose. It is the larger branch's to do so."""
        mine = self._chain.head
        for other, peers in sorted(found.items()):
            theirs = self._chain.get(other)
            if not majority(peers, theirs.members) or not majority(here, mine.members):
                continue
            if (len(theirs.members), theirs.hash) > (len(mine.members), mine.hash):
                continue
            if not self._world.mergeable(other):
                continue
            if set(theirs.members) - peers and (self._met is None or now - self._met < LINKS_COME_S):
                continue
            members = tuple(dict.fromkeys([*(p for p in mine.members if p in here), *sorted(peers)]))
            record = self._world.offer("merge", members, other, now)
            if record is not None:
                return record
        return None
