"""Agreement in simulated time: cuts, crashes, loss and late messages, thousands of them."""

from __future__ import annotations

import hashlib
import heapq
import itertools
import json
import random
from dataclasses import replace
from typing import Any

import pytest

from shoal.fleet.swarm.chain import Chain
from shoal.fleet.swarm.decide import Decider, Heard, Out, Rules
from shoal.fleet.swarm.messages import read
from shoal.fleet.swarm.record import BadRecord, Certified, Kind, Record, ack_text
from shoal.fleet.swarm.terms import Agreed

SWARM = "f" * 64
START = Record("start", 0, (), ())
ROUND_S = 3.0


def name(i: int) -> str:
    return f"{i:064x}"


def signature_of(peer: str, text: bytes) -> str:
    return hashlib.sha256(peer.encode() + text).hexdigest()


def verify(peer: str, text: bytes, signature: str) -> bool:
    return signature == signature_of(peer, text)


class Peer:
    """A peer that brings no parts: only the agreement. Its `disk` survives it."""

    def __init__(self, sim: Sim, me: str, disk: dict[str, Any]) -> None:
        self.sim, self.me, self.disk = sim, me, disk
        self.chain = Chain(SWARM, START, verify)
        for certified in disk.setdefault("records", []):
            self.chain.add(certified)
        if "head" in disk:
            self.chain.move(disk["head"])
        self.decider = Decider(me, self.chain, sim.rules, self, sim.now)
        self.decider.recall(disk.get("agreed", Agreed()))
        self.began = sim.now

    def offer(self, kind: Kind, members: tuple[str, ...], other: str | None, now: float) -> Record | None:
        head = self.chain.head
        if kind == "round" and now - self.began < ROUND_S:
            return None
        parents = (head.hash,) if other is None else (head.hash, other)
        top = max(self.chain.get(parent).round for parent in parents)
        return Record(kind, top + 1, parents, members, time=now, by=self.me)

    def objection(self, record: Record) -> str | None:
        return None

    def complete(self, record: Record) -> bool:
        return self.sim.rng.random() < 0.7

    def mergeable(self, other: str) -> bool:
        return self.sim.rng.random() < 0.7

    def sign(self, text: bytes) -> str:
        return signature_of(self.me, text)

    def remember(self, agreed: Agreed) -> None:
        self.disk["agreed"] = agreed

    def committed(self, new: Certified) -> None:
        self.disk["records"].append(new)
        for other in self.chain.past(new.record.hash):  # a merge refers to the other branch
            if other.kind != "start" and all(c.record.hash != other.hash for c in self.disk["records"]):
                self.disk["records"].insert(0, self.chain.certified(other.hash))
        self.disk["records"].sort(key=lambda c: c.record.round)
        self.disk["head"] = new.record.hash
        self.began = self.sim.now
        self.sim.count(new)


class Sim:
    def __init__(self, peers: int, seed: int, rules: Rules) -> None:
        self.rng, self.rules, self.now = random.Random(seed), rules, 0.0
        self._queue: list[tuple[float, int, Any]] = []
        self._number = itertools.count()
        self.disks: dict[str, dict[str, Any]] = {name(i): {} for i in range(peers)}
        self.peers = {me: Peer(self, me, disk) for me, disk in self.disks.items()}
        self.side = dict.fromkeys(self.disks, 0)
        self.loss = 0.0
        self.children: dict[str, set[str]] = {}  # of a head, the records of kind round that count
        self.decided: set[str] = set()

    def count(self, new: Certified) -> None:
        self.decided.add(new.record.hash)
        if new.record.kind == "round":
            self.children.setdefault(new.record.parent, set()).add(new.record.hash)
            assert len(self.children[new.record.parent]) == 1, "two rounds follow one head"

    def run(self, seconds: float) -> None:
        until = self.now + seconds
        next_tick = self.now
        while next_tick < until:
            while self._queue and self._queue[0][0] <= next_tick:
                self.now, _, (frm, to, kind, fields) = heapq.heappop(self._queue)
                if to in self.peers and self.side[frm] == self.side[to]:
                    self._deliver(frm, to, kind, fields)
            self.now = next_tick
            for peer in list(self.peers.values()):
                heard = {"head": peer.chain.head.hash, "wants": True}
                for other in self.disks:
                    if other != peer.me:
                        self._send(peer.me, Out(other, "pulse", heard))
                self._out(peer, peer.decider.tick(self.now))
            next_tick += 0.5
        self.now = until

    def _send(self, frm: str, out: Out) -> None:
        if self.rng.random() >= self.loss:
            late = self.now + self.rng.expovariate(1 / 0.1)
            heapq.heappush(self._queue, (late, next(self._number), (frm, out.to, out.kind, out.fields)))

    def _out(self, peer: Peer, outs: list[Out]) -> None:
        for out in outs:
            self._send(peer.me, out)

    def _deliver(self, frm: str, to: str, kind: str, said: dict[str, Any]) -> None:
        peer, d = self.peers[to], self.peers[to].decider
        if kind == "pulse":
            if d.hear(frm, Heard(self.now, said["head"], said["wants"])) and frm in self.peers:
                self._send(to, Out(frm, "ask", {"locator": peer.chain.locator()}))
        elif kind == "ask":
            found = peer.chain.since(said["locator"], 1000)
            self._send(to, Out(frm, "chain", {"records": found, "head": peer.chain.head.hash}))
        elif kind == "chain":
            d.learn(frm, said["head"], said["records"], self.now)
        else:
            self._read(frm, peer, kind, read(kind, json.dumps(said).encode()))

    def _read(self, frm: str, peer: Peer, kind: str, said: Any) -> None:
        """As `talk` does it."""
        d = peer.decider
        match kind:
            case "vote":
                self._out(peer, d.vote(frm, said.head, said.vote, self.now))
            case "query":
                self._out(peer, d.query(frm, said.head, said.term, said.votes, self.now))
            case "promise":
                self._out(peer, d.promise(frm, said.head, said.term, said.acked))
            case "propose":
                self._out(peer, d.proposed(frm, said.term, said.record, said.votes, self.now))
            case "ack":
                if verify(frm, ack_text(SWARM, said.hash, said.term), said.signature):
                    self._out(peer, d.agreed(frm, said.hash, said.term, said.signature, self.now))
            case "commit":
                if all(parent in peer.chain for parent in said.record.parents):
                    d.learn(frm, said.record.hash, [said], self.now)

    # What happens to them.

    def kill(self, me: str) -> None:
        self.peers.pop(me, None)

    def restart(self, me: str) -> None:
        self.peers.setdefault(me, Peer(self, me, self.disks[me]))

    def cut(self, *sides: set[str]) -> None:
        for i, side in enumerate(sides):
            self.side.update(dict.fromkeys(side, i))

    def heal(self) -> None:
        self.side = dict.fromkeys(self.disks, 0)

    def heads(self) -> set[str]:
        return {peer.chain.head.hash for peer in self.peers.values()}

    def agree(self, within_s: float) -> Record:
        """All have one head and all are its members, at some moment soon."""
        for _ in range(int(within_s * 2)):
            self.run(0.5)
            heads = self.heads()
            if len(heads) == 1:
                head = next(iter(self.peers.values())).chain.head
                if set(head.members) == set(self.peers):
                    return head
        raise AssertionError(
            f"no agreement: {[(p.me[-1], p.chain.head.round, p.decider.mode) for p in self.peers.values()]}"
        )


RULES = Rules(silent_s=3.0, stuck_s=20.0, peers=4)


def test_rounds_follow_each_other_and_the_first_member_may_die() -> None:
    sim = Sim(5, 0, RULES)
    first = sim.agree(20)
    sim.run(20)
    assert sim.agree(10).round > first.round + 3
    leader = next(p.decider.leader() for p in sim.peers.values())
    assert leader is not None
    before = max(p.chain.head.round for p in sim.peers.values())
    sim.kill(leader)
    head = sim.agree(20)
    assert leader not in head.members
    assert head.round > before
    sim.restart(leader)
    assert leader in sim.agree(20).members


def test_most_go_on_in_a_cut_and_the_others_branch_and_merge() -> None:
    sim = Sim(8, 1, RULES)
    sim.agree(20)
    small, large = {name(i) for i in range(3)}, {name(i) for i in range(3, 8)}
    sim.cut(small, large)
    sim.run(60)
    kinds = {me: [r.kind for r in p.chain.past(p.chain.head.hash)][:-2] for me, p in sim.peers.items()}
    assert "branch" in kinds[name(0)]
    assert "branch" not in kinds[name(7)]
    assert all(sim.peers[me].chain.head.round > 8 for me in sim.peers)
    sim.heal()
    head = sim.agree(25)
    assert any(r.kind == "merge" for r in sim.peers[name(0)].chain.past(head.hash))


def test_by_the_other_policy_the_smaller_half_waits() -> None:
    sim = Sim(8, 2, replace(RULES, branches=False))
    sim.agree(20)
    small, large = {name(i) for i in range(3)}, {name(i) for i in range(3, 8)}
    sim.cut(small, large)
    sim.run(10)
    waits = sim.peers[name(0)].chain.head.round
    sim.run(60)
    assert sim.peers[name(0)].chain.head.round == waits
    assert sim.peers[name(0)].decider.mode == "wait"
    assert sim.peers[name(7)].chain.head.round > waits + 10
    sim.heal()
    head = sim.agree(25)
    assert not any(r.kind == "merge" for r in sim.peers[name(0)].chain.past(head.hash))


@pytest.mark.parametrize("branches", [True, False])
@pytest.mark.parametrize("seed", range(12))
def test_whatever_happens_no_head_has_two_rounds_and_all_agree_in_the_end(seed: int, branches: bool) -> None:
    sim = Sim(6, seed, replace(RULES, branches=branches))
    everybody = set(sim.disks)
    sim.loss = 0.05
    for _ in range(12):
        what = sim.rng.random()
        some = set(sim.rng.sample(sorted(everybody), sim.rng.randrange(1, 4)))
        if what < 0.3:
            for me in some:
                sim.kill(me)
        elif what < 0.6:
            for me in everybody:
                sim.restart(me)
        elif what < 0.85:
            third = set(sim.rng.sample(sorted(everybody - some), 1)) if sim.rng.random() < 0.3 else set()
            sim.cut(some, everybody - some - third, third)
        else:
            sim.heal()
        sim.run(sim.rng.uniform(0.5, 25))
    sim.heal()
    for me in everybody:
        sim.restart(me)
    sim.loss = 0.0
    head = sim.agree(120)
    past = {record.hash for record in next(iter(sim.peers.values())).chain.past(head.hash)}
    # What has counted anywhere is in everybody's past: nothing that was decided is lost.
    assert sim.decided <= past


def test_a_record_that_too_few_have_signed_does_not_count() -> None:
    sim = Sim(4, 3, RULES)
    head = sim.agree(20)
    peer = sim.peers[name(0)]
    forged = Record("round", head.round + 1, (head.hash,), head.members, by=name(0))
    text_of = {me: other.sign for me, other in sim.peers.items()}
    text = ack_text(SWARM, forged.hash, 0)
    one = Certified(forged, 0, {name(0): text_of[name(0)](text), name(1): "no signature"})
    with pytest.raises(BadRecord, match="too few"):
        peer.chain.add(one)
