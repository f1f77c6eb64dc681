"""The node of a peer: everything that has to do with other peers. It never imports torch, and computes nothing.

One asyncio loop. A pulse a second tells the others where this peer stands; from their pulses it learns who is there and
whose history has something that is not known here. `decide` agrees with them on the next record, `work` tells the
trainer about it, `parts` and `blobs` move the files.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import random
import time
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

from shoal.errors import DONE, ShoalError, Stopped, TransientError
from shoal.fleet.net.api import Endpoint, LinkState, Message, PeerId, Refused, Unreachable
from shoal.fleet.net.identity import Identity, verify
from shoal.fleet.swarm import offer
from shoal.fleet.swarm.blobs import Blobs
from shoal.fleet.swarm.chain import Chain
from shoal.fleet.swarm.decide import Decider, Heard, Out, Rules
from shoal.fleet.swarm.ledger import may_use
from shoal.fleet.swarm.parts import Parts
from shoal.fleet.swarm.ranges import count
from shoal.fleet.swarm.record import BadRecord, Certified, Kind, Part, Record, ack_text
from shoal.fleet.swarm.snapshots import Snapshot, Snapshots
from shoal.fleet.swarm.trainer_link import Said, Trainer
from shoal.fleet.swarm.work import Work
from shoal.spec.duration import seconds
from shoal.spec.run import Run

TICK_S, PULSE_S = 0.2, 1.0
MOST_BODY = 32 << 20  # of a message about the history
RECORDS = 100  # of the history, in one answer
LEAVE_S = 10.0  # for the others to take note that we go
LINGER_S = 10.0  # after the end, for those who are still behind
FORGET_S = 600.0  # a peer that was lost: its samples go to others
SCORED = 2  # parts of others that a peer tries each round
QUICK_DEATH_S = 60.0


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
        blobs: Blobs | None = None,
        pinned: frozenset[str] = frozenset(),
    ) -> None:
        """`trainer`: its command; None: this peer helps others and computes nothing. `pinned`: blobs that are not of
        the history, and stay."""
        self.me, self.folder, self.run_spec = identity.id, folder, run
        self._identity, self._endpoint, self._event = identity, endpoint, event
        self._admitted, self.name_of, self._pinned = admitted, name_of, pinned
        spec = run.swarm
        self.total, self.batch = run.train.steps * run.train.batch, max(1, run.train.batch // spec.peers)
        self.round_s = seconds(spec.round)
        self.deadline_s = self.round_s / 2 if spec.deadline == "auto" else seconds(spec.deadline)
        self._quorum, self._overlap, self._robust = spec.quorum, spec.overlap, spec.robust
        silent_s = seconds(spec.silent)
        folder.mkdir(parents=True, exist_ok=True)
        self.chain = Chain(swarm, Record("start", 0, (), ()), verified, folder / "chain.jsonl")
        self.blobs = blobs or Blobs(folder / "blobs", endpoint, event)
        self.parts = Parts(self.blobs, self._sources, event)
        self.snapshots = Snapshots(folder / "snapshots", self.chain)
        rules = Rules(silent_s, 4 * (self.round_s + self.deadline_s) + 20, spec.peers, spec.partition == "merge")
        self._started = time.monotonic()
        self.decider = Decider(self.me, self.chain, rules, self, self._started)
        self._recall()
        self.trainer = None if trainer is None else Trainer(trainer, folder, self._trainer_said, self._trainer_gone)
        self.work = Work(
            self.me,
            self.chain,
            self.blobs,
            self.parts,
            self.snapshots,
            self._say_to_trainer,
            overlap=spec.overlap,
            save_every=spec.snapshot_every,
            seed=run.seed,
        )
        self.ended, self.ended_at = self.chain.head.round, self._started  # the newest round whose time is over
        self._began = self._started  # of the round that is being trained
        self.leaving = False
        self._end = asyncio.Event()
        self._failure: ShoalError | None = None
        self._scores: dict[PeerId, float] = {}
        self._asking: set[PeerId] = set()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._deaths: list[float] = []
        self._basing = False
        self.exchange_s: float | None = None  # of the newest round: from its end until it counted
        self.others: dict[PeerId, dict[str, Any]] = {}  # what peers say of themselves
        self._last_pulse = 0.0
        for kind, handler in (
            ("pulse", self._on_pulse),
            ("query", self._on_query),
            ("promise", self._on_promise),
            ("propose", self._on_propose),
            ("ack", self._on_ack),
            ("commit", self._on_commit),
            ("chain", self._on_chain),
            ("part", self._on_part),
            ("snapshots", self._on_snapshots),
        ):
            endpoint.on(kind, self._guarded(handler), most_body=MOST_BODY)

    # Life.

    async def run(self) -> int:
        """Exit code 0: all samples are used. Raises Stopped when it has left before."""
        if self.trainer is not None:
            await self.trainer.start()
        ticking = asyncio.create_task(self._tick_for_ever())
        try:
            await self._end.wait()
            if self._failure is not None:
                raise self._failure
            if self.leaving and not self.finished:
                await self._leave()
                raise Stopped("this peer has left the swarm; the others go on, and `shoal swarm join` comes back.")
            await self._finish()
            return DONE
        finally:
            ticking.cancel()
            for task in self._tasks:
                task.cancel()
            if self.trainer is not None:
                await self.trainer.stop() if self._failure is None else await self.trainer.close()
            await self.parts.close()

    def leave(self) -> None:
        """Soon, and with a word to the others."""
        self.leaving = True
        self._end.set()

    def fail(self, error: ShoalError) -> None:
        """Ends with this."""
        self._failure = self._failure or error
        self._end.set()

    def links(self) -> dict[PeerId, LinkState]:
        return self._endpoint.links()

    @property
    def finished(self) -> bool:
        """Less is left than a step needs."""
        return self.total - self.chain.head.ledger.done < self.batch and self.chain.head.round > 0

    async def _leave(self) -> None:
        self._pulse(force=True)
        until = time.monotonic() + LEAVE_S
        while time.monotonic() < until and self.me in self.chain.head.members and len(self.chain.head.members) > 1:
            await asyncio.sleep(TICK_S)

    async def _finish(self) -> None:
        """The others may need what we have until they are at the end too."""
        until = time.monotonic() + LINGER_S
        while time.monotonic() < until:
            now, head = time.monotonic(), self.chain.head.hash
            here = self.decider.here(now) - {self.me}
            if self.work.applied == head and all(self.decider.heard[p].head == head for p in here):
                break
            await asyncio.sleep(TICK_S)
        await asyncio.sleep(2 * PULSE_S)  # so that all have heard where we stand

    async def _tick_for_ever(self) -> None:
        while True:
            try:
                self._tick(time.monotonic())
            except Exception as e:  # a defect: better to end than to go on half-dead
                self.fail(e if isinstance(e, ShoalError) else TransientError(f"the node failed: {e!r}"))
                raise
            await asyncio.sleep(TICK_S)

    def _tick(self, now: float) -> None:
        self._send(self.decider.tick(now))
        self._keep_time(now)
        self.work.follow()
        if self.trainer is not None and self.work.ready and self.work.told is None and not self._basing:
            self._basing = True
            self._spawn(self._find_base())
        self.work.steer(self.computing, self.me in self.chain.head.members and not self.leaving)
        if now - self._last_pulse >= PULSE_S:
            self._pulse()
        if self.finished and self.work.applied in (self.chain.head.hash, None):
            self._end.set()

    # Rounds.

    @property
    def computing(self) -> int:
        """The round that is being trained."""
        return max(self.ended, self.chain.head.round) + 1

    @property
    def leads(self) -> bool:
        now = time.monotonic()
        if self.decider.mode == "branch":
            return self.decider.first_of_branch(now) == self.me
        return self.decider.mode == "lead"

    def _keep_time(self, now: float) -> None:
        """The first member says when a round is over: by time, and never before the one before it counts."""
        head = self.chain.head
        if not self.leads or self.ended > head.round or self.me not in head.members:
            return
        number = head.round + 1
        said = self.parts.of(number)
        training = [p for p in head.members if p == self.me or self.others.get(p, {}).get("begun", 0) >= number]
        all_in = bool(training) and all(p in said for p in training)
        if now - self._began >= self.round_s or all_in:
            self._over(number, now)

    def _over(self, number: int, now: float) -> None:
        if number > self.ended:
            self.ended, self.ended_at, self._began = number, now, now
            self._pulse(force=True)
            self.work.steer(self.computing, self.me in self.chain.head.members and not self.leaving)

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
        leaving = [p for p, h in self.decider.heard.items() if h.leaving]
        return offer.next_record(
            head,
            kind,
            members,
            took,
            leaving=leaving,
            forgotten=self._forgotten(now),
            total=self.total,
            batch=self.batch,
            state=self.work.digests.get(head.hash),
            by=self.me,
            now=time.time(),
        )

    def _good(self, parts: list[Part], head: Record) -> list[Part]:
        return [p for p in parts if p.peer in head.members and may_use(head.ledger, p.peer, p.used)]

    def _time_to_decide(self, number: int, took: list[Part], now: float) -> bool:
        head, waited = self.chain.head, now - self.ended_at
        here = self.decider.here(now)
        have = {part.peer for part in took}
        expected = [p for p in head.members if p in here and self._begun(p) >= number]
        if expected and all(p in have for p in expected):
            return True
        if waited < self.deadline_s:
            return False
        enough = len(took) >= math.ceil(self._quorum * len(head.members))
        return enough or (bool(took) and waited > 2 * self.deadline_s) or waited > 4 * self.deadline_s

    def _begun(self, peer: PeerId) -> int:
        return self.work.begun if peer == self.me else int(self.others.get(peer, {}).get("begun", 0))

    def _forgotten(self, now: float) -> list[PeerId]:
        """Lost peers that nobody waits for any more; where all other samples are used up, sooner."""
        ledger = self.chain.head.ledger
        left = count(ledger.free) + max(0, self.total - ledger.cursor)
        patience = FORGET_S if left else 2 * self.round_s + 30
        heard = self.decider.heard
        return [p for p in ledger.away if now - (heard[p].at if p in heard else self._started) > patience]

    def objection(self, record: Record) -> str | None:
        return offer.objection(
            record,
            self.chain,
            total=self.total,
            admitted=self._admitted,
            signed=self._signed,
            most_bytes=self._most_bytes,
            state=self.work.digests.get(record.parent),
        )

    @property
    def _most_bytes(self) -> int:
        """Of a part: no codec needs more than the numbers themselves."""
        params = int(self.work.status.get("params", 0)) or (1 << 40)
        return 4 * params + (1 << 20)

    def _signed(self, part: Part) -> bool:
        return verified(part.peer, part.signed(self.chain.swarm), part.signature)

    def complete(self, record: Record) -> bool:
        took = list(record.took)
        if record.kind == "merge":
            before = self.chain.common(*record.parents).round
            took += [p for x in record.parents for r in self.chain.past(x) if r.round > before for p in r.took]
        return self.parts.fetch(took, [record.by, *record.members], urgent=True)

    def sign(self, text: bytes) -> str:
        return self._identity.sign(text).hex()

    def remember(self, term: int, acked: tuple[int, Record] | None) -> None:
        said = {"head": self.chain.head.hash, "term": term}
        if acked is not None:
            said |= {"acked": {"term": acked[0], "record": acked[1].body()}}
        _write(self.folder / "agreed.json", said)

    def _recall(self) -> None:
        """What this peer has agreed to in an earlier life."""
        with contextlib.suppress(OSError, ValueError, KeyError):
            said = json.loads((self.folder / "agreed.json").read_bytes())
            if said["head"] == self.chain.head.hash:
                self.decider.term = int(said["term"])
                if "acked" in said:
                    self.decider.acked = (int(said["acked"]["term"]), Record.of(said["acked"]["record"]))

    def committed(self, new: Certified) -> None:
        record, now = new.record, time.monotonic()
        if record.round > self.ended:
            self.ended, self._began = record.round, now
        self.exchange_s = now - self.ended_at
        self._event(
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
        self._pulse(force=True)
        self._tidy()

    def _tidy(self) -> None:
        """What nobody can need any more goes."""
        if self.work.applied is None:
            return
        oldest = self.snapshots.prune(self.chain.get(self.work.applied))
        keep = {s.blob for s in self.snapshots.all}
        keep |= {part.blob for r in self.chain.known() if r.round >= oldest for part in r.took}
        keep |= {part.blob for n in range(self.chain.head.round + 8) for part in self.parts.of(n).values()}
        self.blobs.retain(keep | self._pinned)

    # The trainer.

    def _say_to_trainer(self, message: Said) -> None:
        if self.trainer is not None:
            self.trainer.say(message)

    def _trainer_said(self, said: Said) -> None:
        match said.get("kind"):
            case "ready":
                self.work.ready = True
                self.work.status["params"] = int(said["params"])
            case "part":
                self._spawn(self._hand_in(said))
            case "applied":
                self.work.has_applied(said)
                self._score_some()
            case "loaded":
                self.work.has_loaded(said)
            case "saved":
                self._spawn(self._saved(said))
            case "scored":
                self._scores = {str(p): float(x) for p, x in said["scores"].items()}
            case "status":
                self.work.has_status({"params": self.work.status.get("params", 0), **said})
            case "failed":
                self._event("trainer-failed", why=str(said.get("why"))[:500])

    def _trainer_gone(self, code: int) -> None:
        """It is started again, unless it cannot work or dies at once again and again."""
        if self._end.is_set():
            return
        now = time.monotonic()
        self._event("trainer-gone", code=code)
        self.work.started_anew()
        self._deaths = [at for at in self._deaths if now - at < QUICK_DEATH_S] + [now]
        if code in (2, 78) or len(self._deaths) > self.run_spec.guard.restarts:
            error = ShoalError(f"the trainer of this peer has ended with exit code {code}; its last words are above.")
            error.exit_code = code if code > 0 else error.exit_code
            self.fail(error)
        elif self.trainer is not None:
            self._spawn(self._restart(min(30.0, 2.0 ** len(self._deaths))))

    async def _restart(self, after_s: float) -> None:
        await asyncio.sleep(after_s)
        assert self.trainer is not None
        await self.trainer.start()

    async def _hand_in(self, said: Said) -> None:
        blob, size = await self.blobs.add(Path(said["path"]))
        number, used = self.work.has_part(said)
        if number <= self.chain.head.round:
            return
        scores, self._scores = self._scores, {}
        loss = said.get("loss")
        part = Part(
            self.me,
            number,
            blob,
            size,
            int(said["tokens"]),
            int(said["steps"]),
            used,
            None if loss is None else float(loss),
            float(said.get("seconds", 0.0)),
            scores,
        )
        part = Part(**{**part.__dict__, "signature": self.sign(part.signed(self.chain.swarm))})
        self.parts.announced(part, self.chain.head.round, time.monotonic())
        body = json.dumps(part.body()).encode()
        for peer in self.chain.head.members:
            if peer != self.me:
                self._endpoint.tell(peer, Message("part", {}, body))

    async def _saved(self, said: Said) -> None:
        found = self.work.has_saved(said)
        if found is None:
            return
        record, path, digest = found
        place = self.snapshots.place(record)
        if path != place:
            if place.exists():
                return
            path.rename(place)
        blob, size = await self.blobs.add(place)
        self.snapshots.add(Snapshot(record.hash, record.round, blob, size, digest))
        self._tidy()

    def _score_some(self) -> None:
        """A few parts of the newest record, each peer others, tried on data of one's own."""
        record = self.chain.head
        others = [part for part in record.took if part.peer != self.me]
        if not self._robust or len(record.took) < 3 or self.work.applied != record.hash:
            return
        chosen = random.Random(f"{self.me} {record.hash}").sample(others, min(SCORED, len(others)))
        paths = {part.peer: str(path) for part in chosen if (path := self.blobs.path(part.blob)) is not None}
        if paths:
            self._say_to_trainer({"kind": "score", "round": record.round, "parts": paths})

    async def _find_base(self) -> None:
        """A state to begin with: our own newest one, or one of others that is much newer."""
        try:
            head = self.chain.head.hash
            own = self.snapshots.before(head)
            best, sources = own, list[PeerId]()
            for peer in self._linked():
                with contextlib.suppress(Unreachable, Refused, ValueError):
                    answer = await self._endpoint.ask(peer, Message("snapshots"), 5.0, MOST_BODY)
                    for found in map(Snapshot.of, json.loads(bytes(answer.body))):
                        if found is None or not self.chain.is_ancestor(found.hash, self.chain.head.hash):
                            continue
                        if best is None or found.round > best.round + (3 if best is own else 0):
                            best, sources = found, [peer]
                        elif found == best and best is not own:
                            sources.append(peer)
            if best is not None and best is not own:
                await self.blobs.fetch_folder(best.blob, best.size, sources, self.snapshots.path(best))
                self.snapshots.add(best)
            if self.work.ready and self.work.told is None:
                self.work.begin_from(best)
                self._event("base", round=0 if best is None else best.round, sources=len(sources))
        except (OSError, ValueError, ShoalError) as e:
            self._event("base-failed", why=str(e)[:200])
            await asyncio.sleep(1.0)
        finally:
            self._basing = False

    # Talking to peers.

    def _linked(self) -> list[PeerId]:
        return [peer for peer, link in self._endpoint.links().items() if link.way is not None]

    def _sources(self, owner: PeerId) -> list[PeerId]:
        """From whom to fetch a part. Whoever has it answers; the owner always does."""
        return [owner, *(p for p in self.chain.head.members if p not in (owner, self.me))]

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _send(self, outs: list[Out]) -> None:
        for out in outs:
            self._endpoint.tell(out.to, Message(out.kind, {}, json.dumps(out.fields).encode()))

    def _pulse(self, force: bool = False) -> None:
        self._last_pulse = time.monotonic()
        head, work = self.chain.head, self.work
        stands = work.applied is not None and self.chain.get(work.applied).round >= head.round - 1
        said = {
            "head": head.hash,
            "round": head.round,
            "ended": self.ended if self.leads else 0,
            "begun": work.begun,
            "wants": self.trainer is not None and stands and not self.leaving and not self.finished,
            "leaving": self.leaving,
            "digest": work.digests.get(head.hash),
            "status": {k: work.status.get(k) for k in ("step", "loss", "tokens_per_s", "busy")},
        }
        body = json.dumps(said).encode()
        for peer in self._linked():
            self._endpoint.tell(peer, Message("pulse", {}, body))

    def _guarded(
        self, handler: Callable[[PeerId, Any], Awaitable[Message | None]]
    ) -> Callable[[PeerId, Message], Awaitable[Message | None]]:
        """Whatever a peer sends: it is understood, or refused and journaled."""

        async def handle(peer: PeerId, message: Message) -> Message | None:
            try:
                said = json.loads(bytes(message.body)) if message.body else {}
                return await handler(peer, said)
            except (ValueError, KeyError, TypeError, RecursionError, AttributeError) as e:
                self._event("refused", peer=peer, message=message.kind, why=str(e)[:200])
                raise Refused(f"{message.kind}: {e}"[:200]) from None

        return handle

    async def _on_pulse(self, peer: PeerId, said: Any) -> None:
        now = time.monotonic()
        head = str(said["head"])
        self.others[peer] = {
            "begun": int(said["begun"]),
            "head": head,
            "round": int(said["round"]),
            "status": said["status"] if isinstance(said.get("status"), dict) else {},
        }
        news = self.decider.hear(peer, Heard(now, head, said["wants"] is True, said["leaving"] is True))
        ended = int(said["ended"])
        same = head == self.chain.head.hash and ended == self.chain.head.round + 1
        if same and peer == self._first(now):
            self._over(ended, now)
        if news and peer not in self._asking:
            self._asking.add(peer)
            self._spawn(self._ask_chain(peer))

    def _first(self, now: float) -> PeerId | None:
        if self.decider.mode == "branch":
            return self.decider.first_of_branch(now)
        return self.decider.leader()

    async def _ask_chain(self, peer: PeerId) -> None:
        """Until all of its history is known here."""
        try:
            while True:
                body = json.dumps({"locator": self.chain.locator()}).encode()
                answer = await self._endpoint.ask(peer, Message("chain", {}, body), 10.0, MOST_BODY)
                said = json.loads(bytes(answer.body))
                new = [Certified.of(one) for one in said["records"]]
                head, before = str(said["head"]), len(self.chain)
                self.decider.learn(peer, head, new, time.monotonic())
                if head in self.chain or len(self.chain) == before:
                    return
        except (Unreachable, Refused):
            pass
        except (ValueError, KeyError, TypeError, RecursionError) as e:
            self._event("refused", peer=peer, message="chain", why=str(e)[:200])
        finally:
            self._asking.discard(peer)

    async def _on_chain(self, peer: PeerId, said: Any) -> Message:
        locator = [str(name) for name in said["locator"]][:200]
        found = [one.body() for one in self.chain.since(locator, RECORDS)]
        body = json.dumps({"records": found, "head": self.chain.head.hash}).encode()
        return Message("chain", {}, body)

    async def _on_query(self, peer: PeerId, said: Any) -> None:
        self._send(self.decider.query(peer, str(said["head"]), int(said["term"]), time.monotonic()))

    async def _on_promise(self, peer: PeerId, said: Any) -> None:
        acked = said["acked"]
        found = None if acked is None else (int(acked["term"]), Record.of(acked["record"]))
        self._send(self.decider.promise(peer, str(said["head"]), int(said["term"]), found))

    async def _on_propose(self, peer: PeerId, said: Any) -> None:
        record = Record.of(said["record"])
        if record.by not in (peer, *self.chain.head.members):
            raise BadRecord("a proposal of somebody else's record")
        self._send(self.decider.proposed(peer, int(said["term"]), record, time.monotonic()))

    async def _on_ack(self, peer: PeerId, said: Any) -> None:
        name, term, signature = str(said["hash"]), int(said["term"]), str(said["signature"])
        if not verified(peer, ack_text(self.chain.swarm, name, term), signature):
            raise BadRecord("a signature that is wrong")
        self._send(self.decider.agreed(peer, name, term, signature, time.monotonic()))

    async def _on_commit(self, peer: PeerId, said: Any) -> None:
        new = Certified.of(said)
        if all(parent in self.chain for parent in new.record.parents):
            self.decider.learn(peer, new.record.hash, [new], time.monotonic())

    async def _on_part(self, peer: PeerId, said: Any) -> None:
        part = Part.of(said)
        if part.peer != peer or not self._signed(part):
            raise BadRecord("a part that its peer has not signed")
        if part.size > self._most_bytes:
            raise BadRecord(f"a part of {part.size} bytes")
        if self.parts.announced(part, self.chain.head.round, time.monotonic()):
            self.parts.fetch([part])

    async def _on_snapshots(self, peer: PeerId, said: Any) -> Message:
        return Message("snapshots", {}, json.dumps([s.__dict__ for s in self.snapshots.all]).encode())


def verified(peer: PeerId, text: bytes, signature: str) -> bool:
    try:
        return verify(peer, text, bytes.fromhex(signature))
    except ValueError:
        return False


def _write(path: Path, said: Any) -> None:
    new = path.with_suffix(".new")
    new.write_text(json.dumps(said))
    new.replace(path)
