"""The node of a peer: everything that has to do with other peers. It never imports torch, and computes nothing.

One asyncio loop. A pulse a second tells the others where this peer stands (`talk`); from their pulses it learns who is
there and whose history has something that is not known here. `decide` agrees with them on the next record, `training`
tells the trainer about it, `parts` and `blobs` move the files, `router` says from whom.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from shoal.errors import DONE, ShoalError, Stopped, TransientError
from shoal.net.answers import Answers
from shoal.net.api import Endpoint, LinkState, PeerId
from shoal.net.identity import Identity
from shoal.net.tasks import Tasks, words
from shoal.spec.duration import seconds
from shoal.spec.run import Run
from shoal.spec.shape import shape_of
from shoal.swarm import agreed_file, offer
from shoal.swarm.agreement import Decider
from shoal.swarm.announced_parts import Parts
from shoal.swarm.blob_fetch import KIND as BLOB
from shoal.swarm.blobs import Blobs
from shoal.swarm.chain import Chain
from shoal.swarm.digests import Digests
from shoal.swarm.lies import Lie, Proposals
from shoal.swarm.messages import Proposed
from shoal.swarm.ranges import count
from shoal.swarm.round_record import Certified, Kind, Part, Record, verified
from shoal.swarm.route_keeper import Router
from shoal.swarm.sample_ledger import may_use
from shoal.swarm.snapshots import Snapshots
from shoal.swarm.talk import PULSE_S, Talk
from shoal.swarm.terms import Agreed
from shoal.swarm.trainer_process import Training
from shoal.swarm.world import Rules

AGREED = "agreed.json"  # what this peer has agreed to, for its next life
CLOCK = "the clock"
TICK_S = 0.2
LEAVE_S = 60.0  # for the last part to count, and the others to take note that we go
LINGER_S = 10.0  # after the end, for those who are still behind
MOST_WORDS = 1 << 24  # of a vocabulary that only the data knows
FORGET_S = 600.0  # a peer that was lost: its samples go to others


class Node:
    """`run` until the training is done, or it is told to leave."""

    def __init__(
        self,
        folder: Path,
        swarm: str,
        identity: Identity,
        endpoint: Endpoint,
        run: Run,
        trainer: tuple[str, ...] | None,
        *,
        admitted: Callable[[PeerId], bool],
        name_of: Callable[[PeerId], str] = lambda peer: peer[:8],
        event: Callable[..., None] = lambda kind, **fields: None,
        accuse: Callable[[Lie], object] = lambda lie: None,
        blobs: Blobs | None = None,
        answers: Answers | None = None,
        pinned: frozenset[str] = frozenset(),
        starts: Callable[[], Mapping[str, str]] = dict,
    ) -> None:
        """`trainer`: its command; None: this peer helps others and computes nothing. `pinned`: blobs that are not of
        the history, and stay. `starts`: told of each start of the trainer; what goes into its environment.
        `accuse`: told of a proof that a member has lied; from then on it should not be `admitted`."""
        self.me, self.folder, self.run_spec = identity.id, folder, run
        self._identity, self.endpoint, self.event = identity, endpoint, event
        self.admitted, self.name_of, self._pinned, self._accuse = admitted, name_of, pinned, accuse
        self.tasks = Tasks(event, self._broke)
        spec = run.swarm
        self.total, self.batch = run.steps * run.train.batch, max(1, run.train.batch // spec.peers)
        self.round_s = seconds(spec.round)
        share = 0.75 if spec.overlap else 0.5  # of a round; nobody waits for it where the next one runs beside it
        self.deadline_s = self.round_s * share if spec.deadline == "auto" else seconds(spec.deadline)
        self._quorum = spec.quorum
        silent_s = seconds(spec.silent)
        folder.mkdir(parents=True, exist_ok=True)
        self.chain = Chain(swarm, Record("start", 0, (), ()), verified, folder / "chain.jsonl")
        self.answers = answers or Answers(endpoint, event, name_of)
        self.blobs = blobs or Blobs(folder / "blobs", endpoint, event, self.answers)
        self.router = Router(self.me, event)
        self.parts = Parts(self.blobs, self._sources, event, self.router.choice)
        self.snapshots = Snapshots(folder / "snapshots", self.chain)
        self.digests = Digests(self.chain)
        rules = Rules(silent_s, 4 * (self.round_s + self.deadline_s) + 20, spec.peers, spec.partition == "merge")
        self._started = time.monotonic()
        self.decider = Decider(self.me, self.chain, rules, self, self._started)
        self.decider.recall(agreed_file.read(folder / AGREED, self.chain.head.hash))
        self.proposals = Proposals(swarm)
        self._liars: set[PeerId] = set()
        self._lawful, self._unlawful = set[str](), dict[str, str]()  # records of other branches, as checked here
        self._sample_tokens = run.data.seq_len + 1
        self.training = Training(self, trainer, starts)
        self.work = self.training.work
        self.talk = Talk(self)
        self.ended, self.ended_at = self.chain.head.round, self._started  # the newest round whose time is over
        self._began = self._started  # of the round that is being trained
        self.winding_up = self.leaving = self._hurry = False  # told to leave; all is handed in; told so twice
        self._end = asyncio.Event()
        self._failure: ShoalError | None = None
        self.exchange_s: float | None = None  # of the newest round: from its end until it counted

    # Life.

    async def run(self) -> int:
        """Exit code 0: all samples are used. Raises Stopped when it has left before."""
        await self.training.start()
        self.tasks.keep(CLOCK, self._tick_for_ever, borne=0)
        try:
            await self._end.wait()
            if self._failure is not None:
                raise self._failure
            if self.winding_up and not self.finished:
                await self._leave()
                raise Stopped("this peer has left the swarm; the others go on.")
            await self._finish()
            if (split := self.training.doubt.split) is not None:
                raise TransientError(f"the run has ended, and after round {split.round} peers have different weights.")
            return DONE
        finally:
            await self.tasks.end(CLOCK)
            await self.training.stop(now=self._failure is not None)
            await self.tasks.close()
            await self.parts.close()

    def leave(self) -> None:
        """Soon: what is trained is handed in, and the others are told. Said twice: at once."""
        if self.winding_up and not self.leaving:
            self._hurry = True
        elif not self.winding_up:
            self.winding_up = True
            self.event("leaving", round=self.work.begun)
        self._end.set()

    def fail(self, error: ShoalError) -> None:
        """Ends with this."""
        self._failure = self._failure or error
        self._end.set()

    @property
    def ending(self) -> bool:
        return self._end.is_set()

    def _broke(self, what: str, e: Exception) -> None:
        """Better to end than to go on half-dead."""
        said = f"{what} of this peer's node has failed ({words(e)}); start it again, it goes on where it was."
        self.fail(e if isinstance(e, ShoalError) else TransientError(said))

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        self.tasks.spawn(work)

    # Who lies.

    def hear_proposal(self, said: Proposed) -> None:
        if said.by in self.chain.head.members and (lie := self.proposals.hear(said)) is not None:
            self.accuse(lie)

    def accuse(self, lie: Lie) -> None:
        """A proof against somebody, found here: it is named, put out, and the proof is passed on."""
        if lie.by in self._liars or lie.by == self.me:
            return
        self._liars.add(lie.by)
        self.event("liar", peer=lie.by, proof=lie.kind, text=f"{self.name_of(lie.by)} ({lie.by[:8]}) {lie.words()}")
        self._accuse(lie)
        self.put_out([lie.by])

    def put_out(self, peers: Iterable[PeerId]) -> None:
        """They are in the swarm no more, by a proof or by the organiser's word."""
        for peer in peers:
            self.decider.put_out(peer)
            self.talk.forget(peer)

    def links(self) -> dict[PeerId, LinkState]:
        return self.endpoint.links()

    @property
    def finished(self) -> bool:
        """Less is left than a step needs."""
        return self.total - self.chain.head.ledger.done < self.batch and self.chain.head.round > 0

    async def _leave(self) -> None:
        until = time.monotonic() + LEAVE_S
        while not self._hurry and time.monotonic() < until and self.me in self.chain.head.members:
            if len(self.chain.head.members) == 1 and self.leaving:
                break
            self.leaving = self.decider.leaving = self.leaving or not self.work.owes
            await asyncio.sleep(TICK_S)
        self.leaving = True
        self.talk.pulse()

    async def _finish(self) -> None:
        """The others may need what we have until they are at the end too. The last weights are compared as all are."""
        until = time.monotonic() + LINGER_S
        while time.monotonic() < until + LEAVE_S * (self.training.doubt.split is not None):
            now, head = time.monotonic(), self.chain.head.hash
            here = self.decider.here(now) - {self.me}
            there = self.work.applied == head and all(self.decider.heard[p].head == head for p in here)
            if there and self.digests.most(head) is not None:
                break
            await asyncio.sleep(TICK_S)
        await asyncio.sleep(2 * PULSE_S)  # so that all have heard where we stand

    async def _tick_for_ever(self) -> None:
        while True:
            self._tick(time.monotonic())
            await asyncio.sleep(TICK_S)

    def _tick(self, now: float) -> None:
        self.talk.send(self.decider.tick(now))
        self.training.doubt.tick()
        self._keep_time(now)
        self.router.choose(self.chain.head.members, self.endpoint.links(), now)
        self.training.tick()
        self.talk.tick(now)
        if self.finished and self.work.applied in (self.chain.head.hash, None):
            self._end.set()

    # Rounds.

    @property
    def computing(self) -> int:
        """The round that is being trained."""
        return max(self.ended, self.chain.head.round) + 1

    @property
    def leads(self) -> bool:
        return self.decider.mode in ("lead", "branch") and self.first(time.monotonic()) == self.me

    def first(self, now: float) -> PeerId | None:
        """Who says when a round ends, and proposes what counts."""
        return self.decider.first_of_branch(now) if self.decider.mode == "branch" else self.decider.leader()

    def _keep_time(self, now: float) -> None:
        """The first member says when a round is over: by time, and never before the one before it counts."""
        head = self.chain.head
        if not self.leads or self.ended > head.round or self.me not in head.members:
            return
        number = head.round + 1
        said = self.parts.of(number)
        training = [p for p in head.members if p == self.me or self._begun(p) >= number]
        all_in = bool(training) and all(p in said for p in training)
        if now - self._began >= self.round_s or all_in:
            self.over(number, now)

    def over(self, number: int, now: float) -> None:
        if number > self.ended:
            self.ended, self.ended_at, self._began = number, now, now
            self.talk.pulse()
            self.training.steer()

    # What `decide` asks: the World.

    def offer(self, kind: Kind, members: tuple[PeerId, ...], other: str | None, now: float) -> Record | None:
        if other is not None:
            parents = (self.chain.head.hash, other)
            return offer.merge_record(self.chain, parents, members, self.me, time.time(), self.total)
        head = self.chain.head
        number = head.round + 1
        took: list[Part] = []
        if kind == "round":
            took = self._good(self.parts.here(number), head)
            if self.ended < number or not self._time_to_decide(number, took, now):
                return None
        leaving = [p for p, h in self.decider.heard.items() if h.leaving] + [self.me] * self.leaving
        out = [p for p in head.members if not self.admitted(p)]
        members = tuple(p for p in members if p not in out)
        return offer.next_record(
            head,
            kind,
            members,
            took,
            leaving=leaving,
            out=out,
            forgotten=self._forgotten(now),
            total=self.total,
            batch=self.batch,
            round_s=self.round_s,
            state=self.digests.most(head.hash) if kind == "round" else None,
            by=self.me,
            now=time.time(),
        )

    def _good(self, parts: list[Part], head: Record) -> list[Part]:
        return [p for p in parts if p.peer in head.members and may_use(head.ledger, p.peer, p.used)]

    def _time_to_decide(self, number: int, took: list[Part], now: float) -> bool:
        head, waited = self.chain.head, now - self.ended_at
        here = self.decider.here(now)
        have = {part.peer for part in took}
        # Nobody waits for the part of one whose answers make no sense: it is not asked for it now.
        expected = [
            p for p in head.members if p in here and self._begun(p) >= number and not self.answers.rests(p, BLOB)
        ]
        if expected and all(p in have for p in expected):
            return True
        if waited < self.deadline_s:
            return False
        enough = len(took) >= math.ceil(self._quorum * len(head.members))
        return enough or (bool(took) and waited > 2 * self.deadline_s) or waited > 4 * self.deadline_s

    def _begun(self, peer: PeerId) -> int:
        if peer == self.me:
            return self.work.begun
        return self.talk.others[peer].begun if peer in self.talk.others else 0

    def _forgotten(self, now: float) -> list[PeerId]:
        """Lost peers that nobody waits for any more; where all other samples are used up, sooner."""
        ledger = self.chain.head.ledger
        left = count(ledger.free) + max(0, self.total - ledger.cursor)
        patience = FORGET_S if left else 2 * self.round_s + 30
        heard = self.decider.heard
        return [p for p in ledger.away if now - (heard[p].at if p in heard else self._started) > patience]

    def objection(self, record: Record, again: bool) -> str | None:
        members = self.chain.get(record.parent).members if again else ()
        return self._objection(
            record, self.work.digests.get(record.parent), lambda peer: peer in members or self.admitted(peer)
        )

    def _objection(self, record: Record, state: str | None, admitted: Callable[[PeerId], bool]) -> str | None:
        return offer.objection(
            record,
            self.chain,
            total=self.total,
            admitted=admitted,
            signed=self.signed,
            most_bytes=self.most_bytes,
            most_tokens=self._sample_tokens,
            state=state,
        )

    @property
    def most_bytes(self) -> int:
        """Of a part: no codec needs more than the numbers themselves. Until a trainer has said how many there are, as
        many as the model has with the largest vocabulary."""
        params = int(self.work.status.get("params", 0)) or shape_of(self.run_spec.model, MOST_WORDS).params
        return 4 * params + (1 << 20)

    def signed(self, part: Part) -> bool:
        return verified(part.peer, part.signed(self.chain.swarm), part.signature)

    def _sources(self, owner: PeerId) -> list[PeerId]:
        """Who may have a part; the owner always does."""
        return [owner, *(p for p in self.chain.head.members if p not in (owner, self.me))]

    def complete(self, record: Record) -> bool:
        if record.kind == "merge":
            return self._have_both(record.parents, [record.by, *record.members])
        if record.state not in (None, self.work.digests.get(record.parent)):
            return False  # nobody signs for weights that it has not computed itself
        return self.parts.fetch(record.took, [record.by, *record.members], urgent=True)

    def mergeable(self, other: str) -> bool:
        """Also whether all of it is as it should be: who was alone in a branch was checked by nobody."""
        return self._is_lawful(other) and self._have_both((self.chain.head.hash, other), self.chain.get(other).members)

    def _is_lawful(self, other: str) -> bool:
        before = {record.hash for record in self.chain.past(self.chain.common(self.chain.head.hash, other).hash)}
        for record in self.chain.past(other):
            if record.hash in before or record.hash in self._lawful:
                break
            if (why := self._objection(record, None, lambda peer: True)) is not None:
                text = f"a branch of {self.name_of(record.by)} is not merged: {why}"
                if record.hash not in self._unlawful:
                    self._unlawful[record.hash] = why
                    self.event("unlawful", peer=record.by, round=record.round, text=text)
                return False
        self._lawful |= {record.hash for record in self.chain.past(other)} - before
        return True

    def _have_both(self, heads: tuple[str, ...], sources: Sequence[PeerId]) -> bool:
        """All parts of two branches since they parted."""
        before = {record.hash for record in self.chain.past(self.chain.common(*heads).hash)}
        since = {r.hash: r for head in heads for r in self.chain.past(head) if r.hash not in before}
        return self.parts.fetch([part for r in since.values() for part in r.took], sources, urgent=True)

    def sign(self, text: bytes) -> str:
        return self._identity.sign(text).hex()

    def remember(self, agreed: Agreed) -> None:
        agreed_file.write(self.folder / AGREED, self.chain.head.hash, agreed)

    def committed(self, new: Certified) -> None:
        record, now = new.record, time.monotonic()
        self.training.doubt.committed(new)
        if record.round > self.ended:
            self.ended, self._began = record.round, now
        self.exchange_s = now - self.ended_at
        self.event(
            "record",
            round=record.round,
            record=record.kind,
            hash=record.hash[:16],
            members=len(record.members),
            took=[part.peer[:8] for part in record.took],
            left={peer[:8]: why for peer, why in record.left.items()},
            joined=[peer[:8] for peer in record.joined],
            done=record.ledger.done,
            exchange_s=round(self.exchange_s, 3),
            by=record.by[:8],
        )
        self.parts.settle(record)
        self.work.follow()
        self.talk.pulse()
        self.tidy()

    def tidy(self) -> None:
        """What nobody can need any more goes."""
        if self.work.applied is None:
            return
        oldest = self.snapshots.prune(self.chain.get(self.work.applied))
        keep = {s.blob for s in self.snapshots.all}
        keep |= {part.blob for r in self.chain.known() if r.round >= oldest for part in r.took}
        keep |= {part.blob for n in range(self.chain.head.round + 8) for part in self.parts.of(n).values()}
        self.blobs.retain(keep | self._pinned)
