"""What a node says to others and hears from them. Whatever comes is understood, or refused and journaled."""

from __future__ import annotations

import json
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from shoal.fleet.net.api import Message, PeerId, Refused, Unreachable
from shoal.fleet.swarm.decide import Heard, Out
from shoal.fleet.swarm.digests import Told
from shoal.fleet.swarm.record import BadRecord, Certified, Part, Record, ack_text, verified

if TYPE_CHECKING:
    from shoal.fleet.swarm.node import Node

PULSE_S = 1.0
TELL_LINKS = 5  # pulses between two that tell how the links stand
MOST_BODY = 32 << 20  # of a message about the history
RECORDS = 100  # of the history, in one answer


class Talk:
    def __init__(self, node: Node) -> None:
        self._node, self._endpoint = node, node.endpoint
        self.others: dict[PeerId, dict[str, Any]] = {}  # what peers say of themselves
        self._asking: set[PeerId] = set()
        self._pulsed, self._pulses = 0.0, 0
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
            self._endpoint.on(kind, self._guarded(handler), most_body=MOST_BODY)

    def tick(self, now: float) -> None:
        if now - self._pulsed >= PULSE_S:
            self.pulse()

    def linked(self) -> list[PeerId]:
        return [peer for peer, link in self._endpoint.links().items() if link.way is not None]

    def send(self, outs: list[Out]) -> None:
        for out in outs:
            self._endpoint.tell(out.to, Message(out.kind, {}, json.dumps(out.fields).encode()))

    def pulse(self) -> None:
        """Where this peer stands, to all that it has a link to."""
        self._pulsed = time.monotonic()
        self._pulses += 1
        node = self._node
        head, work, told = node.chain.head, node.work, node.training.told
        stands = work.applied is not None and node.chain.get(work.applied).round >= head.round - 1
        said = {
            "head": head.hash,
            "round": head.round,
            "ended": node.ended if node.leads else 0,
            "begun": work.begun,
            "wants": node.training.process is not None and stands and not node.leaving and not node.finished,
            "leaving": node.leaving,
            "weights": None if told is None else {"after": work.applied, **told.__dict__},
            "status": {k: work.status.get(k) for k in ("step", "loss", "tokens_per_s", "busy")},
        }
        if self._pulses % TELL_LINKS == 1:
            said["links"] = node.router.telling(self._endpoint.links())
        body = json.dumps(said).encode()
        for peer in self.linked():
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
                self._node.event("refused", peer=peer, message=message.kind, why=str(e)[:200])
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
        if (weights := said.get("weights")) is not None:
            told = Told(str(weights["digest"])[:128], int(weights["life"]), weights["twice"] is True)
            self._node.digests.hear(peer, str(weights["after"]), told)
        if "links" in said:
            self._node.router.hear(peer, said["links"])
        news = self._node.decider.hear(peer, Heard(now, head, said["wants"] is True, said["leaving"] is True))
        ended = int(said["ended"])
        same = head == self._node.chain.head.hash and ended == self._node.chain.head.round + 1
        if same and peer == self._node.first(now):
            self._node.over(ended, now)
        if news and peer not in self._asking:
            self._asking.add(peer)
            self._node.spawn(self._ask_chain(peer))

    async def _ask_chain(self, peer: PeerId) -> None:
        """Until all of its history is known here."""
        try:
            chain, last = self._node.chain, list[str]()
            while True:
                body = json.dumps({"locator": [*last, *chain.locator()]}).encode()
                answer = await self._endpoint.ask(peer, Message("chain", {}, body), 10.0, MOST_BODY)
                said = json.loads(bytes(answer.body))
                new = [Certified.of(one) for one in said["records"]]
                head, before = str(said["head"]), last
                self._node.decider.learn(peer, head, new, time.monotonic())
                last = [one.record.hash for one in new[-1:]]  # it may be one that was known already
                if head in chain or last in ([], before):
                    return
        except (Unreachable, Refused):
            pass
        except (ValueError, KeyError, TypeError, RecursionError) as e:
            self._node.event("refused", peer=peer, message="chain", why=str(e)[:200])
        finally:
            self._asking.discard(peer)

    async def _on_chain(self, peer: PeerId, said: Any) -> Message:
        locator = [str(name) for name in said["locator"]][:200]
        found = [one.body() for one in self._node.chain.since(locator, RECORDS)]
        body = json.dumps({"records": found, "head": self._node.chain.head.hash}).encode()
        return Message("chain", {}, body)

    async def _on_query(self, peer: PeerId, said: Any) -> None:
        self.send(self._node.decider.query(peer, str(said["head"]), int(said["term"]), time.monotonic()))

    async def _on_promise(self, peer: PeerId, said: Any) -> None:
        acked = said["acked"]
        found = None if acked is None else (int(acked["term"]), Record.of(acked["record"]))
        self.send(self._node.decider.promise(peer, str(said["head"]), int(said["term"]), found))

    async def _on_propose(self, peer: PeerId, said: Any) -> None:
        record = Record.of(said["record"])
        if record.by not in (peer, *self._node.chain.head.members):
            raise BadRecord("a proposal of somebody else's record")
        self.send(self._node.decider.proposed(peer, int(said["term"]), record, time.monotonic()))

    async def _on_ack(self, peer: PeerId, said: Any) -> None:
        name, term, signature = str(said["hash"]), int(said["term"]), str(said["signature"])
        if not verified(peer, ack_text(self._node.chain.swarm, name, term), signature):
            raise BadRecord("a signature that is wrong")
        self.send(self._node.decider.agreed(peer, name, term, signature, time.monotonic()))

    async def _on_commit(self, peer: PeerId, said: Any) -> None:
        new = Certified.of(said)
        if all(parent in self._node.chain for parent in new.record.parents):
            self._node.decider.learn(peer, new.record.hash, [new], time.monotonic())

    async def _on_part(self, peer: PeerId, said: Any) -> None:
        part = Part.of(said)
        if part.peer != peer or not self._node.signed(part):
            raise BadRecord("a part that its peer has not signed")
        if part.size > self._node.most_bytes:
            raise BadRecord(f"a part of {part.size} bytes")
        if self._node.parts.announced(part, self._node.chain.head.round, time.monotonic()):
            self._node.router.size(part.peer, part.size)
            self._node.parts.fetch([part])

    async def _on_snapshots(self, peer: PeerId, said: Any) -> Message:
        return Message("snapshots", {}, json.dumps([s.__dict__ for s in self._node.snapshots.all]).encode())

    def announce(self, part: Part) -> None:
        """Our own."""
        body = json.dumps(part.body()).encode()
        for peer in self._node.chain.head.members:
            if peer != self._node.me:
                self._endpoint.tell(peer, Message("part", {}, body))
