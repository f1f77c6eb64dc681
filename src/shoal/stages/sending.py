"""What a peer sends of a step: to whom the plan says, and again to whoever takes the place of a peer that is gone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.net.api import Message, PeerId
from shoal.stages.outbox import Outbox
from shoal.stages.pending import MOST_PARTS
from shoal.stages.routes import Plan
from shoal.stages.running import Sent, Step

if TYPE_CHECKING:
    from shoal.stages.peer import Peer


class Sending:
    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self._outboxes: dict[tuple[PeerId, bool], Outbox] = {}

    def check(self) -> None:
        """Raises what could not be sent at all."""
        for outbox in self._outboxes.values():
            if outbox.broken is not None:
                raise outbox.broken

    def close(self) -> None:
        for outbox in self._outboxes.values():
            outbox.close()

    def send(self, step: Step, what: Sent, payload: bytes) -> None:
        step.sent[what] = payload
        plan = self._peer.plan  # it may be of the next step: others have done what this peer was too slow for
        if plan is not None and self._peer.step is step and plan.when == step.when:
            self._send_to(self._neighbour(plan, what), step, what)

    def _neighbour(self, plan: Plan, what: Sent) -> PeerId:
        return plan.routes[what[1]][self._peer.stage + (1 if what[0] == "act" else -1)]

    def _send_to(self, peer: PeerId, step: Step, what: Sent) -> None:
        step.sent_to[what] = peer
        message = Message(what[0], {**step.about, "m": what[1]}, step.sent[what])
        self.outbox(peer).put(message, lambda: self._peer.step is step and step.sent_to[what] == peer)

    def again(self, plan: Plan, step: Step) -> None:
        """To whoever has taken the place of a peer that is gone."""
        for what in list(step.sent):
            peer = self._neighbour(plan, what)
            if peer != step.sent_to.get(what):
                self._send_to(peer, step, what)
        if step.part is not None and step.part[0] == plan.mine(self._peer.me, self._peer.stage):
            self.send_part(plan, step)

    def send_part(self, plan: Plan, step: Step) -> None:
        assert step.part is not None
        part = step.part
        for peer in self._peer.siblings(plan):
            if peer != self._peer.me and peer not in step.part_to:
                step.part_to.add(peer)
                message = Message("part", {"era": step.era, "step": step.number, "of": part[0]}, part[1])
                # A newcomer may be behind: its parts are of use to it after the step has been taken here.
                self.outbox(peer).put(message, lambda peer=peer: step.part is part and self._follows(peer, step))  # type: ignore[misc]

    def _follows(self, peer: PeerId, step: Step) -> bool:
        """Whether a sibling has a use for its part; one that is further behind has to begin anew."""
        plan = self._peer.plan
        if plan is None or plan.era != step.era or plan.step - step.number > MOST_PARTS:
            return False
        return peer in plan.members or peer in plan.learners

    def outbox(self, peer: PeerId, control: bool = False) -> Outbox:
        """Plans do not queue behind activations."""
        if (peer, control) not in self._outboxes:
            self._outboxes[peer, control] = Outbox(self._peer.endpoint, peer)
        return self._outboxes[peer, control]
