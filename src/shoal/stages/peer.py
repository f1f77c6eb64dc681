"""One peer of one stage: takes in messages, computes, sends on, and takes the step when it counts.

Everything is keyed by (era, step, micro-batch) and may arrive twice, early or in any order, so that there is one rule
for trouble: who has sent something keeps it until the step counts, and sends it again when a newer plan names another
receiver. A sibling that is given a lost peer's micro-batches finds its inputs on the way to it, computes them again and
sends what the lost peer sent; neighbours that had it already take no notice.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from shoal.errors import ShoalError, TransientError
from shoal.net.answers import Answers, BadAnswer
from shoal.net.api import Endpoint, Event, Message, PeerId, Refused, Unreachable
from shoal.stages.computing import Computing
from shoal.stages.handover import STATE, Donor, fetch
from shoal.stages.inbox import Inbox
from shoal.stages.lead import Lead
from shoal.stages.pending import MOST_PARTS, History, Share
from shoal.stages.report import MOST_SECONDS, Ready, Report
from shoal.stages.routes import TRAIN, Commit, Layout, Plan, in_turn
from shoal.stages.running import Step
from shoal.stages.sending import Sending
from shoal.stages.work import Work
from shoal.values import BadValue

LOOK_S = 0.25  # how often a peer looks who leads
BEATS_S = 2.5  # in which a peer that is there is heard
T = TypeVar("T")


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
        self.endpoint, self.work, self.steps = endpoint, work, steps
        self.me, self.silent_s, self.event, self.fingerprint = endpoint.id, silent_s, event, fingerprint
        self.changed = asyncio.Event()
        self.settle(layout)
        self.stage = next(s for s, peers in enumerate(layout) if self.me in peers)
        self.first, self.last = self.stage == 0, self.stage == len(layout) - 1
        self.late = False  # it came after the first step: the beginning is no state that others may go back to for it
        self.puzzled: Callable[[PeerId], object] = lambda peer: None  # told of whose plan does not fit the layout
        self.answers = Answers(endpoint, event)
        self.born = secrets.token_hex(8)
        self.plan: Plan | None = None
        self.at = 0  # steps in the state that `work` holds
        self.reports: dict[PeerId, Report] = {}  # as they were pushed to this peer while it leads
        self.news = asyncio.Event()  # for the lead: a report has come
        self._era = 0  # of that state
        self._began = time.monotonic()
        self._stood = (0.0, 0.0)  # until when it is forgiven that others were silent, and for how long
        self._due = due
        self.evaluates = evaluates
        self._unsaved = False  # this state is due, and is measured first
        self._told = (0, -1)  # era and step of the last measurement that was told
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="shoal-stage")
        self.history = History()
        self.step: Step | None = None
        self._alone = False
        self._lost = False  # a member without the state that the plan begins with
        self._learning: asyncio.Task[None] | None = None
        self._leading: asyncio.Task[None] | None = None
        self.seconds = 0.0  # of a micro-batch here, there and back, as measured
        self.inbox, self.sending, self.computing = Inbox(self), Sending(self), Computing(self, in_flight)
        endpoint.on("plan", self.inbox.guarded(self._on_plan), 1 << 16)
        endpoint.on("report", self.inbox.guarded(self._on_report), 1 << 16)
        endpoint.on("where", self.inbox.guarded(self._on_where), 1 << 16)
        Donor(endpoint, lambda: self.layout[self.stage], self._state)

    def settle(self, layout: Layout) -> None:
        """Who holds what. A newer one has more peers; nobody has moved."""
        self.layout = layout
        self.roster = [p for peers in in_turn(layout) for p in peers]
        self.known = set(self.roster)
        self.changed.set()

    async def run(self) -> None:
        """Until the last step counts."""
        look = asyncio.create_task(self._look())
        try:
            while not self._over():
                for task in (look, self._leading, self._learning):
                    if task is not None and task.done() and not task.cancelled():
                        task.result()  # what went wrong there is not to be overlooked
                self.sending.check()
                self.changed.clear()
                if not await self._advance():
                    # Not by `wait_for`, which in Python 3.11 may swallow that this peer is told to stop.
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(LOOK_S):
                            await self.changed.wait()
            await self.tell_lead()
            if self._leading is not None:
                await self._leading
        finally:
            for task in (look, self._leading, self._learning):
                if task is not None:
                    task.cancel()
            self.sending.close()
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

    async def _on_plan(self, peer: PeerId, message: Message) -> Message:
        plan = Plan.of_json(message.fields.get("plan"))
        if plan.lead != peer or not self.fits(plan):
            self.puzzled(peer)
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
        plan, step = self.plan, self.step
        running = plan and step and step.when == plan.when
        if plan and step and running and step.digest and step.summed == self.wanted(plan):
            measured = tuple(step.measured[m] for m in self.computing.mine(plan) if m in step.measured)
            ready = Ready(plan.order, step.square, step.loss, step.digest, measured)
        return Report(
            self.born,
            self.fingerprint,
            self.at,
            self._era,
            plan.order if plan else None,
            tuple(step for step in self.work.saved() if step or not self.late),
            self._lost,
            ready,
            min(self.seconds, MOST_SECONDS),
            self.inbox.refuses(),
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

    async def tell_lead(self) -> None:
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
        self.history.take(before, plan, self.me)
        self.inbox.forget(plan.when)
        self._hear_sums(plan)
        if self._learning is not None and before is not None:
            donor = plan.learners.get(self.me)
            other = donor != before.learners.get(self.me) and not self._learning.done()
            if donor is None or other or plan.era != before.era:
                self._learning.cancel()  # what it asks for is not there any more, or of no use
                self._learning = None
        if self.step is not None and self.step.when == plan.when:
            self.sending.again(plan, self.step)
        self.changed.set()

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
            await self.compute(self.work.save, self.at)
            return True
        if self.at < plan.step:
            return await self._catch_up(plan)
        if (plan.step >= self.steps and not plan.measures) or self.at > plan.step:
            return False
        step = self.step
        if step is None or step.when != plan.when:
            if self.me in plan.learners:
                await self.tell_lead()  # it has this step's weights: only the sum is missing
            step = self.step = Step(*plan.when)
            await self.compute(self.work.begin, plan.step)
            return True
        mine = self.computing.mine(plan)
        if (m := self.computing.backward_next(step, mine)) is not None:
            await self.computing.backward(step, m)
        elif (m := self.computing.forward_next(step, mine)) is not None:
            await self.computing.forward(step, m)
        elif len(step.done.intersection(mine)) == len(mine):
            return await self.computing.sum(plan, step, mine)
        else:
            return False
        return True

    # The step's gradient, and taking the step.

    def siblings(self, plan: Plan) -> list[PeerId]:
        return [p for p in self.layout[self.stage] if p in plan.members or p in plan.learners]

    def wanted(self, plan: Plan) -> list[Share]:
        """Whose parts, of which micro-batches, are this stage's gradient."""
        shares = [(p, plan.mine(p, self.stage)) for p in self.layout[self.stage] if p in plan.members]
        return [(p, of) for p, of in shares if of]

    async def _catch_up(self, plan: Plan) -> bool:
        """One step towards the plan's: with the sum that is here, or as a newcomer with the parts that came."""
        key = (self._era, self.at)
        then, commit = self.history.of(key)
        step = self.step
        summed = step is not None and step.when == (*key, TRAIN) and step.digest != ""
        if commit is not None and then is not None and not summed:
            parts = self.history.found(key, self.wanted(then))
            if parts is not None:
                await self.compute(self.work.begin, self.at)
                await self.compute(self.work.total, parts)
                summed = True
        if commit is None or not summed:
            if self.me in plan.learners:
                if commit is not None and then is not None and self._under_way(plan, then):
                    return False
                self.history.forget((plan.era, plan.step))
                self._learning = None  # something is missing: begin anew, with a newer state
            elif not self._lost:
                self._lost = True
                await self.tell_lead()
            return False
        await self.compute(self._apply, commit)
        self.step = None
        if self.me in plan.learners:
            self.history.forget(key)
        self.event("step", step=self.at, loss=commit.loss, grad_norm=commit.norm, members=len(plan.members))
        return True

    def _under_way(self, plan: Plan, then: Plan) -> bool:
        """Whether the parts of an earlier step will come: who made them is there, and does not think it too late."""
        makers = [p for p, _ in self.wanted(then)]
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
                    await self.tell_lead()
                return False
            await self.compute(self._load, plan.step)
        self._era, self.step, self._lost = plan.era, None, False
        return True

    def _load(self, step: int) -> None:
        self.work.load(step)
        self.at, self._unsaved = step, False

    # Newcomers.

    async def _state(self) -> tuple[int, int, bytes]:
        return await self.compute(lambda: (self._era, self.at, self.work.state()))

    async def _learn(self) -> None:
        """The state of a sibling; the parts of the steps since then are coming in meanwhile."""
        self._lost = False
        while self.plan is not None and self.me in self.plan.learners:
            plan, donor = self.plan, self.plan.learners[self.me]
            with contextlib.suppress(Unreachable, Refused):
                least = self.history.first(plan)
                if await self._learn_from(donor, plan.era, least):
                    return
            await asyncio.sleep(LOOK_S)

    async def _learn_from(self, donor: PeerId, era: int, least: int) -> bool:
        try:
            found = await fetch(self.answers, donor, era, least, self.work.state_bytes)
            if found is None:
                return False
            self._era, self.step = 0, None  # whatever interrupts it, this is no state of a plan's
            await self._in_thread(self._restore, *found)
        except BadAnswer:
            self.inbox.cannot_read(donor)
            raise
        except BadValue as e:
            self.answers.bad(donor, STATE, str(e))
            self.inbox.cannot_read(donor)
            return False
        self._era = era
        self.event("fetched", step=self.at, bytes=len(found[1]), source=donor)
        self.changed.set()
        return True

    def _restore(self, step: int, state: bytes) -> None:
        self.work.restore(step, state)
        self.at, self._unsaved = step, False
        if step == self.steps:
            self.work.save(step)

    async def _in_thread(self, do: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, do, *args)

    async def compute(self, do: Callable[..., T], *args: Any) -> T:
        try:
            return await self._in_thread(do, *args)
        except ValueError as e:  # BadPayload, of either codec
            raise ShoalError(
                f"Stage {self.stage + 1} was sent something it cannot read in step {self.at + 1} ({e}): "
                "its neighbours run another version or another run file; give all peers the same."
            ) from e
