"""One peer of one stage: takes in messages, computes, sends on, and takes the step when it counts.

Everything is keyed by (era, step, micro-batch) and may arrive twice, early or in any order, so that there is one rule
for trouble: who has sent something keeps it until the step counts, and sends it again when a newer plan names another
receiver. A sibling that is given a lost peer's micro-batches finds its inputs on the way to it, computes them again and
sends what the lost peer sent; neighbours that had it already take no notice.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import secrets
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from shoal.errors import NumericsError, ShoalError, TransientError
from shoal.fleet.net.answers import Answers, BadAnswer
from shoal.fleet.net.api import Endpoint, Event, Handler, Message, PeerId, Refused, Unreachable
from shoal.fleet.stages.handover import STATE, Donor, fetch
from shoal.fleet.stages.history import MOST_PARTS, History, Share
from shoal.fleet.stages.lead import Lead
from shoal.fleet.stages.outbox import Outbox
from shoal.fleet.stages.report import MOST_SECONDS, Measured, Ready, Report
from shoal.fleet.stages.routes import MOST_COUNT, TRAIN, Commit, Layout, Plan, When
from shoal.fleet.stages.work import Work
from shoal.values import BadValue, items, whole

LOOK_S = 0.25  # how often a peer looks who leads
BEATS_S = 2.5  # in which a peer that is there is heard
REFUSES_S = 2.0  # for so long the lead is told whose message could not be read; its sender tries again all the time
T = TypeVar("T")
Sent = tuple[str, int]  # "act" or "grad", and the micro-batch


@dataclass
class Step:
    """What this peer has done of the running step."""

    era: int
    number: int
    phase: int = TRAIN
    forwarded: set[int] = field(default_factory=set)
    done: set[int] = field(default_factory=set)
    sent: dict[Sent, bytes] = field(default_factory=dict)
    sent_to: dict[Sent, PeerId] = field(default_factory=dict)
    part: tuple[list[int], bytes] | None = None
    part_to: set[PeerId] = field(default_factory=set)
    square: float = 0.0
    loss: float = 0.0
    digest: str = ""  # of the state before it; empty until there is a sum
    summed: list[Share] | None = None  # what the sum was made of
    compute_s: float = 0.0
    measured: dict[int, Measured] = field(default_factory=dict)  # of held-out data, by micro-batch

    @property
    def when(self) -> When:
        return self.era, self.number, self.phase

    @property
    def about(self) -> dict[str, int]:
        """Of its messages."""
        return {"era": self.era, "step": self.number, "phase": self.phase}


class Peer:
    def __init__(
        self,
        endpoint: Endpoint,
        layout: Layout,
        work: Work,
        steps: int,
        *,
        silent_s: float = 5.0,
        due: Callable[[int], bool] = lambda step: False,
        evaluates: Callable[[int], bool] = lambda step: False,
        in_flight: int = 0,
        fingerprint: str = "",
        event: Event = lambda kind, **fields: None,
    ) -> None:
        """`due`: whether the state is saved after so many steps; the last one always is. `evaluates`: whether held-out
        data is measured then.
        `in_flight`: micro-batches that a peer of the first stage has begun and not finished; 0: no limit.
        `fingerprint`: of all that peers must agree on, the run and its data."""
        self.endpoint, self.layout, self.work, self.steps = endpoint, layout, work, steps
        self.me, self.silent_s, self.event, self.fingerprint = endpoint.id, silent_s, event, fingerprint
        self.roster = [p for peers in in_turn(layout) for p in peers]
        self.stage = next(s for s, peers in enumerate(layout) if self.me in peers)
        self.first, self.last = self.stage == 0, self.stage == len(layout) - 1
        self._known = set(self.roster)
        self.answers = Answers(endpoint, event)
        self._refuses: dict[PeerId, float] = {}  # whose messages cannot be read here, since when
        self.born = secrets.token_hex(8)
        self.plan: Plan | None = None
        self.at = 0  # steps in the state that `work` holds
        self.reports: dict[PeerId, Report] = {}  # as they were pushed to this peer while it leads
        self.news = asyncio.Event()  # for the lead: a report has come
        self._era = 0  # of that state
        self._began = time.monotonic()
        self._stood = (0.0, 0.0)  # until when it is forgiven that others were silent, and for how long
        self._due, self._in_flight = due, in_flight or 1 << 30
        self.evaluates = evaluates
        self._unsaved = False  # this state is due, and is measured first
        self._told = (0, -1)  # era and step of the last measurement that was told
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="shoal-stage")
        self._changed = asyncio.Event()
        self._outboxes: dict[tuple[PeerId, bool], Outbox] = {}
        self._box: dict[tuple[When, str, int], bytes] = {}
        self._history = History()
        self._step: Step | None = None
        self._alone = False
        self._lost = False  # a member without the state that the plan begins with
        self._learning: asyncio.Task[None] | None = None
        self._leading: asyncio.Task[None] | None = None
        self.seconds = 0.0  # of a micro-batch here, there and back, as measured
        most = work.message_bytes
        endpoint.on("act", self._guarded(self._on_message), most)
        endpoint.on("grad", self._guarded(self._on_message), most)
        endpoint.on("part", self._guarded(self._on_part), work.part_bytes)
        endpoint.on("plan", self._guarded(self._on_plan), 1 << 16)
        endpoint.on("report", self._guarded(self._on_report), 1 << 16)
        endpoint.on("where", self._guarded(self._on_where), 1 << 16)
        Donor(endpoint, layout[self.stage], self._state)

    async def run(self) -> None:
        """Until the last step counts."""
        look = asyncio.create_task(self._look())
        try:
            while not self._over():
                for task in (look, self._leading, self._learning):
                    if task is not None and task.done() and not task.cancelled():
                        task.result()  # what went wrong there is not to be overlooked
                for outbox in self._outboxes.values():
                    if outbox.broken is not None:
                        raise outbox.broken
                self._changed.clear()
                if not await self._advance():
                    # Not by `wait_for`, which in Python 3.11 may swallow that this peer is told to stop.
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(LOOK_S):
                            await self._changed.wait()
            await self._tell_lead()
            if self._leading is not None:
                await self._leading
        finally:
            for task in (look, self._leading, self._learning):
                if task is not None:
                    task.cancel()
            for outbox in self._outboxes.values():
                outbox.close()
            self._thread.shutdown(wait=True, cancel_futures=True)

    def _over(self) -> bool:
        """The last step counts and is taken here, and nobody fetches it from here any more."""
        plan = self.plan
        if plan is None or plan.step < self.steps or plan.measures or self._unsaved:
            return False
        if self.at < self.steps and not plan.learners and self.me not in plan.members:
            raise TransientError(
                f"The others have finished, and this peer has come to step {self.at} of {self.steps} only: start it "
                "again together with them, and it fetches their last state."
            )
        learns = self._learning is not None and not self._learning.done()  # it has the number before it has the era
        return self.at >= self.steps and not learns and (self.me in plan.learners or not plan.learners)

    # What others can ask.

    def _guarded(self, handler: Callable[[PeerId, Message], Awaitable[Message]]) -> Handler:
        """What a peer of the layout says is understood, or refused; nobody else is listened to."""

        async def handle(peer: PeerId, message: Message) -> Message:
            if peer not in self._known:
                raise Refused("no peer of this pipeline")
            try:
                return await handler(peer, message)
            except BadValue as e:
                self.answers.bad(peer, message.kind, str(e))
                raise Refused(f"{message.kind}: {e}"[:200]) from None

        return handle

    async def _on_message(self, peer: PeerId, message: Message) -> Message:
        era, step, phase, m = (whole(message.fields.get(k), MOST_COUNT) for k in ("era", "step", "phase", "m"))
        beside = self.stage + (1 if message.kind == "grad" else -1)
        if (
            not 0 <= beside < len(self.layout)
            or peer not in self.layout[beside]
            or not 0 <= m < self.work.micro_batches
        ):
            raise Refused("no message for this stage")
        when = (era, step, phase)
        key = (when, message.kind, m)
        if self._is_due(when) and key not in self._box:
            await self._check(peer, message)
            if self._is_due(when):  # still
                if len(self._box) >= 4 * self.work.micro_batches:
                    raise Refused("too many messages wait here")
                self._box.setdefault(key, bytes(message.body))
                self._changed.set()
        return Message("ok")

    def _is_due(self, when: When) -> bool:
        return self.plan is None or when >= self.plan.when

    async def _check(self, peer: PeerId, message: Message) -> None:
        """Before anything of it is kept: what is no number must not get into a sum. The lead hears of it."""
        try:
            await asyncio.to_thread(self.work.check, message.kind, message.body)
        except BadValue:
            self._cannot_read(peer)
            raise

    def _cannot_read(self, peer: PeerId) -> None:
        self._refuses[peer] = time.monotonic()
        self._changed.set()

    async def _on_part(self, peer: PeerId, message: Message) -> Message:
        if peer not in self.layout[self.stage]:
            raise Refused("no sibling")
        era, step = (whole(message.fields.get(k), MOST_COUNT) for k in ("era", "step"))
        of = [whole(m, self.work.micro_batches - 1) for m in items(message.fields.get("of"), self.work.micro_batches)]
        await self._check(peer, message)
        self._history.add_part(era, step, peer, of, bytes(message.body))
        self._changed.set()
        return Message("ok")

    async def _on_plan(self, peer: PeerId, message: Message) -> Message:
        plan = Plan.of_json(message.fields.get("plan"))
        if plan.lead != peer or not self.fits(plan):
            raise Refused("a plan comes from its lead, and is for this layout and its steps")
        self.take(plan)
        return Message("ok")

    def fits(self, plan: Plan) -> bool:
        return plan.fits(self.layout, self.work.micro_batches, self.steps, self.work.sets)

    async def _on_report(self, peer: PeerId, message: Message) -> Message:
        self.reports[peer] = Report.of_json(message.fields)
        self.news.set()
        return Message("ok")

    async def _on_where(self, peer: PeerId, message: Message) -> Message:
        plan = {"plan": self.plan.to_json()} if self.plan is not None and message.fields.get("plan") else {}
        return Message("here", {**self.report().to_json(), **plan})

    # Who is there, and who leads.

    def alive(self, peer: PeerId, within: float = 1.0) -> bool:
        """Whether it was heard within so many times what is allowed to be silent."""
        if peer == self.me:
            return True
        link = self.endpoint.links().get(peer)
        until, stood_s = self._stood
        limit_s = within * self.silent_s + (stood_s if time.monotonic() < until else 0.0)
        return link is not None and link.heard_s is not None and link.heard_s < limit_s

    def report(self) -> Report:
        """How this peer stands; to the lead, when it asks and when there is something new."""
        ready = None
        plan, step = self.plan, self._step
        running = plan and step and step.when == plan.when
        if plan and step and running and step.digest and step.summed == self._wanted(plan):
            measured = tuple(step.measured[m] for m in self._mine(plan) if m in step.measured)
            ready = Ready(plan.order, step.square, step.loss, step.digest, measured)
        return Report(
            self.born,
            self.fingerprint,
            self.at,
            self._era,
            plan.order if plan else None,
            tuple(self.work.saved()),
            self._lost,
            ready,
            min(self.seconds, MOST_SECONDS),
            tuple(p for p, at in self._refuses.items() if time.monotonic() - at < REFUSES_S),
        )

    async def _look(self) -> None:
        while True:
            leads = self._leading is not None and not self._leading.done()
            if not leads and not self._over() and self._should_lead():
                self._leading = asyncio.create_task(Lead(self).run())
            self._say_if_left_alone()
            before = time.monotonic()
            await asyncio.sleep(LOOK_S)
            now = time.monotonic()
            if now - before > 4 * LOOK_S:  # this process stood still: who was silent for so long may have spoken
                self._stood = now + BEATS_S, now - before

    def _say_if_left_alone(self) -> None:
        """A newcomer cannot go on by itself: whoever reads its log should know what it waits for."""
        plan = self.plan
        alone = plan is not None and self.me not in plan.members and not any(map(self.alive, plan.members))
        if alone and not self._alone:
            text = "Waiting: none of the peers that compute is here; training goes on when they are back."
            self.event("waiting", text=text)
        self._alone = alone

    def _should_lead(self) -> bool:
        if self.plan is None:  # somebody else may lead: it would have said so by then
            first = next(p for p in self.roster if self.alive(p))
            return first == self.me and (self.me == self.roster[0] or time.monotonic() - self._began > self.silent_s)
        if self.plan.lead == self.me:
            return True
        return next((p for p in (self.plan.lead, *self.plan.members) if self.alive(p)), None) == self.me

    async def _tell_lead(self) -> None:
        if self.plan is not None and self.plan.lead != self.me:
            with contextlib.suppress(Unreachable, Refused):
                await self.endpoint.ask(
                    self.plan.lead, Message("report", self.report().to_json()), timeout_s=self.silent_s
                )
        elif self.plan is not None:
            self.reports[self.me] = self.report()
            self.news.set()

    # What is to be done next.

    def take(self, plan: Plan) -> None:
        if self.plan is not None and plan.order <= self.plan.order:
            return
        before, self.plan = self.plan, plan
        self._history.take(before, plan, self.me)
        self._box = {k: v for k, v in self._box.items() if k[0] >= plan.when}
        self._hear_sums(plan)
        if self._learning is not None and before is not None:
            donor = plan.learners.get(self.me)
            other = donor != before.learners.get(self.me) and not self._learning.done()
            if donor is None or other or plan.era != before.era:
                self._learning.cancel()  # what it asks for is not there any more, or of no use
                self._learning = None
        if self._step is not None and self._step.when == plan.when:
            self._send_again(plan, self._step)
        self._changed.set()

    def _hear_sums(self, plan: Plan) -> None:
        """Held-out data is measured: said once, by those who were there."""
        if plan.sums is None or plan.measures or plan.era != self._era or self._told == (plan.era, plan.sums.step):
            return
        self._told = plan.era, plan.sums.step
        self.work.tell(plan.sums)

    async def _advance(self) -> bool:
        """Does one thing that can be done now; False: there is nothing."""
        plan = self.plan
        if plan is None or not (self.me in plan.members or self.me in plan.learners):
            return False
        if self.me in plan.learners:
            if self._learning is None:
                self._learning = asyncio.create_task(self._learn())
            if not self._learning.done():
                return False
        elif self._era != plan.era:
            return await self._go_back(plan)
        if self._unsaved and not (plan.measures and self.at == plan.step):
            self._unsaved = False
            await self._compute(self.work.save, self.at)
            return True
        if self.at < plan.step:
            return await self._catch_up(plan)
        if (plan.step >= self.steps and not plan.measures) or self.at > plan.step:
            return False
        step = self._step
        if step is None or step.when != plan.when:
            if self.me in plan.learners:
                await self._tell_lead()  # it has this step's weights: only the sum is missing
            step = self._step = Step(*plan.when)
            await self._compute(self.work.begin, plan.step)
            return True
        mine = self._mine(plan)
        if (m := self._backward_next(step, mine)) is not None:
            await self._backward(step, m)
        elif (m := self._forward_next(step, mine)) is not None:
            await self._forward(step, m)
        elif len(step.done.intersection(mine)) == len(mine):
            return await self._sum(plan, step, mine)
        else:
            return False
        return True

    def _mine(self, plan: Plan) -> list[int]:
        """The micro-batches of this peer; at the end of held-out data there are fewer than there are routes."""
        mine = plan.mine(self.me, self.stage)
        return [m for m in mine if plan.phase + m < self.work.held_out] if plan.measures else mine

    def _backward_next(self, step: Step, mine: list[int]) -> int | None:
        """First of all: it frees memory, and somebody waits for it."""
        return self._here(step, "grad", [m for m in mine if m not in step.done], step.forwarded)

    def _forward_next(self, step: Step, mine: list[int]) -> int | None:
        left = [m for m in mine if m not in step.forwarded]
        if not self.first:
            return self._here(step, "act", left)
        return None if len(step.forwarded - step.done) >= self._in_flight else next(iter(left), None)

    def _here(self, step: Step, kind: str, left: list[int], among: set[int] | None = None) -> int | None:
        """The next micro-batch (`among` these) whose message has come. With one peer a stage it is the first that is
        left: messages may overtake each other on their way, and a gradient is summed in the same order every time."""
        in_order = self.plan is not None and len(self.plan.members) == len(self.layout)
        come = (m for m in (left[:1] if in_order else left) if (step.when, kind, m) in self._box)
        return next((m for m in come if among is None or m in among), None)

    async def _forward(self, step: Step, m: int) -> None:
        message = None if self.first else self._box[step.when, "act", m]
        if step.phase != TRAIN:
            await self._measure_one(step, m, message)
            return
        began = time.perf_counter()
        out = await self._compute(self.work.forward, m, message)
        step.compute_s += time.perf_counter() - began
        step.forwarded.add(m)
        if self.last:
            step.done.add(m)
        if out is not None:
            self._send(step, ("grad" if self.last else "act", m), out)

    async def _measure_one(self, step: Step, m: int, message: bytes | None) -> None:
        """Of held-out data: there is nothing to go back with."""
        out, measured = await self._compute(self.work.measure, step.phase + m, message)
        step.forwarded.add(m)
        step.done.add(m)
        if measured is not None:
            step.measured[m] = measured
        if out is not None:
            self._send(step, ("act", m), out)

    async def _backward(self, step: Step, m: int) -> None:
        message = self._box[step.when, "grad", m]
        began = time.perf_counter()
        out = await self._compute(self.work.backward, m, message)
        step.compute_s += time.perf_counter() - began
        step.done.add(m)
        if out is not None:
            self._send(step, ("grad", m), out)

    # The step's gradient, and taking the step.

    def _siblings(self, plan: Plan) -> list[PeerId]:
        return [p for p in self.layout[self.stage] if p in plan.members or p in plan.learners]

    def _wanted(self, plan: Plan) -> list[Share]:
        """Whose parts, of which micro-batches, are this stage's gradient."""
        shares = [(p, plan.mine(p, self.stage)) for p in self.layout[self.stage] if p in plan.members]
        return [(p, of) for p, of in shares if of]

    async def _sum(self, plan: Plan, step: Step, mine: list[int]) -> bool:
        if plan.measures:
            if step.summed == self._wanted(plan):
                return False
            step.summed, step.digest = self._wanted(plan), "-"  # the same weights as before
            await self._tell_lead()
            return True
        alone = self._siblings(plan) == [self.me]
        if mine and not alone:
            if step.part is None or step.part[0] != mine:
                step.part, step.part_to = (mine, await self._compute(self.work.part)), set()
                self._history.add_part(step.era, step.number, self.me, *step.part)
                return True
            self._send_part(plan, step)
        wanted = self._wanted(plan)
        if step.summed == wanted:
            return False
        parts = None if alone else self._history.found((plan.era, plan.step), wanted)
        if not alone and parts is None:
            return False
        step.square, step.loss, digest = await self._compute(
            lambda: (self.work.total(parts), self.work.loss(), step.digest or self.work.digest())
        )
        if not (math.isfinite(step.square) and math.isfinite(step.loss)):
            raise NumericsError(
                f"In step {plan.step + 1} the gradient or the loss of stage {self.stage + 1} is no number: "
                "lower train.optimizer.lr, or look at the data."
            )
        step.summed, step.digest = wanted, digest
        self._measure(step, len(mine))
        await self._tell_lead()
        return True

    def _measure(self, step: Step, count: int) -> None:
        """Seconds a micro-batch: what takes longer, computing it or sending what it gives."""
        if count:
            links, sent_s = self.endpoint.links(), 0.0
            for what, peer in step.sent_to.items():
                rate = links[peer].up_bytes_per_s if peer in links else None
                sent_s += len(step.sent[what]) / rate if rate else 0.0
            fresh = max(step.compute_s, sent_s) / count
            self.seconds = fresh if not self.seconds else 0.5 * (self.seconds + fresh)

    async def _catch_up(self, plan: Plan) -> bool:
        """One step towards the plan's: with the sum that is here, or as a newcomer with the parts that came."""
        key = (self._era, self.at)
        then, commit = self._history.of(key)
        step = self._step
        summed = step is not None and step.when == (*key, TRAIN) and step.digest != ""
        if commit is not None and then is not None and not summed:
            parts = self._history.found(key, self._wanted(then))
            if parts is not None:
                await self._compute(self.work.begin, self.at)
                await self._compute(self.work.total, parts)
                summed = True
        if commit is None or not summed:
            if self.me in plan.learners:
                if commit is not None and then is not None and self._under_way(plan, then):
                    return False
                self._history.forget((plan.era, plan.step))
                self._learning = None  # something is missing: begin anew, with a newer state
            elif not self._lost:
                self._lost = True
                await self._tell_lead()
            return False
        await self._compute(self._apply, commit)
        self._step = None
        if self.me in plan.learners:
            self._history.forget(key)
        self.event("step", step=self.at, loss=commit.loss, grad_norm=commit.norm, members=len(plan.members))
        return True

    def _under_way(self, plan: Plan, then: Plan) -> bool:
        """Whether the parts of an earlier step will come: who made them is there, and does not think it too late."""
        makers = [p for p, _ in self._wanted(then)]
        here = all(p in plan.members and self.alive(p) for p in makers)
        return here and plan.step < self.steps and plan.step - then.step < MOST_PARTS

    def _apply(self, commit: Commit) -> None:
        """In the thread that computes, so that nobody sees a state without its number."""
        self.work.apply(commit)
        self.at = commit.step + 1
        self._unsaved = self._due(self.at) or self.at == self.steps
        if self._unsaved and not self.evaluates(self.at):
            self._unsaved = False
            self.work.save(self.at)

    async def _go_back(self, plan: Plan) -> bool:
        """A new era begins with a saved state (or goes on with the one that is here)."""
        if self._era == 0 or self.at != plan.step:
            if plan.step not in self.work.saved():
                if not self._lost:
                    self._lost = True
                    await self._tell_lead()
                return False
            await self._compute(self._load, plan.step)
        self._era, self._step, self._lost = plan.era, None, False
        return True

    def _load(self, step: int) -> None:
        self.work.load(step)
        self.at, self._unsaved = step, False

    # Newcomers.

    async def _state(self) -> tuple[int, int, bytes]:
        return await self._compute(lambda: (self._era, self.at, self.work.state()))

    async def _learn(self) -> None:
        """The state of a sibling; the parts of the steps since then are coming in meanwhile."""
        self._lost = False
        while self.plan is not None and self.me in self.plan.learners:
            plan, donor = self.plan, self.plan.learners[self.me]
            with contextlib.suppress(Unreachable, Refused):
                least = self._history.first(plan)
                if await self._learn_from(donor, plan.era, least):
                    return
            await asyncio.sleep(LOOK_S)

    async def _learn_from(self, donor: PeerId, era: int, least: int) -> bool:
        try:
            found = await fetch(self.answers, donor, era, least, self.work.state_bytes)
            if found is None:
                return False
            self._era, self._step = 0, None  # whatever interrupts it, this is no state of a plan's
            await self._in_thread(self._restore, *found)
        except BadAnswer:
            self._cannot_read(donor)
            raise
        except BadValue as e:
            self.answers.bad(donor, STATE, str(e))
            self._cannot_read(donor)
            return False
        self._era = era
        self.event("fetched", step=self.at, bytes=len(found[1]), source=donor)
        self._changed.set()
        return True

    def _restore(self, step: int, state: bytes) -> None:
        self.work.restore(step, state)
        self.at, self._unsaved = step, False
        if step == self.steps:
            self.work.save(step)

    # Sending.

    def _send(self, step: Step, what: Sent, payload: bytes) -> None:
        step.sent[what] = payload
        plan = self.plan  # it may be of the next step: others have done what this peer was too slow for
        if plan is not None and self._step is step and plan.when == step.when:
            self._send_to(self._neighbour(plan, what), step, what)

    def _neighbour(self, plan: Plan, what: Sent) -> PeerId:
        return plan.routes[what[1]][self.stage + (1 if what[0] == "act" else -1)]

    def _send_to(self, peer: PeerId, step: Step, what: Sent) -> None:
        step.sent_to[what] = peer
        message = Message(what[0], {**step.about, "m": what[1]}, step.sent[what])
        self.outbox(peer).put(message, lambda: self._step is step and step.sent_to[what] == peer)

    def _send_again(self, plan: Plan, step: Step) -> None:
        """To whoever has taken the place of a peer that is gone."""
        for what in list(step.sent):
            peer = self._neighbour(plan, what)
            if peer != step.sent_to.get(what):
                self._send_to(peer, step, what)
        if step.part is not None and step.part[0] == plan.mine(self.me, self.stage):
            self._send_part(plan, step)

    def _send_part(self, plan: Plan, step: Step) -> None:
        assert step.part is not None
        part = step.part
        for peer in self._siblings(plan):
            if peer != self.me and peer not in step.part_to:
                step.part_to.add(peer)
                message = Message("part", {"era": step.era, "step": step.number, "of": part[0]}, part[1])
                # A newcomer may be behind: its parts are of use to it after the step has been taken here.
                self.outbox(peer).put(message, lambda peer=peer: step.part is part and self._follows(peer, step))  # type: ignore[misc]

    def _follows(self, peer: PeerId, step: Step) -> bool:
        """Whether a sibling has a use for its part; one that is further behind has to begin anew."""
        plan = self.plan
        if plan is None or plan.era != step.era or plan.step - step.number > MOST_PARTS:
            return False
        return peer in plan.members or peer in plan.learners

    def outbox(self, peer: PeerId, control: bool = False) -> Outbox:
        """Plans do not queue behind activations."""
        if (peer, control) not in self._outboxes:
            self._outboxes[peer, control] = Outbox(self.endpoint, peer)
        return self._outboxes[peer, control]

    async def _in_thread(self, do: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, do, *args)

    async def _compute(self, do: Callable[..., T], *args: Any) -> T:
        try:
            return await self._in_thread(do, *args)
        except ValueError as e:  # BadPayload, of either codec
            raise ShoalError(
                f"Stage {self.stage + 1} was sent something it cannot read in step {self.at + 1} ({e}): "
                "its neighbours run another version or another run file; give all peers the same."
            ) from e


def in_turn(layout: Layout) -> list[list[PeerId]]:
    """The first peers of all stages, then the second ones, and so on: the order in which peers lead."""
    most = max(len(peers) for peers in layout)
    return [[peers[i] for peers in layout if i < len(peers)] for i in range(most)]
