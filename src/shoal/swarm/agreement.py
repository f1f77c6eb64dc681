"""Which record comes after the head: agreement among peers of whom any may vanish at any time.

One decree for each head. The first member proposes in term 0; when most members find it silent or stuck the next one
takes over in a higher term (`terms`), asks the others what they have agreed to, and proposes that again if anybody has.
Nobody agrees to a lower term than it is in, nor to two records in one term. A record counts with the signatures of most
members (`chain.enough`), so at most one `round` follows a head.

Where most members are out of reach, those who hear each other begin a branch, if the policy lets them: all of them sign
it, and it says what it is. Branches that hear each other are joined by a merge. A branch binds nobody who hears most
members without it, and one that cannot be merged holds nobody up for long: a member that lies may be alone in as many
branches as it likes.

No sockets, no files and no clock here: time is passed in, messages come out, so that a test can run a thousand cuts in
a second. What a record contains, and whether it is right, is the business of `World`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from shoal.net.api import PeerId
from shoal.swarm.branches import Branches
from shoal.swarm.chain import Chain, enough, majority
from shoal.swarm.messages import MERGE_TERM, Ballot
from shoal.swarm.promises import Promises
from shoal.swarm.round_record import BadRecord, Certified, Record, ack_text, proposal_text
from shoal.swarm.terms import Agreed, Terms, Votes, shown
from shoal.swarm.world import Heard, Out, Rules, World

SAY_AGAIN_S = 1.0
MOST_SHOWN = 64  # members that are shown all votes of a term in one second; of more, each has its turn


@dataclass
class _Proposal:
    record: Record
    term: int
    began: float
    signatures: dict[PeerId, str] = field(default_factory=dict)
    said: float = float("-inf")


Mode = Literal["lead", "follow", "wait", "branch"]


class Decider:
    def __init__(self, me: PeerId, chain: Chain, rules: Rules, world: World, now: float) -> None:
        self.me, self.chain, self.rules, self.world = me, chain, rules, world
        self.heard: dict[PeerId, Heard] = {}
        self.branches = Branches(chain, rules, world)
        self._strange: dict[PeerId, float] = {}  # peers at a head that is not known here, and since when
        self.terms = Terms(me, chain)
        self.acked: tuple[int, Record] | None = None  # of rounds: to a branch one may agree besides
        self._proposed: tuple[int, Record] | None = None  # by this member: one in a term, also after a restart
        self.mode: Mode = "wait"
        self.leaving = False
        self._pending: tuple[int, Record, PeerId] | None = None
        self._proposal: _Proposal | None = None
        self._promises = Promises()
        self._asked = float("-inf")
        self._born = self._since = now  # since when: this decider; the head, or the term
        self._lacking: float | None = None  # most members are out of reach since then
        self._unsigned: set[PeerId] = set()  # who has not signed what was proposed here while alone, in time
        self._objects: tuple[str, int] | None = None  # to what was proposed after this head in this term
        self._unfit: float | None = None  # since then, what was proposed leaves out members that are heard
        self._voted = float("-inf")
        self._said = 0  # how often
        self._dropped: dict[PeerId, float] = {}  # members that a record has left out, and since when
        self._goodbyes: set[PeerId] = set()  # who has said that it leaves, since this is the head

    @property
    def term(self) -> int:
        return self.terms.term

    def recall(self, agreed: Agreed) -> None:
        """What this member has agreed to in an earlier life, at the head that it stands at. A term that no votes stand
        behind is not believed, whoever has written it down: nobody could propose anything in it."""
        with contextlib.suppress(BadRecord):
            if self.terms.follow(agreed.term, agreed.votes or {}):
                self.terms.term = self.terms.wish = agreed.term
        self.acked, self._proposed = (
            None if one is None or not self._is_next(one[1]) else (min(one[0], self.term), one[1])
            for one in (agreed.acked, agreed.proposed)
        )

    def _is_next(self, record: Record) -> bool:
        return record.kind == "round" and record.parent == self.chain.head.hash

    def put_out(self, peer: PeerId) -> None:
        """It is not in the swarm any more: what it has said of itself is forgotten."""
        for said in (self.heard, self._strange, self._promises.of, self._dropped):
            said.pop(peer, None)
        self.branches.put_out(peer)

    # Who is who.

    def here(self, now: float) -> set[PeerId]:
        """Whom this peer hears, itself included, on its own branch; not one that for long has not shown where it is."""
        off = self.branches.apart.keys() | {p for p, since in self._strange.items() if now - since > self.rules.stuck_s}
        return {self.me} | {p for p, h in self.heard.items() if now - h.at < self.rules.silent_s and p not in off}

    def order(self) -> list[PeerId]:
        """Of the members, whoever made the head first: there is no change while all is well."""
        members, by = list(self.chain.head.members), self.chain.head.by
        at = members.index(by) if by in members else 0
        return members[at:] + members[:at]

    def leader(self, term: int | None = None) -> PeerId | None:
        order = self.order()
        return order[(self.term if term is None else term) % len(order)] if order else None

    def first_of_branch(self, now: float) -> PeerId:
        return self._group(self.here(now))[0]

    # Time passes.

    def tick(self, now: float) -> list[Out]:
        here, head = self.here(now), self.chain.head
        if majority(here, head.members):
            self._lacking = None
            self._part_no_more()
            out = self._choose(here, now)
            out += self._lead(here, now) if self.leader() == self.me else []
            self.mode = "lead" if self.leader() == self.me else "follow"
        else:
            out = self._alone(here, now)
        return out + self._try_merge(here, now) + self._try_ack(now) + self._say_again(now)

    def _part_no_more(self) -> None:
        """Most members are in reach again: a branch that was proposed before holds nobody up."""
        if self._proposal is not None and self._proposal.record.kind == "branch":
            self._proposal = None
        if self._pending is not None and self._pending[1].kind == "branch":
            self._pending = None

    def _choose(self, here: set[PeerId], now: float) -> list[Out]:
        """Votes for a leader that is heard, and decides something; goes where most have voted for."""
        terms, members = self.terms, self.chain.head.members
        if self.me not in members:
            return []
        wish = max(terms.wish, terms.term)
        if wish == terms.term and self._gives_up(now):
            wish += 1
        while self.leader(wish) not in here:
            wish += 1
        vote = terms.mine()
        if wish > (0 if vote is None else vote.term):  # also where others' votes have led it there
            terms.leave(wish, self.world.sign(terms.text(wish)))
            self._voted = float("-inf")
        self._follow_votes(now)
        vote = terms.mine()
        if vote is None or now - self._voted < SAY_AGAIN_S:
            return []  # it is said until the head changes: whoever has not heard it may be the one who leads next
        self._voted, self._said = now, self._said + 1
        fields = {"head": self.chain.head.hash, "term": vote.term, "signature": vote.signature}
        # Whoever is in an earlier term may not hear all who have voted: it is shown what this one rests on.
        whole = fields | {"votes": shown(terms.shown())} if terms.term else fields
        turn = 1 + len(members) // MOST_SHOWN
        asked = [p for p in members if p in here and p != self.me]
        return [Out(p, "vote", fields if (i + self._said) % turn else whole) for i, p in enumerate(asked)]

    def _gives_up(self, now: float) -> bool:
        """On the leader: it decides nothing, or what it proposes is wrong. Also on oneself, if nobody agrees."""
        if self.leader() == self.me and self._proposal is None:
            return False
        wrong = self._objects == (self.chain.head.hash, self.term) or self._is_spoilt()
        return wrong or self._is_unfit(now) or now - self._since > self.rules.stuck_s

    def _is_spoilt(self) -> bool:
        """Whether what was proposed first after this head names somebody who was put out since: who has not agreed to
        it yet never will. In later terms one may have to."""
        if self.term or self.acked is None:
            return False
        return not all(map(self.world.admitted, self.acked[1].members))

    def _is_unfit(self, now: float) -> bool:
        """Whether what was proposed in this term leaves out members that have been heard for a while: they were out of
        reach when it was made, and a leader proposes nothing else in its term."""
        acked = self.acked[1] if self.acked is not None and self.acked[0] == self.term else None
        record = acked if self._pending is None else self._pending[1]
        if record is None or record.kind != "round" or not self._leaves_out(record, now):
            self._unfit = None
            return False
        self._unfit = now if self._unfit is None else self._unfit
        return now - self._unfit > 4 * self.rules.silent_s

    def _follow_votes(self, now: float) -> None:
        reached = self.terms.reached()
        if reached > self.term:
            self._enter(reached, now)

    def _enter(self, term: int, now: float) -> None:
        self.terms.term, self._since = term, now
        self.terms.wish = max(self.terms.wish, term)
        self._promises.reset()
        self._asked, self._proposal, self._unfit = float("-inf"), None, None
        if self._pending is not None and self._pending[1].kind == "round":
            self._pending = None
        self._remember()

    def _remember(self) -> None:
        self.world.remember(Agreed(self.term, self.terms.shown(), self.acked, self._proposed))

    def _lead(self, here: set[PeerId], now: float) -> list[Out]:
        head = self.chain.head
        if self._proposal is not None:
            return []
        if self._proposed is not None and self._proposed[0] == self.term:
            return self._propose(self._proposed[1], now)  # said before a restart
        if self.term:
            self._promises.of[self.me] = self.acked
            if not self._promises.enough(head.members):
                if now - self._asked < SAY_AGAIN_S:
                    return []
                self._asked = now
                fields = {"head": head.hash, "term": self.term, "votes": shown(self.terms.shown())}
                return [Out(p, "query", fields) for p in head.members if p in here and p != self.me]
            found = [r for t, r in self._promises.perhaps_decided(head.members) if not self._nobody_has_it(t, r)]
            waiting = [p for p in head.members if p in here and p not in self._promises.of]
            if found and waiting and now - self._since < self.rules.silent_s:
                return []  # whoever answers as well may show that it was not decided
            # Only the newest may have been decided. It is being fetched; what nobody has anybody could have made up.
            patient = now - self._since < self.rules.stuck_s / 2
            for agreed in found[:1] if patient else found:
                if self.world.complete(agreed):
                    return self._propose(agreed, now)
            if found and patient:
                return []
        if self.branches.held_up(self.heard, now):
            return []
        record = self.world.offer("round", self._next_members(here, now), None, now)
        return [] if record is None else self._propose(record, now)

    def _nobody_has_it(self, term: int, record: Record) -> bool:
        """Whether none of those who led up to that term, and they alone were sent signatures, has enough of them: it
        stands here in a later term, or has gone on from here without the record."""
        led = {self.leader(earlier) for earlier in range(min(term + 1, len(self.chain.head.members)))}
        return all(peer in self._promises.of or self._went_without(peer, record) for peer in led if peer is not None)

    def _went_without(self, peer: PeerId, record: Record) -> bool:
        chain, theirs = self.chain, self.branches.apart.get(peer)
        if theirs is None or theirs not in chain or not chain.is_ancestor(chain.head.hash, theirs):
            return False
        return record.hash not in chain or not chain.is_ancestor(record.hash, theirs)

    def _next_members(self, here: set[PeerId], now: float) -> tuple[PeerId, ...]:
        """Those who are heard, in their order, and who wants to come. Who leaves is left out, but for the last one."""
        head = self.chain.head
        stay = [p for p in head.members if p in here and not self._says_goodbye(p)]
        new = [p for p, h in self.heard.items() if p in here and h.wants and h.head == head.hash and not h.leaving]
        return tuple(stay + sorted(p for p in new if p not in stay)) or (self.me,)

    def _alone(self, here: set[PeerId], now: float) -> list[Out]:
        """Most members are out of reach, or there are none yet."""
        head = self.chain.head
        if self._lacking is None:
            self._lacking = now
        group = self._group(here)
        if head.members:
            may, patience = self._may_part(here), self.rules.silent_s
        else:
            group = self._willing(group)
            may, patience = len(group) >= self.rules.peers, SAY_AGAIN_S
        if not may or now - self._lacking < patience:
            self.mode = "wait"
            return []
        self.mode = "branch"
        if self._proposal is not None and now - self._since > max(patience, 3.0):
            self._unsigned |= set(self._proposal.record.members) - set(self._proposal.signatures)
            self._proposal, self._since = None, now  # somebody in it does not agree, or is gone
        if (
            self.me not in self._may_begin(group, now)
            or self._proposal is not None
            or self.branches.held_up(self.heard, now)
        ):
            return []
        record = self.world.offer("branch", tuple(group), None, now)
        if record is None:
            return []
        self._since = now
        return self._propose(record, now)

    def _willing(self, group: list[PeerId]) -> list[PeerId]:
        """Who may begin the swarm: one that is heard and never signs does not keep the others from it."""
        willing = [p for p in group if p not in self._unsigned]
        if len(willing) < self.rules.peers:
            self._unsigned, willing = set(), group
        return willing

    def _may_part(self, here: set[PeerId]) -> bool:
        """By the policy, or since those who are lacking never come back to this head: they were put out, or have gone
        on from an earlier one without us (two groups can begin a swarm at once). A merge needs most of both sides."""
        members = self.chain.head.members
        lost = {p for p in members if p in self.branches.apart or not self.world.admitted(p)}
        return self.rules.branches or majority(here | lost, members)

    def _group(self, here: set[PeerId]) -> list[PeerId]:
        """Those at the same head who hear each other, members first."""
        head = self.chain.head
        found = {p for p in here if p == self.me or (self.heard[p].head == head.hash and not self.heard[p].leaving)}
        place = {p: i for i, p in enumerate(self.order())}
        return sorted(found, key=lambda p: (place.get(p, len(place)), p))

    def _may_begin(self, group: list[PeerId], now: float) -> list[PeerId]:
        """Who may propose the branch: the first of the group, and after some time without one the next as well."""
        waited = 0.0 if self._lacking is None else now - self._lacking
        return group[: 1 + int(waited / (4 * max(self.rules.silent_s, SAY_AGAIN_S)))]

    def _try_merge(self, here: set[PeerId], now: float) -> list[Out]:
        """The first of a branch proposes that it be merged with another one."""
        found, p = self.branches.found(self.heard, now), self._proposal
        if p is not None and p.record.kind == "merge":
            if not set(p.record.parents) & set(found):
                self._proposal = self._pending = p = None  # the other branch has gone on
            elif now - p.began > 2 * self.rules.silent_s:
                self.branches.failed(p.record, now)
                self._proposal = self._pending = p = None  # somebody does not agree: the round goes before it
        first = self.mode == "lead" or (self.mode == "branch" and self._group(here)[0] == self.me)
        record = self.branches.offer(found, here, now) if p is None and first else None
        return [] if record is None else self._propose(record, now, MERGE_TERM)

    # Proposals.

    def _propose(self, record: Record, now: float, term: int | None = None) -> list[Out]:
        self._proposal = _Proposal(record, self.term if term is None else term, now)
        self._pending = (self._proposal.term, record, self.me)
        if record.kind == "round" and self._proposed != (self.term, record):
            self._proposed = self.term, record
            self._remember()
        return []

    def _say_again(self, now: float) -> list[Out]:
        p = self._proposal
        if p is None or now - p.said < SAY_AGAIN_S:
            return []
        p.said = now
        fields: dict[str, Any] = {"term": p.term, "record": p.record.body(), "votes": {}, "signature": ""}
        if p.record.kind == "round":
            text = proposal_text(self.chain.swarm, p.record.parent, p.term, p.record.hash)
            fields |= {"votes": shown(self.terms.shown()), "signature": self.world.sign(text)}
        wanted = dict.fromkeys([*p.record.members, *(m for x in p.record.parents for m in self.chain.get(x).members)])
        return [Out(peer, "propose", fields) for peer in wanted if peer != self.me and peer not in p.signatures]

    def _try_ack(self, now: float) -> list[Out]:
        if self._pending is None:
            return []
        term, record, proposer = self._pending
        if not self.world.complete(record) or self._leaves_out(record, now):
            return []
        self._pending = None
        if record.kind == "merge":
            self.branches.agreed(now)
        elif record.kind == "round":
            self.acked = (term, record)
            self._remember()
        signature = self.world.sign(ack_text(self.chain.swarm, record.hash, term))
        if proposer == self.me:
            return self._count(self.me, record.hash, term, signature, now)
        return [Out(proposer, "ack", {"hash": record.hash, "term": term, "signature": signature})]

    def _leaves_out(self, record: Record, now: float) -> bool:
        """Whether a record would drop members that are heard here, and keep two thirds or less of those who want to be
        in: a leader that lies would make itself most of the members, one after the other. Whoever is really gone is
        soon not heard. What an earlier leader has proposed may have to be agreed to although somebody has come back
        since: it is, late, if it keeps most members but those who were leaving or put out."""
        here, head, kept = self.here(now), self.chain.head, set(record.members)
        stay = {p for p in head.members if p in here and not self._says_goodbye(p)}
        if record.kind == "branch" or stay <= kept:
            return False
        if self.term and record.by != self.leader() and now - self._since > 2 * self.rules.silent_s:
            went = {p for p in head.members if p in self._goodbyes or not self.world.admitted(p)}
            went |= {self.me} if self.leaving else set()
            return not majority(kept | went, head.members)
        grace = 2 * self.rules.silent_s
        back = {p for p, since in self._dropped.items() if now - since > grace and p in here and p != self.me}
        wants = stay | {p for p in back if self.heard[p].wants and self.heard[p].head == head.hash}
        return 3 * len(wants & kept) <= 2 * len(wants)

    def _count(self, peer: PeerId, name: str, term: int, signature: str, now: float) -> list[Out]:
        p = self._proposal
        if p is None or p.record.hash != name or p.term != term:
            return []
        p.signatures[peer] = signature
        if not enough(p.record, [self.chain.get(x) for x in p.record.parents], set(p.signatures)):
            return []
        return self._commit(Certified(p.record, p.term, dict(p.signatures)), now)

    def _commit(self, new: Certified, now: float) -> list[Out]:
        told = dict.fromkeys([*new.record.members, *(p for x in new.record.parents for p in self.chain.get(x).members)])
        self.adopt(new, now)
        body = new.body()
        return [Out(peer, "commit", body) for peer in told if peer != self.me]

    def adopt(self, new: Certified, now: float) -> None:
        """It counts, and is our head from now on. BadRecord if it does not count."""
        self.chain.add(new)
        lost = (p for p in self.chain.head.members if p not in new.record.members and not self._says_goodbye(p))
        self._dropped |= dict.fromkeys(lost, now)
        self._dropped = {p: since for p, since in self._dropped.items() if p not in new.record.members}
        self.chain.move(new.record.hash)
        self._stand(now)
        self.world.committed(new)

    def _says_goodbye(self, peer: PeerId) -> bool:
        return self.leaving if peer == self.me else peer in self.heard and self.heard[peer].leaving

    def _stand(self, now: float) -> None:
        """At a new head all is open again."""
        self.terms.reset()
        self.acked = self._proposed = self._pending = self._proposal = None
        self._promises.reset()
        self.branches.stand()
        self._asked, self._lacking, self._voted = float("-inf"), None, float("-inf")
        self._since, self._unfit = now, None
        self._goodbyes = {peer for peer, heard in self.heard.items() if heard.leaving}
        self._remember()

    # What others say. `now` is the time at which it was heard.

    def hear(self, peer: PeerId, heard: Heard) -> bool:
        """A peer's pulse. True: its history has something that is not known here."""
        self.heard[peer] = heard
        if heard.leaving:
            self._goodbyes.add(peer)
        if heard.head in self.chain:
            self._strange.pop(peer, None)
            self.learn(peer, heard.head, (), heard.at)
            return False
        self._strange.setdefault(peer, heard.at)
        return True

    def vote(self, peer: PeerId, said: Ballot, now: float) -> list[Out]:
        if said.head == self.chain.head.hash:
            for voter, vote in ((peer, said.vote), *said.votes.items()):
                self.terms.hear(voter, vote)
            if self.me in self.chain.head.members:
                self._follow_votes(now)
        return []

    def query(self, peer: PeerId, head: str, term: int, votes: Votes, now: float) -> list[Out]:
        """BadRecord for a term that most members have not voted for."""
        if head != self.chain.head.hash or self.leader(term) != peer or not self._reaches(term, votes, now):
            return []
        if self.acked is not None and self.acked[0] == term:
            return []  # it has proposed already: this question is an old one
        acked = None if self.acked is None else {"term": self.acked[0], "record": self.acked[1].body()}
        return [Out(peer, "promise", {"head": head, "term": term, "acked": acked})]

    def _reaches(self, term: int, votes: Votes, now: float) -> bool:
        if not self.terms.follow(term, votes):
            return False
        self._follow_votes(now)
        return term == self.term

    def promise(self, peer: PeerId, head: str, term: int, acked: tuple[int, Record] | None) -> list[Out]:
        """BadRecord for what nobody can have agreed to."""
        if head != self.chain.head.hash or term != self.term or peer not in self.chain.head.members:
            return []
        if acked is not None:
            if not self._is_next(acked[1]) or acked[0] >= max(1, term):
                raise BadRecord("a promise about another head, or a later term")
            self.chain.fits(acked[1])
            if self.world.objection(acked[1], again=True) is not None:
                return []  # perhaps it is this peer whose weights are wrong; then somebody else has to lead
        self._promises.of[peer] = acked
        return []

    def proposed(self, peer: PeerId, term: int, record: Record, votes: Votes, now: float) -> list[Out]:
        """Raises BadRecord, with the reason, for what this peer will never agree to."""
        if record.hash in self.chain:
            return [Out(peer, "commit", self.chain.certified(record.hash).body())]
        if self.chain.head.hash not in record.parents or any(parent not in self.chain for parent in record.parents):
            return []  # one of us is behind; that is found out in another way
        if record.kind == "round" and (self.leader(term) != peer or not self._reaches(term, votes, now)):
            return []
        self.chain.fits(record)
        why = self.world.objection(record, again=record.kind == "round" and term > 0)
        if why is not None:
            if record.kind == "round":
                self._objects = (self.chain.head.hash, term)
            raise BadRecord(why)
        if not self._may(peer, term, record, now):
            return []
        self._pending = (term, record, peer)
        return self._try_ack(now)

    def _may(self, peer: PeerId, term: int, record: Record, now: float) -> bool:
        here, head = self.here(now), self.chain.head
        if record.kind == "merge":
            ours = self._proposal is not None and self._proposal.record.kind == "merge"
            return self.acked is None and self.branches.may_agree() and (not ours or peer < self.me)
        if self.branches.merging(now):
            return False
        if record.kind == "branch":
            alone = not majority(here, head.members) and self.mode == "branch"
            return alone and peer in self._may_begin(self._group(here), now)
        return self.acked is None or self.acked[1].hash == record.hash or term > self.acked[0]

    def agreed(self, peer: PeerId, name: str, term: int, signature: str, now: float) -> list[Out]:
        """The signature is right: whoever calls this has verified it."""
        return self._count(peer, name, term, signature, now)

    def learn(self, peer: PeerId, head: str, records: Iterable[Certified], now: float) -> None:
        """Records of a peer's history, oldest first, up to its head. Follows it if it goes on from ours; else the peer
        is on a branch apart. BadRecord for what does not count."""
        for new in records:
            self.chain.add(new)
        if head not in self.chain:
            return
        mine = self.chain.head.hash
        if self.chain.is_ancestor(mine, head):
            for record in self.chain.path(mine, head):
                if not self._binds(record, now):
                    self.branches.apart[peer] = head
                    return
                self.adopt(self.chain.certified(record.hash), now)
            self.branches.apart.pop(peer, None)
        elif self.chain.is_ancestor(head, mine):
            self.branches.apart.pop(peer, None)
        else:
            self.branches.apart[peer] = head
            self._come_back(peer, head, now)

    def _come_back(self, peer: PeerId, head: str, now: float) -> None:
        """Somebody who is in no branch has followed one, and hears now how most went on from where it parted."""
        mine = self.chain.head
        if self.me in mine.members:
            return
        before = self.chain.common(mine.hash, head).hash
        ours, theirs = (self.chain.path(before, name)[0].kind for name in (mine.hash, head))
        if ours == "branch" and theirs != "branch":
            self.branches.apart.pop(peer)
            self.adopt(self.chain.certified(head), now)

    def _binds(self, record: Record, now: float) -> bool:
        """Whether a record that counts and comes after our head moves us. Its own signatures alone make a branch count,
        be it of one peer: it moves nobody who hears most members without it."""
        before = self.chain.head.members
        if record.kind != "branch":
            return True
        if not before:
            return len(record.members) >= self.rules.peers
        if now - self._born < self.rules.silent_s:
            return False  # nobody else can have been heard yet
        return not majority(self.here(now) - set(record.members), before)
