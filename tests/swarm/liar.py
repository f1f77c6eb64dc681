"""A member that lies: generated messages of every kind, with every field at its extremes, made up, replayed, stale,
from the future, and different to each. It signs with its own key only."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from shoal.swarm.round_record import Certified, Record, ack_text, proposal_text, vote_text
from shoal.swarm.world import Out
from tests.swarm.simulator import SWARM, Sim, name, signature_of

TERMS = (0, 1, 2, 3, 5, 7, 1000, (1 << 29) - 1, 1 << 29, (1 << 29) + 1, (1 << 30) - 1, 1 << 30, (1 << 30) + 3, 1 << 62)
ODD: tuple[Any, ...] = (
    None, True, -1, 0, 1 << 62, 1 << 63, 10**400, 1.5, -0.0, 1e308, "", "x" * 300, "f" * 64, [], {}, [[]], {"a": 1},
)  # fmt: skip


class Liar:
    """Goes on as an honest member would (it has to be one), and says `per_tick` things more."""

    def __init__(self, sim: Sim, me: str, per_tick: int = 4) -> None:
        self.sim, self.me, self.rng, self._per_tick = sim, me, random.Random(f"liar {me} {sim.rng.random()}"), per_tick
        self.branches: list[Certified] = []  # of which it is the only member
        sim.on_tick.append(self.tick)

    def tick(self) -> None:
        for _ in range(self._per_tick):
            victim = self.rng.choice([p for p in self.sim.peers if p != self.me])
            made = self.rng.choice(self._lies())(victim)
            if self.rng.random() < 0.4:
                made = Out(made.to, made.kind, self._twisted(made.fields))
            self.sim._send(self.me, made)

    def _lies(self) -> list[Callable[[str], Out]]:
        return [self.pulse, self.vote, self.query, self.promise, self.propose, self.ack, self.commit, self.replay]

    def _twisted(self, fields: dict[str, Any]) -> dict[str, Any]:
        """With one value in it replaced, however deep."""
        key = self.rng.choice(sorted(fields))
        inner = fields[key]
        if isinstance(inner, dict) and inner and self.rng.random() < 0.7 and all(isinstance(k, str) for k in inner):
            return {**fields, key: self._twisted(inner)}
        return {**fields, key: self.rng.choice([*ODD, *TERMS])}

    def _head(self, victim: str) -> Record:
        """Where the victim stands, stood, or never will."""
        past = list(self.sim.peers[victim].chain.past(self.sim.peers[victim].chain.head.hash))
        return self.rng.choice([past[0], past[0], past[0], *past])

    def _term(self, victim: str) -> int:
        """Often one in which it would lead."""
        d = self.sim.peers[victim].decider
        order = d.order()
        if self.me in order and self.rng.random() < 0.5:
            turn = order.index(self.me)
            return turn + len(order) * self.rng.choice([0, 1, 2, 1000, 1 << 26, 1 << 30, 1 << 55])
        return self.rng.choice(TERMS)

    def _sign(self, text: bytes) -> str:
        return signature_of(self.me, text)

    def _record(self, head: Record) -> Record:
        members = self.rng.choice([head.members, (self.me,), tuple(self.sim.disks), (*head.members, name(99)), ()])
        members = tuple(dict.fromkeys(members))
        kind = self.rng.choice(["round", "round", "branch"])
        number = head.round + self.rng.choice([1, 1, 1, 0, 2, 1 << 39])
        by = self.rng.choice([self.me, *head.members, ""])
        time = self.rng.choice([0.0, self.sim.now, 1e14])
        return Record(kind, number, (head.hash,), members, time=time, tokens=self.rng.choice([0, 1 << 61]), by=by)

    # Of each kind one.

    def pulse(self, victim: str) -> Out:
        heads = [self._head(victim).hash, "a" * 64, *(c.record.hash for c in self.branches[-3:])]
        flags = {"wants": self.rng.random() < 0.5, "leaving": self.rng.random() < 0.5}
        said = {"head": self.rng.choice(heads), "round": self.rng.choice([0, 1, 1 << 40]), "ended": 1, "begun": 1 << 40}
        return Out(victim, "pulse", {**said, **flags, "weights": None, "status": {"loss": 1.0}, "links": []})

    def vote(self, victim: str) -> Out:
        head, term = self._head(victim).hash, self._term(victim)
        signature = self._sign(vote_text(SWARM, head, term)) if self.rng.random() < 0.9 else "none"
        shown = {"votes": self._votes(head, term)} if self.rng.random() < 0.5 else {}
        return Out(victim, "vote", {"head": head, "term": term, "signature": signature, **shown})

    def query(self, victim: str) -> Out:
        head, term = self._head(victim).hash, self._term(victim)
        return Out(victim, "query", {"head": head, "term": term, "votes": self._votes(head, term)})

    def _votes(self, head: str, term: int) -> dict[str, list[Any]]:
        votes = {self.me: [term, self._sign(vote_text(SWARM, head, term))]}
        if self.rng.random() < 0.5:  # of others, made up or heard
            votes |= {p: [term, self._sign(vote_text(SWARM, head, term))] for p in self.sim.disks}
        for kind, said in self.sim.tapes[self.me][-5:]:
            votes |= said.get("votes", {}) if kind in ("query", "propose", "vote") else {}
        return votes

    def promise(self, victim: str) -> Out:
        head = self._head(victim)
        term = self.sim.peers[victim].decider.term if self.rng.random() < 0.7 else self._term(victim)
        acked = {"term": self.rng.choice([0, max(0, term - 1), *TERMS]), "record": self._record(head).body()}
        return Out(victim, "promise", {"head": head.hash, "term": term, "acked": self.rng.choice([acked, None])})

    def propose(self, victim: str) -> Out:
        """Another record to each."""
        head = self._head(victim)
        term = self.sim.peers[victim].decider.term if self.rng.random() < 0.5 else self._term(victim)
        record = self._record(head)
        if self.branches and self.rng.random() < 0.2:
            parents = tuple(sorted({head.hash, self.rng.choice(self.branches).record.hash}))
            if len(parents) == 2:
                record, term = Record("merge", head.round + 1, parents, record.members, by=self.me), 1 << 30
        signature = self._sign(proposal_text(SWARM, head.hash, term, record.hash))
        votes = self._votes(head.hash, term)
        return Out(victim, "propose", {"term": term, "record": record.body(), "votes": votes, "signature": signature})

    def ack(self, victim: str) -> Out:
        proposal = self.sim.peers[victim].decider._proposal
        record = self._record(self._head(victim)).hash if proposal is None else proposal.record.hash
        term = self._term(victim) if proposal is None or self.rng.random() < 0.3 else proposal.term
        return Out(
            victim, "ack", {"hash": record, "term": term, "signature": self._sign(ack_text(SWARM, record, term))}
        )

    def commit(self, victim: str) -> Out:
        """A branch of its own, which counts by its own signature, or what goes on from one."""
        if self.branches and self.rng.random() < 0.5:
            before, kind = self.rng.choice(self.branches).record, self.rng.choice(["round", "branch"])
        else:
            before, kind = self._head(victim), "branch"
        record = Record(kind, before.round + 1, (before.hash,), (self.me,), time=self.rng.random(), by=self.me)  # type: ignore[arg-type]
        term = self.rng.choice(TERMS)
        made = Certified(record, term, {self.me: self._sign(ack_text(SWARM, record.hash, term))})
        self.branches = [*self.branches[-20:], made]
        return Out(victim, "commit", made.body())

    def replay(self, victim: str) -> Out:
        tape = self.sim.tapes[self.me]
        if not tape:
            return self.vote(victim)
        kind, said = self.rng.choice(tape)
        return Out(victim, kind, said)
