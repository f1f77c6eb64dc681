"""What a node says to others and hears from them. Whatever comes is understood, or refused and journaled.

Each message is signed by its sender, so that one with a number that nobody honest sends is a proof against it (`lies`).
"""

from __future__ import annotations

import json
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from shoal.net.api import Message, PeerId, Refused, Unreachable
from shoal.swarm.lies import forks, out_of_range, said_bytes
from shoal.swarm.messages import (
    MOST,
    Ack,
    Ballot,
    History,
    Promise,
    Proposal,
    Proposed,
    Pulse,
    Query,
    Status,
    Wanted,
    read,
    read_history,
)
from shoal.swarm.patience import Patience
from shoal.swarm.round_record import BadRecord, Certified, Part, ack_text, proposal_text, verified
from shoal.swarm.world import Heard, Out
from shoal.values import BadValue, OutOfRange, finite

if TYPE_CHECKING:
    from shoal.swarm.node import Node

PULSE_S = 1.0
TELL_LINKS = 5  # pulses between two that tell how the links stand
MOST_ANSWER = 32 << 20  # a piece of the history
RECORDS, ENOUGH = 100, 16 << 20  # of the history, in one answer: at most so many, and no more after so many bytes
MOST_APART = 64 << 20  # bytes of one peer's history that is not ours: a branch of one costs its maker nothing


class Talk:
    def __init__(self, node: Node) -> None:
        self._node, self._endpoint = node, node.endpoint
        self.others: dict[PeerId, Pulse] = {}  # what peers say of themselves
        self.patience = Patience(self._muted)
        self._apart: dict[PeerId, int] = {}  # bytes of branches that each has told of
        self._asking: set[PeerId] = set()
        self._pulsed, self._pulses = 0.0, 0
        for kind, handler in (
            ("pulse", self._on_pulse),
            ("vote", self._on_vote),
            ("query", self._on_query),
            ("promise", self._on_promise),
            ("propose", self._on_propose),
            ("ack", self._on_ack),
            ("commit", self._on_commit),
            ("chain", self._on_chain),
            ("part", self._on_part),
            ("snapshots", self._on_snapshots),
        ):
            self._endpoint.on(kind, self._guarded(handler), most_body=MOST[kind])

    def tick(self, now: float) -> None:
        if now - self._pulsed >= PULSE_S:
            self.pulse()

    def linked(self) -> list[PeerId]:
        return [peer for peer, link in self._endpoint.links().items() if link.way is not None]

    def message(self, kind: str, fields: dict[str, Any]) -> Message:
        body = json.dumps(fields, allow_nan=False).encode()
        return Message(kind, {"signature": self._node.sign(said_bytes(self._node.chain.swarm, kind, body))}, body)

    def send(self, outs: list[Out]) -> None:
        made: dict[int, Message] = {}  # the same words go to many
        for out in outs:
            if id(out.fields) not in made:
                made[id(out.fields)] = self.message(out.kind, out.fields)
            self._endpoint.tell(out.to, made[id(out.fields)])

    def pulse(self) -> None:
        """Where this peer stands, to all that it has a link to."""
        self._pulsed = time.monotonic()
        self._pulses += 1
        node = self._node
        head, work, told = node.chain.head, node.work, node.training.told
        stands = work.applied is not None and node.chain.get(work.applied).round >= head.round - 1
        heard = node.proposals.newest
        said = {
            "head": head.hash,
            "round": head.round,
            "ended": node.ended if node.leads else 0,
            "begun": work.begun,
            "wants": node.training.process is not None and stands and not node.leaving and not node.finished,
            "leaving": node.leaving,
            "weights": None if told is None else {"after": work.applied, **told.__dict__},
            "status": {k: finite(work.status.get(k)) for k in Status.__dataclass_fields__},
            "proposed": None if heard is None else heard.body(),
        }
        if self._pulses % TELL_LINKS == 1:
            said["links"] = node.router.telling(self._endpoint.links())
        message = self.message("pulse", said)
        for peer in self.linked():
            self._endpoint.tell(peer, message)

    def _guarded(
        self, handler: Callable[[PeerId, Any], Awaitable[Message | None]]
    ) -> Callable[[PeerId, Message], Awaitable[Message | None]]:
        """Whatever a peer sends: it is understood, or refused and journaled."""

        async def handle(peer: PeerId, message: Message) -> Message | None:
            if why := self.patience.allows(peer, time.monotonic()):
                raise Refused(why)
            signature, body = message.fields.get("signature"), bytes(message.body)
            try:
                signed = said_bytes(self._node.chain.swarm, message.kind, body)
                if not isinstance(signature, str) or not verified(peer, signed, signature):
                    raise BadValue("its sender has not signed it")
                try:
                    said = read(message.kind, body)
                except OutOfRange as e:
                    self._node.accuse(out_of_range(peer, message.kind, body, signature, str(e)))
                    raise
                return await handler(peer, said)
            except BadValue as e:
                self._refuse(peer, message.kind, str(e))
                raise Refused(f"{message.kind}: {e}"[:200]) from None

        return handle

    def _refuse(self, peer: PeerId, kind: str, why: str) -> None:
        if self.patience.refused(peer, time.monotonic()):
            self._node.event("refused", peer=peer, message=kind, why=why[:200])

    def _muted(self, peer: PeerId) -> None:
        text = f"{self._node.name_of(peer)} sends what makes no sense again and again: nobody listens to it for a while"
        self._node.event("muted", peer=peer, text=text)

    def forget(self, peer: PeerId) -> None:
        """It is not in the swarm any more."""
        self.others.pop(peer, None)
        self._apart.pop(peer, None)
        self.patience.forget(peer)
        self._node.answers.forget(peer)

    async def _on_pulse(self, peer: PeerId, said: Pulse) -> None:
        now, node = time.monotonic(), self._node
        self.others[peer] = said
        if said.weights is not None:
            node.digests.hear(peer, *said.weights)
        if said.links is not None:
            node.router.hear(peer, said.links)
        if said.proposed is not None:
            node.hear_proposal(said.proposed)
        news = node.decider.hear(peer, Heard(now, said.head, said.wants, said.leaving))
        same = said.head == node.chain.head.hash and said.ended == node.chain.head.round + 1
        if same and peer == node.first(now):
            node.over(said.ended, now)
        willing = peer not in self._asking and not node.answers.rests(peer, "chain")
        if news and willing and self._apart.get(peer, 0) < MOST_APART:
            self._asking.add(peer)
            node.spawn(self._ask_chain(peer))

    async def _ask_chain(self, peer: PeerId) -> None:
        """Until all of its history is known here."""
        try:
            chain, last = self._node.chain, list[str]()
            while self._apart.get(peer, 0) < MOST_APART:
                wanted = self.message("chain", {"locator": [*last, *chain.locator()]})
                said, before = await self._node.answers.ask(peer, wanted, _history, 10.0, MOST_ANSWER), last
                self._learn(peer, said.head, said.records, said.size)
                last = [one.record.hash for one in said.records[-1:]]  # it may be one that was known already
                if said.head in chain or last in ([], before):
                    return
            self._refuse(peer, "chain", "a history of its own that is longer than any")
        except (Unreachable, Refused):
            pass
        except BadValue as e:
            self._node.answers.bad(peer, "chain", str(e))
        finally:
            self._asking.discard(peer)

    def _learn(self, peer: PeerId, head: str, records: list[Certified], size: int) -> None:
        node = self._node
        known = len(node.chain)
        try:
            node.decider.learn(peer, head, records, time.monotonic())
        finally:
            if len(node.chain) > known:
                ours = head in node.chain and node.chain.is_ancestor(head, node.chain.head.hash)
                self._apart[peer] = 0 if ours else self._apart.get(peer, 0) + size
        for one in records:
            for lie in forks(node.chain, one):
                node.accuse(lie)

    async def _on_chain(self, peer: PeerId, said: Wanted) -> Message:
        found, size = list[bytes](), 0
        for one in self._node.chain.since(said.locator, RECORDS):
            found.append(json.dumps(one.body()).encode())
            size += len(found[-1])
            if size > ENOUGH:
                break
        head = json.dumps(self._node.chain.head.hash).encode()
        return Message("chain", {}, b'{"head": ' + head + b', "records": [' + b", ".join(found) + b"]}")

    async def _on_vote(self, peer: PeerId, said: Ballot) -> None:
        self.send(self._node.decider.vote(peer, said, time.monotonic()))

    async def _on_query(self, peer: PeerId, said: Query) -> None:
        self.send(self._node.decider.query(peer, said.head, said.term, said.votes, time.monotonic()))

    async def _on_promise(self, peer: PeerId, said: Promise) -> None:
        self.send(self._node.decider.promise(peer, said.head, said.term, said.acked))

    async def _on_propose(self, peer: PeerId, said: Proposal) -> None:
        record, node = said.record, self._node
        if record.by not in (peer, *node.chain.head.members):
            raise BadRecord("a proposal of somebody else's record")
        if record.kind == "round":
            word = Proposed(peer, record.parent, said.term, record.hash, said.signature)
            if not verified(peer, proposal_text(node.chain.swarm, word.head, word.term, word.name), word.signature):
                raise BadRecord("a proposal that its leader has not signed")
            node.hear_proposal(word)
        self.send(node.decider.proposed(peer, said.term, record, said.votes, time.monotonic()))

    async def _on_ack(self, peer: PeerId, said: Ack) -> None:
        if not verified(peer, ack_text(self._node.chain.swarm, said.hash, said.term), said.signature):
            raise BadRecord("a signature that is wrong")
        self.send(self._node.decider.agreed(peer, said.hash, said.term, said.signature, time.monotonic()))

    async def _on_commit(self, peer: PeerId, said: Certified) -> None:
        if all(parent in self._node.chain for parent in said.record.parents):
            self._learn(peer, said.record.hash, [said], len(json.dumps(said.body())))

    async def _on_part(self, peer: PeerId, said: Part) -> None:
        if said.peer != peer or not self._node.signed(said):
            raise BadRecord("a part that its peer has not signed")
        if said.size > self._node.most_bytes:
            raise BadRecord(f"a part of {said.size} bytes")
        if self._node.parts.announced(said, self._node.chain.head.round, time.monotonic()):
            self._node.router.size(said.peer, said.size)
            self._node.parts.fetch([said])

    async def _on_snapshots(self, peer: PeerId, said: None) -> Message:
        return Message("snapshots", {}, json.dumps([s.__dict__ for s in self._node.snapshots.all]).encode())

    def announce(self, part: Part) -> None:
        """Our own."""
        message = self.message("part", part.body())
        for peer in self._node.chain.head.members:
            if peer != self._node.me:
                self._endpoint.tell(peer, message)


def _history(answer: Message) -> History:
    return read_history(answer.body, RECORDS, MOST_ANSWER)
