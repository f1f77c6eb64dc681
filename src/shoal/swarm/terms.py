"""Whose turn it is to propose the next record, and how that changes: by votes that anybody can check.

Each head has terms 0, 1, 2 …; in each one of the members leads. A member that finds the leader silent, stuck or wrong
signs a vote: "I leave all terms below this one". A term begins when most members have voted for it or for a later one,
and whoever speaks in it shows these votes. So no single member moves the others, whatever number it says: its vote is
one of many, and the term that most have left behind is never above what an honest member has asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shoal.net.api import PeerId
from shoal.swarm.chain import Chain, majority
from shoal.swarm.round_record import BadRecord, Record, vote_text

MOST_TERM = 1 << 29  # a vote for a later one is a lie: honest members leave a term after seconds, one by one


@dataclass(frozen=True)
class Vote:
    term: int
    signature: str


Votes = Mapping[PeerId, Vote]


@dataclass(frozen=True)
class Agreed:
    """What a member must know again after a restart, of the head that it stands at."""

    term: int = 0
    votes: Votes | None = None  # that the term rests on
    acked: tuple[int, Record] | None = None  # what it has agreed to last, and in which term
    proposed: tuple[int, Record] | None = None  # what it has proposed itself


class Terms:
    """The votes at one head."""

    def __init__(self, me: PeerId, chain: Chain) -> None:
        self._me, self._chain = me, chain
        self.term = 0
        self.wish = 0  # this member has left all terms below it
        self._votes: dict[PeerId, Vote] = {}

    def reset(self) -> None:
        """At a new head all is open again."""
        self.term = self.wish = 0
        self._votes = {}

    def leave(self, wish: int, signature: str) -> None:
        self.wish = wish
        self._votes[self._me] = Vote(wish, signature)

    def mine(self) -> Vote | None:
        return self._votes.get(self._me)

    def hear(self, peer: PeerId, vote: Vote) -> None:
        """A vote at this head. BadRecord if its signature is wrong, or it is no member's."""
        known = self._votes.get(peer)
        if known is not None and vote.term <= known.term:
            return
        if peer not in self._chain.head.members:
            raise BadRecord("a vote of no member")
        if not self._chain.verify(peer, self.text(vote.term), vote.signature):
            raise BadRecord("a vote that its member has not signed")
        self._votes[peer] = vote

    def text(self, term: int) -> bytes:
        return vote_text(self._chain.swarm, self._chain.head.hash, term)

    def reached(self) -> int:
        """The latest term that most members have voted for."""
        members = self._chain.head.members
        for term in sorted({vote.term for vote in self._votes.values()}, reverse=True):
            if majority([p for p, vote in self._votes.items() if vote.term >= term], members):
                return max(term, self.term)
        return self.term

    def shown(self) -> Votes:
        """The votes that this term rests on."""
        return {p: vote for p, vote in self._votes.items() if vote.term >= self.term} if self.term else {}

    def follow(self, term: int, votes: Votes) -> bool:
        """Whether most members stand behind a term, by votes that somebody shows. BadRecord for votes that are none."""
        if term <= self.term:
            return term == self.term
        behind = {p: vote for p, vote in votes.items() if vote.term >= term}
        if not majority(behind, self._chain.head.members):
            raise BadRecord(f"term {term}, which most members have not voted for")
        for peer, vote in behind.items():
            self.hear(peer, vote)
        return self.reached() >= term


def shown(votes: Votes) -> dict[PeerId, list[Any]]:
    """As they travel."""
    return {peer: [vote.term, vote.signature] for peer, vote in votes.items()}
