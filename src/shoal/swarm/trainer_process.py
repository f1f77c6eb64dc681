"""A peer's trainer, seen from its node: started, fed, asked, started again when it dies; and where it begins."""

from __future__ import annotations

import asyncio
import random
import shutil
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from shoal.errors import ShoalError, TransientError
from shoal.net.api import PeerId, Refused, Unreachable
from shoal.swarm.assignments import Work
from shoal.swarm.digests import Told
from shoal.swarm.doubt import Doubt
from shoal.swarm.round_record import Part
from shoal.swarm.snapshots import Snapshot, read_offered
from shoal.swarm.trainer_link import Said, Trainer
from shoal.swarm.trainer_words import Applied, Failed, Handed, Loaded, Ready, Saved, Scored, Stands, Word

if TYPE_CHECKING:
    from shoal.swarm.node import Node

SCORED = 2  # parts of others that a peer tries each round
QUICK_DEATH_S = 60.0
GONE_S = 5.0  # parts that are not here after so long may be nowhere any more: a newer state is looked for
MOST_ANSWER = 1 << 16
OFFERS_S = 5.0  # for peers to say which states they have
OF_ITS_STATE = (Handed, Applied, Saved, Scored)


class Training:
    """Without a command this peer helps others and computes nothing."""

    def __init__(
        self, node: Node, command: tuple[str, ...] | None, starts: Callable[[], Mapping[str, str]] = dict
    ) -> None:
        self._node = node
        self.process: Trainer | None = None
        if command is not None:
            self.process = Trainer(command, node.folder, self._heard, self._odd, self._gone, starts, node.tasks)
        spec = node.run_spec.swarm
        self.work = Work(
            node.me,
            node.chain,
            node.blobs,
            node.parts,
            node.snapshots,
            self._say,
            overlap=spec.overlap,
            save_every=spec.snapshot_every,
            fragments=spec.fragments,
            round_s=node.round_s,
            seed=node.run_spec.seed,
        )
        self._robust = spec.robust
        self._scores: dict[PeerId, float] = {}
        self._deaths: list[float] = []
        self._basing = False
        self._base: tuple[Snapshot, list[PeerId]] | None = None  # that the trainer is to begin with, and whose
        self._useless: set[PeerId] = set()  # peers whose state could not be had, or not be begun with
        self.doubt = Doubt(node)

    async def start(self) -> None:
        if self.process is not None:
            await self.process.start()

    async def stop(self, now: bool) -> None:
        if self.process is not None:
            if now:
                self.process.kill()
            await self.process.stop()

    def tick(self) -> None:
        node = self._node
        self.work.follow()
        waits = self.work.waits_since
        lost = self.work.told is None or (waits is not None and time.monotonic() - waits > GONE_S)
        if self.process is not None and self.work.ready and lost and not self._basing:
            self._basing = True
            node.spawn(self._find_base())
        self.steer()

    def steer(self) -> None:
        node = self._node
        if node.winding_up:
            self.work.wind_up()
        else:
            self.work.steer(node.computing, node.me in node.chain.head.members)

    def _say(self, message: Said) -> None:
        if self.process is not None:
            self.process.say(message)

    def _heard(self, word: Word) -> None:
        if isinstance(word, OF_ITS_STATE) and not self.work.listens:
            return
        match word:
            case Ready():
                self.work.ready = True
                self.work.status["params"] = word.params
            case Handed():
                self._node.spawn(self._hand_in(word))
            case Applied():
                self.work.has_applied(word)
                self.tell_digest()
                self._score_some()
            case Loaded():
                self._base = None
                self.work.has_loaded(word)
                self.tell_digest()
            case Saved():
                self._node.spawn(self._saved(word))
            case Scored():
                self._scores = word.scores
            case Stands():
                self.work.has_status({"params": self.work.status.get("params", 0), **word.status})
            case Failed():
                self._node.event("trainer-failed", why=word.why)

    def _odd(self, why: str) -> None:
        """What it says makes no sense: a new one may do better."""
        self._node.event("trainer-failed", why=f"what it says makes no sense: {why}"[:500])
        if self.process is not None:
            self.process.kill()

    def tell_digest(self) -> None:
        """Of what the weights are now."""
        record, told = self.work.applied, self.told
        if record is not None and told is not None:
            self._node.digests.hear(self._node.me, record, told)
            if self._node.chain.get(record).round >= self._node.chain.head.round - 1:  # else it is catching up
                self._node.talk.pulse()

    @property
    def told(self) -> Told | None:
        """What others are told of the weights after the newest record that is applied here."""
        digest = None if self.work.applied is None else self.work.digests.get(self.work.applied)
        return None if digest is None else Told(digest, self.work.life, self.doubt.twice)

    def _gone(self, code: int) -> None:
        """It is started again, unless it cannot work or dies at once again and again."""
        if self._node.ending:
            return
        now = time.monotonic()
        self._node.event("trainer-gone", code=code)
        self._give_up_base()
        self.work.started_anew()
        self._deaths = [at for at in self._deaths if now - at < QUICK_DEATH_S] + [now]
        if code in (2, 78) or len(self._deaths) > self._node.run_spec.guard.restarts:
            error = ShoalError(f"the trainer of this peer has ended with exit code {code}; its last words are above.")
            error.exit_code = code if code > 0 else error.exit_code
            self._node.fail(error)
        elif self.process is not None:
            self._node.spawn(self._restart(min(30.0, 2.0 ** len(self._deaths))))

    async def _restart(self, after_s: float) -> None:
        await asyncio.sleep(after_s)
        assert self.process is not None
        await self.process.start()

    async def _hand_in(self, said: Handed) -> None:
        life = self.work.life
        try:
            blob, size = await self._node.blobs.add(said.path)
        except FileNotFoundError:
            self._odd(f"a part that is not there ({said.path})")
            return
        found = self.work.has_part(said) if life == self.work.life else None
        if found is None:
            return
        number, used = found
        scores, self._scores = self._scores, {}
        part = Part(
            self._node.me,
            number,
            blob,
            size,
            said.tokens,
            said.steps,
            used,
            said.loss,
            said.seconds,
            scores,
            targets=said.targets,
        )
        part = Part(**{**part.__dict__, "signature": self._node.sign(part.signed(self._node.chain.swarm))})
        self._node.parts.announced(part, self._node.chain.head.round, time.monotonic())
        self._node.router.size(part.peer, part.size)
        self._node.talk.announce(part)

    async def _saved(self, said: Saved) -> None:
        found = self.work.has_saved(said)
        if found is None:
            return
        (record, path, digest), life = found, self.work.life
        place = self._node.snapshots.place(record)
        if path != place:
            if place.exists():
                return
            path.rename(place)
        blob, size = await self._node.blobs.add(place)
        if life != self.work.life:  # of a state that was given up: another one may take its place
            shutil.rmtree(place, ignore_errors=True)
            return
        self._node.snapshots.add(Snapshot(record.hash, record.round, blob, size, digest))
        self._node.tidy()

    def _score_some(self) -> None:
        """A few parts of the newest record, each peer others, tried on data of one's own."""
        record = self._node.chain.head
        others = [part for part in record.took if part.peer != self._node.me]
        if not self._robust or len(record.took) < 3 or self.work.applied != record.hash:
            return
        chosen = random.Random(f"{self._node.me} {record.hash}").sample(others, min(SCORED, len(others)))
        paths = {part.peer: str(path) for part in chosen if (path := self._node.blobs.path(part.blob)) is not None}
        if paths:
            self._say({"kind": "score", "round": record.round, "parts": paths})

    async def _find_base(self) -> None:
        """A state to begin with: our own newest one, or one of others that is much newer."""
        sources: list[PeerId] = []
        try:
            best, sources = await self._newest_state()
            if best is None and self.doubt.ever and self._node.chain.head.round > 0:
                raise TransientError("nobody has a state to begin with yet")
            if best is not None and sources:
                into = self._node.snapshots.path(best)
                await self._node.blobs.fetch_folder(best.blob, best.size, sources, into, most_bytes=self._most_state)
                self._node.snapshots.add(best)
            told, self.work.waits_since = self.work.told, None
            newer = told is None or (best is not None and best.round > self._node.chain.get(told).round)
            if self.work.ready and newer:
                self._base = None if best is None else (best, sources)
                self.work.begin_from(best)
                self.doubt.begun()
                self._node.event("base", round=0 if best is None else best.round, sources=len(sources))
        except (OSError, ValueError, ShoalError, ExceptionGroup) as e:
            self._useless.update(sources)
            self._node.event("base-failed", why=_words(e), sources=[peer[:8] for peer in sources])
            await asyncio.sleep(1.0)
        finally:
            self._basing = False

    async def _newest_state(self) -> tuple[Snapshot | None, list[PeerId]]:
        """With whoever has it; nobody, for our own. Who offered one that was of no use is asked when nobody else has
        any: a member that lies must not keep a newcomer from beginning."""
        node = self._node
        own = None if self.doubt.trust else node.snapshots.before(node.chain.head.hash)
        best, sources = own, list[PeerId]()
        peers = [peer for peer in node.talk.linked() if peer not in self._useless]
        offers = await asyncio.gather(*map(self._offered, peers))  # at once: nobody waits for one that is slow to say
        for peer, found in ((peer, found) for peer, offer in zip(peers, offers, strict=True) for found in offer):
            if not self._is_of_history(found) or not self.doubt.allows(peer, found):
                continue
            if best is None or found.round > best.round + (3 if best is own else 0):
                best, sources = found, [peer]
            elif found == best and best is not own:
                sources.append(peer)
        if not sources:
            self._useless.clear()
        return best, sources

    async def _offered(self, peer: PeerId) -> list[Snapshot]:
        node = self._node
        try:
            asked = node.talk.message("snapshots", {})
            return await node.answers.ask(peer, asked, read_offered, OFFERS_S, MOST_ANSWER)
        except (Unreachable, Refused):
            return []

    def _is_of_history(self, found: Snapshot) -> bool:
        chain = self._node.chain
        return chain.is_ancestor(found.hash, chain.head.hash) and chain.get(found.hash).round == found.round

    @property
    def _most_state(self) -> int:
        """Bytes: weights, and a momentum of the same size."""
        return 2 * self._node.most_bytes

    def _give_up_base(self) -> None:
        """The trainer has died over a state of others that it was to begin with: it is not begun with again."""
        if self._base is not None and self._base[1]:
            self._node.snapshots.drop(self._base[0])
            self._useless.update(self._base[1])
        self._base = None


def _words(e: Exception) -> str:
    """Of several that failed at once, the first one's."""
    while isinstance(e, ExceptionGroup):
        e = e.exceptions[0]
    return str(e)[:200]
