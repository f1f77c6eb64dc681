"""A swarm in simulated time: only its agreement, over messages that are late, lost or made up."""

from __future__ import annotations

import hashlib
import heapq
import itertools
import json
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

from shoal.swarm.agreement import Decider
from shoal.swarm.chain import Chain
from shoal.swarm.messages import read
from shoal.swarm.round_record import Certified, Kind, Record, ack_text
from shoal.swarm.terms import Agreed
from shoal.swarm.world import Heard, Out, Rules
from shoal.values import BadValue

SWARM = "f" * 64
START = Record("start", 0, (), ())
ROUND_S = 3.0
TICK_S = 0.5
STRAY_S = 30.0
PUT_OUT = "somebody in it was put out"  # which whoever proposes it may not have heard yet
RULES = Rules(silent_s=3.0, stuck_s=20.0, peers=4)


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
        self.out: set[str] = disk.setdefault("out", set())  # who was put out, as far as it has heard

    def offer(self, kind: Kind, members: tuple[str, ...], other: str | None, now: float) -> Record | None:
        head = self.chain.head
        if kind == "round" and now - self.began < ROUND_S:
            return None
        members = tuple(p for p in members if p not in self.out)
        parents = (head.hash,) if other is None else (head.hash, other)
        top = max(self.chain.get(parent).round for parent in parents)
        return Record(kind, top + 1, parents, members, time=now, by=self.me)

    def objection(self, record: Record, again: bool) -> str | None:
        """As a node does it."""
        before = self.chain.get(record.parent).members if again else ()
        return PUT_OUT if self.out & set(record.members) - set(before) else None

    def admitted(self, peer: str) -> bool:
        return peer not in self.out

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
        self.sim.count(new, self.me)


class Sim:
    def __init__(self, peers: int, seed: int, rules: Rules, liars: frozenset[str] = frozenset()) -> None:
        """`liars`: their messages are read as a stranger's are, and two rounds may follow one head because of them."""
        self.liars, self.refused = liars, Counter[str]()
        self.tapes: dict[str, list[tuple[str, dict[str, Any]]]] = {liar: [] for liar in liars}  # what they were sent
        self.on_tick: list[Callable[[], None]] = []
        self.rng, self.rules, self.now = random.Random(seed), rules, 0.0
        self._queue: list[tuple[float, int, Any]] = []
        self._number, self._ticks = itertools.count(), 0
        self.disks: dict[str, dict[str, Any]] = {}
        self.peers: dict[str, Peer] = {}
        self._phases: dict[str, float] = {}
        self.side: dict[str, int] = {}
        self.loss = 0.0
        self.losses: dict[tuple[str, str], float] = {}  # of messages from one to another; 1.0: it hears nothing
        self.stray = 0.0  # the share of messages that come very late
        self.every: dict[str, int] = {}  # a slow peer ticks only each so many times
        self.asleep: dict[str, float] = {}  # until when: it neither ticks nor reads, and what was said to it waits
        self.leaving: set[str] = set()
        self.gone: set[str] = set()  # put out
        self.children: dict[str, set[str]] = {}  # of a head, the records of kind round that count
        self._decided: dict[str, tuple[Record, set[str]]] = {}  # what counts, and who knows it
        for i in range(peers):
            self.add(name(i))

    def add(self, me: str) -> None:
        self.disks[me] = {}
        self.peers[me] = Peer(self, me, self.disks[me])
        self._phases[me] = self.rng.uniform(0, TICK_S)
        self.side[me] = 0

    @property
    def decided(self) -> set[str]:
        """What is in the history of a member of it. What only one knew that was put out went with it; and so did a
        branch that has no other members any more: nobody can speak for it."""
        known = {name: record for name, (record, by) in self._decided.items() if by - self.gone}
        later = {parent for record in known.values() for parent in record.parents}
        lives = [name for name, record in known.items() if name not in later and set(record.members) - self.gone]
        owed: set[str] = set()
        while lives:
            if (one := lives.pop()) in known and one not in owed:
                owed.add(one)
                lives += known[one].parents
        return {name for name in owed if self._decided[name][1].intersection(known[name].members) - self.gone}

    def count(self, new: Certified, by: str) -> None:
        self._decided.setdefault(new.record.hash, (new.record, set()))[1].add(by)
        if new.record.kind == "round":
            self.children.setdefault(new.record.parent, set()).add(new.record.hash)
            assert self.liars or len(self.children[new.record.parent]) == 1, "two rounds follow one head"

    def run(self, seconds: float) -> None:
        """Each peer ticks twice a second, at moments of its own: between two ticks the words of the first are heard."""
        until, at = self.now + seconds, self.now
        while at < until:
            for me, phase in sorted(self._phases.items(), key=lambda one: one[1]):
                self._pass(min(at + phase, until))
                if me in self.peers and not self._sleeps(me) and self._ticks % self.every.get(me, 1) == 0:
                    self._tick(self.peers[me])
            for lie in self.on_tick:
                lie()
            at += TICK_S
            self._ticks += 1
        self._pass(until)

    def _sleeps(self, me: str) -> bool:
        return self.now < self.asleep.get(me, 0.0)

    def _pass(self, until: float) -> None:
        while self._queue and self._queue[0][0] <= until:
            self.now, number, message = heapq.heappop(self._queue)
            frm, to, kind, fields = message
            if to not in self.peers or self.side[frm] != self.side[to]:
                continue
            if self._sleeps(to):
                heapq.heappush(self._queue, (self.asleep[to], number, message))
                continue
            try:
                self._deliver(frm, to, kind, fields)
            except BadValue as e:  # as `talk` does; whatever else is raised is a defect
                if frm not in self.liars and str(e) != PUT_OUT:
                    raise
                self.refused[frm] += 1
        self.now = until

    def _tick(self, peer: Peer) -> None:
        peer.decider.leaving = leaving = peer.me in self.leaving
        head = peer.chain.head
        if leaving and head.members and (peer.me not in head.members or head.members == (peer.me,)):
            self.kill(peer.me)
            return
        heard = {"head": head.hash, "wants": not leaving, "leaving": leaving}
        for other in self.disks:
            if other != peer.me:
                self._send(peer.me, Out(other, "pulse", heard))
        self._out(peer, peer.decider.tick(self.now))

    def _send(self, frm: str, out: Out) -> None:
        if self.rng.random() < max(self.loss, self.losses.get((frm, out.to), 0.0)):
            return
        late = self.rng.expovariate(1 / 0.1)
        if self.stray and self.rng.random() < self.stray:
            late += self.rng.uniform(1.0, STRAY_S)
        heapq.heappush(self._queue, (self.now + late, next(self._number), (frm, out.to, out.kind, out.fields)))

    def _out(self, peer: Peer, outs: list[Out]) -> None:
        for out in outs:
            self._send(peer.me, out)

    def _deliver(self, frm: str, to: str, kind: str, said: dict[str, Any]) -> None:
        peer, d = self.peers[to], self.peers[to].decider
        if frm in peer.out:
            return
        if to in self.liars and kind not in ("pulse", "chain"):
            self.tapes[to] = [*self.tapes[to][-200:], (kind, said)]
        if kind == "pulse" and "status" in said:
            said = read(kind, json.dumps(said).encode()).__dict__
        if kind == "out":
            peer.out.add(said["peer"])
            d.put_out(said["peer"])
        elif kind == "pulse":
            if d.hear(frm, Heard(self.now, said["head"], said["wants"], said["leaving"])) and frm in self.peers:
                self._send(to, Out(frm, "ask", {"locator": peer.chain.locator(), "asker": peer}))
        elif kind == "ask":
            wanted = read("chain", json.dumps({"locator": said["locator"]}).encode())
            found = peer.chain.since(wanted.locator, 1000)
            self._send(to, Out(frm, "chain", {**said, "records": found, "head": peer.chain.head.hash}))
        elif kind == "chain":
            if said["asker"] is peer:  # an answer to an earlier life reaches nobody
                d.learn(frm, said["head"], said["records"], self.now)
        else:
            self._read(frm, peer, kind, read(kind, json.dumps(said).encode()))

    def _read(self, frm: str, peer: Peer, kind: str, said: Any) -> None:
        """As `talk` does it."""
        d = peer.decider
        match kind:
            case "vote":
                self._out(peer, d.vote(frm, said, self.now))
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
        if me in self.gone:
            return
        self.disks[me].setdefault("out", set()).update(self.gone)
        self.peers.setdefault(me, Peer(self, me, self.disks[me]))

    def put_out(self, me: str) -> None:
        """By a proof: the word of it is soon with all that can be reached, and whoever restarts hears it too."""
        self.kill(me)
        self.gone.add(me)
        for other in self.disks:
            late = self.now + self.rng.uniform(0, 3)
            heapq.heappush(self._queue, (late, next(self._number), (other, other, "out", {"peer": me})))

    def cut(self, *sides: set[str]) -> None:
        for i, side in enumerate(sides):
            self.side.update(dict.fromkeys(side, i))

    def heal(self) -> None:
        self.side = dict.fromkeys(self.disks, 0)
        self.losses.clear()
        self.asleep.clear()
        self.every.clear()

    @property
    def honest(self) -> dict[str, Peer]:
        return {me: peer for me, peer in self.peers.items() if me not in self.liars}

    def heads(self) -> set[str]:
        return {peer.chain.head.hash for peer in self.honest.values()}

    def agree(self, within_s: float) -> Record:
        """All have one head and all are its members, at some moment soon."""
        for _ in range(int(within_s * 2)):
            self.run(0.5)
            heads = self.heads()
            if len(heads) == 1:
                head = next(iter(self.honest.values())).chain.head
                if set(self.honest) <= set(head.members) <= set(self.peers):
                    return head
        raise AssertionError(
            f"no agreement: {[(p.me[-1], p.chain.head.round, p.decider.mode) for p in self.peers.values()]}"
        )
