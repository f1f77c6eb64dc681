"""The micro-batches of a step: which one is next, there and back, and the gradient that they sum up to."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

from shoal.errors import NumericsError
from shoal.stages.routes import TRAIN, Plan
from shoal.stages.running import Step

if TYPE_CHECKING:
    from shoal.stages.peer import Peer


class Computing:
    def __init__(self, peer: Peer, in_flight: int) -> None:
        """`in_flight`: micro-batches that a peer of the first stage has begun and not finished; 0: no limit."""
        self._peer, self._in_flight = peer, in_flight or 1 << 30

    def mine(self, plan: Plan) -> list[int]:
        """The micro-batches of this peer; at the end of held-out data there are fewer than there are routes."""
        mine = plan.mine(self._peer.me, self._peer.stage)
        return [m for m in mine if plan.phase + m < self._peer.work.held_out] if plan.measures else mine

    def backward_next(self, step: Step, mine: list[int]) -> int | None:
        """First of all: it frees memory, and somebody waits for it."""
        return self._here(step, "grad", [m for m in mine if m not in step.done], step.forwarded)

    def forward_next(self, step: Step, mine: list[int]) -> int | None:
        left = [m for m in mine if m not in step.forwarded]
        if not self._peer.first:
            return self._here(step, "act", left)
        return None if len(step.forwarded - step.done) >= self._in_flight else next(iter(left), None)

    def _here(self, step: Step, kind: str, left: list[int], among: set[int] | None = None) -> int | None:
        """The next micro-batch (`among` these) whose message has come. With one peer a stage it is the first that is
        left: messages may overtake each other on their way, and a gradient is summed in the same order every time."""
        in_order = self._peer.plan is not None and len(self._peer.plan.members) == len(self._peer.layout)
        come = (m for m in (left[:1] if in_order else left) if self._peer.inbox.has(step.when, kind, m))
        return next((m for m in come if among is None or m in among), None)

    async def forward(self, step: Step, m: int) -> None:
        message = None if self._peer.first else self._peer.inbox.get(step.when, "act", m)
        if step.phase != TRAIN:
            await self._measure_one(step, m, message)
            return
        began = time.perf_counter()
        out = await self._peer.compute(self._peer.work.forward, m, message)
        step.compute_s += time.perf_counter() - began
        step.forwarded.add(m)
        if self._peer.last:
            step.done.add(m)
        if out is not None:
            self._peer.sending.send(step, ("grad" if self._peer.last else "act", m), out)

    async def _measure_one(self, step: Step, m: int, message: bytes | None) -> None:
        """Of held-out data: there is nothing to go back with."""
        out, measured = await self._peer.compute(self._peer.work.measure, step.phase + m, message)
        step.forwarded.add(m)
        step.done.add(m)
        if measured is not None:
            step.measured[m] = measured
        if out is not None:
            self._peer.sending.send(step, ("act", m), out)

    async def backward(self, step: Step, m: int) -> None:
        message = self._peer.inbox.get(step.when, "grad", m)
        began = time.perf_counter()
        out = await self._peer.compute(self._peer.work.backward, m, message)
        step.compute_s += time.perf_counter() - began
        step.done.add(m)
        if out is not None:
            self._peer.sending.send(step, ("grad", m), out)

    async def sum(self, plan: Plan, step: Step, mine: list[int]) -> bool:
        if plan.measures:
            if step.summed == self._peer.wanted(plan):
                return False
            step.summed, step.digest = self._peer.wanted(plan), "-"  # the same weights as before
            await self._peer.tell_lead()
            return True
        alone = self._peer.siblings(plan) == [self._peer.me]
        if mine and not alone:
            if step.part is None or step.part[0] != mine:
                step.part, step.part_to = (mine, await self._peer.compute(self._peer.work.part)), set()
                self._peer.history.add_part(step.era, step.number, self._peer.me, *step.part)
                return True
            self._peer.sending.send_part(plan, step)
        wanted = self._peer.wanted(plan)
        if step.summed == wanted:
            return False
        parts = None if alone else self._peer.history.found((plan.era, plan.step), wanted)
        if not alone and parts is None:
            return False
        step.square, step.loss, digest = await self._peer.compute(
            lambda: (self._peer.work.total(parts), self._peer.work.loss(), step.digest or self._peer.work.digest())
        )
        if not (math.isfinite(step.square) and math.isfinite(step.loss)):
            raise NumericsError(
                f"In step {plan.step + 1} the gradient or the loss of stage {self._peer.stage + 1} is not finite: "
                "lower train.optimizer.lr, or look at the data."
            )
        step.summed, step.digest = wanted, digest
        self._measure(step, len(mine))
        await self._peer.tell_lead()
        return True

    def _measure(self, step: Step, count: int) -> None:
        """Seconds a micro-batch: what takes longer, computing it or sending what it gives."""
        if count:
            links, sent_s = self._peer.endpoint.links(), 0.0
            for what, peer in step.sent_to.items():
                rate = links[peer].up_bytes_per_s if peer in links else None
                sent_s += len(step.sent[what]) / rate if rate else 0.0
            fresh = max(step.compute_s, sent_s) / count
            self._peer.seconds = fresh if not self._peer.seconds else 0.5 * (self._peer.seconds + fresh)
