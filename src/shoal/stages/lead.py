"""The lead of a pipeline: says who computes what, and when a step counts. Any peer can be it.

It has nothing that the others do not have: its plan is known to all, and the step before is in it. When it is gone, the
first member that is left asks the others for the newest plan they have seen, and goes on from there under a new term.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from shoal.net.answers import LEFT_OUT_S, BadAnswer
from shoal.net.api import Message, PeerId, Refused, Unreachable
from shoal.stages.report import Ready, read_where
from shoal.stages.routes import TRAIN, Commit, Plan, dealt, enough, misread, rerouted

if TYPE_CHECKING:
    from shoal.stages.peer import Peer

ASK_S = 1.0  # how often everybody is asked how they stand; what is urgent they say themselves
TICK_S = 0.1
LAST_S = 900.0  # for a newcomer to fetch the last state, after which the others leave
LEFT = 4.0  # times the silence after which a member that has not said that it has the last step is not waited for


class Lead:
    def __init__(self, peer: Peer) -> None:
        self.peer, self.work = peer, peer.work
        self.plan: Plan | None = None
        self._born: dict[PeerId, str] = {}  # of the members, when they became that
        self._began = time.monotonic()
        self._asking: set[asyncio.Task[None]] = set()
        self._plans: list[Plan] = []  # that others have told when this one took over
        self._waited: dict[tuple[PeerId, str], float] = {}  # for a newcomer's first sum, since when
        self._ended: float | None = None  # when the last step counted
        self._said = ""
        self._warned: set[str] = set()
        self._out: dict[PeerId, float] = {}  # who is left out, until when

    async def run(self) -> None:
        """Until the end, or until somebody else leads."""
        try:
            if not await self._take_over():
                return
            asked = 0.0
            while not self._is_over():
                if self._replaced():
                    return
                if time.monotonic() - asked > ASK_S:
                    asked = time.monotonic()
                    self._ask_all()
                self.peer.reports[self.peer.me] = self.peer.report()
                self._decide()
                self.peer.news.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(TICK_S):
                        await self.peer.news.wait()
        finally:
            for task in self._asking:
                task.cancel()

    async def _take_over(self) -> bool:
        """With the newest plan that anybody here has; False when its lead is here."""
        me = self.peer.me
        self.peer.reports.clear()
        others = [p for p in self.peer.roster if p != me and self.peer.alive(p)]
        await asyncio.gather(*(self._ask(p, plan=True) for p in others))
        plans = [*self._plans, *([self.peer.plan] if self.peer.plan else [])]
        newest = max(plans, key=lambda p: p.order, default=None)
        if newest is None:
            return True
        if newest.lead != me and self.peer.alive(newest.lead):
            self.peer.take(newest)
            return False
        self.plan = newest
        self._born = {p: r.born for p, r in self.peer.reports.items()}
        self._born[me] = self.peer.born
        if newest.lead != me:
            self.peer.event("leads", text=f"This peer leads now, from step {newest.step + 1} on.", step=newest.step)
        self._send(replace(newest, term=newest.term + 1, number=newest.number + 1, lead=me))
        return True

    def _replaced(self) -> bool:
        plan = self.peer.plan
        return plan is not None and plan.lead != self.peer.me and (self.plan is None or plan.order > self.plan.order)

    def _is_over(self) -> bool:
        """All members have the last step and know that all is over (or are gone)."""
        plan = self.plan
        if plan is None or plan.step < self.peer.steps or plan.measures or plan.learners:
            return False
        there = {p for p, report in self.peer.reports.items() if report.at == plan.step and report.order == plan.order}
        return all(p in there or not self.peer.alive(p, LEFT) for p in plan.members)

    def _ask_all(self) -> None:
        for peer in self.peer.roster:
            if peer != self.peer.me and self.peer.alive(peer):
                task = asyncio.create_task(self._ask(peer))
                self._asking.add(task)
                task.add_done_callback(self._asking.discard)

    async def _ask(self, peer: PeerId, plan: bool = False) -> None:
        try:
            asked = Message("where", {"plan": plan})
            report, found = await self.peer.answers.ask(peer, asked, read_where, self.peer.silent_s)
        except BadAnswer:
            self.peer.reports.pop(peer, None)  # nobody knows how it stands: it is as if it were gone
            self.peer.news.set()
            return
        except (Unreachable, Refused):
            return
        self.peer.reports[peer] = report
        self.peer.news.set()
        if plan and found is not None and self.peer.fits(found):
            self._plans.append(found)
        if self.plan is not None and (report.order is None or report.order < self.plan.order):
            self._send_to(peer, self.plan)  # it has just come, or has missed it

    # What is said next.

    def _decide(self) -> None:
        reports, plan = self.peer.reports, self.plan
        here = [p for p in self.peer.roster if self.peer.alive(p) and p in reports and not self._is_out(p)]
        strange = [p for p in here if reports[p].run != self.peer.fingerprint]
        if strange:
            self._warn(f"Peer {strange[0][:8]} has another run file or other data than this one: it is left out.")
            here = [p for p in here if p not in strange]
        if plan is None:
            self._begin(here)
            return
        if plan.step >= self.peer.steps and not plan.measures:
            self._end(plan, here)
            return
        here = self._understood(plan, here)
        gone = [p for p in plan.members if p not in here or reports[p].born != self._born.get(p) or reports[p].lost]
        left = [p for p in plan.members if p not in gone]
        if gone and not enough(plan.members, here):
            self._say(f"Waiting: {len(here)} of {len(plan.members)} peers are here, and more than half are needed.")
        elif gone and not all(self._of_stages(left)):
            self._revive(plan, here, left)
        elif gone:
            names = ", ".join(p[:8] for p in gone)
            routes = rerouted(plan.routes, self._of_stages(left), gone, self._seconds())
            moved = sum(a != b for a, b in zip(routes, plan.routes, strict=True))
            text = f"Peer {names} is gone in step {plan.step + 1}; {moved} micro-batches go to its siblings."
            self.peer.event("rerouted", text=text, step=plan.step, gone=gone, micro_batches=moved)
            learners = {new: donor for new, donor in plan.learners.items() if donor in left and new in here}
            self._send(replace(plan, number=plan.number + 1, members=tuple(left), routes=routes, learners=learners))
        elif all(self._is_ready(plan, p) for p in plan.members) and plan.measures:
            self._measured(plan, here)
        elif all(self._is_ready(plan, p) for p in plan.members) and not self._awaited(plan, here):
            self._next(plan, here)

    def _is_out(self, peer: PeerId) -> bool:
        """For a while, since what it says or sends makes no sense."""
        return self._out.get(peer, 0.0) > time.monotonic() or self.peer.answers.left_out(peer)

    def _understood(self, plan: Plan, here: list[PeerId]) -> list[PeerId]:
        """Without those whose messages their neighbours cannot read; they may come back later."""
        members = [p for p in plan.members if p in here]
        blames = {p: set(self.peer.reports[p].refuses) & set(members) for p in members}
        out = misread(self._of_stages(members), blames, keep=self.peer.me) if any(blames.values()) else set()
        for p in sorted(out):
            self._out[p] = time.monotonic() + LEFT_OUT_S
            text = f"Peer {p[:8]} is left out in step {plan.step + 1}: it and a neighbour cannot read each other."
            self.peer.event("left_out", text=text, step=plan.step, peer=p)
        return [p for p in here if p not in out]

    def _begin(self, here: Sequence[PeerId]) -> None:
        """The first plan, when everybody is here or, after some patience, enough for each stage."""
        patient = time.monotonic() - self._began < 2 * self.peer.silent_s
        missing = [p for p in self.peer.roster if p not in here]
        if missing and (patient or not enough(self.peer.roster, here) or not all(self._of_stages(here))):
            self._say(f"Waiting for {len(missing)} of {len(self.peer.roster)} peers before the first step.")
            return
        step = self._common(here)
        if step is not None:
            self._send(self._fresh(0, here, step))

    def _revive(self, plan: Plan, here: Sequence[PeerId], left: Sequence[PeerId]) -> None:
        """A stage has lost all its peers: go on from the newest state that one of them comes back with."""
        empty = [i + 1 for i, peers in enumerate(self._of_stages(left)) if not peers]
        step = self._common(here)
        if step is None:
            names = ", ".join(str(i) for i in empty)
            self._say(f"Waiting: all peers of stage {names} are gone; training goes on when one of them is back.")
            return
        text = (
            f"Stage {empty[0]} is back with its state of step {step}: all go on from there (they were at {plan.step})."
        )
        self.peer.event("went_back", text=text, step=step, before=plan.step)
        self._send(self._fresh(plan.era, here, step))

    def _fresh(self, era: int, here: Sequence[PeerId], step: int) -> Plan:
        """A new era, from a state that the members hold or have saved."""
        members = tuple(p for p in here if step in self._held(p))
        self._born |= {p: self.peer.reports[p].born for p in here}
        order = self.plan or Plan(0, 0, 0, 0, (), ())
        number = order.number + 1
        phase = 0 if order.measures and order.step == step else TRAIN  # what was measured by those who are gone is lost
        routes = self._routes(step, members, phase)
        plan = Plan(max(1, order.term), number, era + 1, step, members, routes, {}, None, self.peer.me, phase)
        return replace(plan, learners=self._learners(plan, here))

    def _next(self, plan: Plan, here: Sequence[PeerId]) -> None:
        """The step counts; with that goes the plan of the next."""
        reports = self.peer.reports
        odd = self._odd(plan)
        if odd:
            text = (
                f"Peer {odd[0][:8]} has other weights than its siblings before step {plan.step + 1}: it fetches theirs."
            )
            self.peer.event("differs", text=text, step=plan.step, peers=odd)
        squares = sum(self._ready(peers[0]).square for peers in self._of_stages(plan.members))
        loss = sum(self._ready(p).loss for p in self._of_stages(plan.members)[-1])
        commit: Commit = self.work.factor(plan.step, squares, loss)
        learnt = [p for p in plan.learners if p in here and self._has_learnt(plan, p)]
        members = tuple(p for p in self.peer.roster if p in (*plan.members, *learnt) and p not in odd)
        self._born |= {p: reports[p].born for p in learnt}
        step, phase = plan.step + 1, 0 if self.peer.evaluates(plan.step + 1) else TRAIN
        routes, me = self._routes(step, members, phase), self.peer.me
        made = Plan(plan.term, plan.number + 1, plan.era, step, members, routes, {}, commit, me, phase)
        if plan.sums is not None and plan.sums.step == plan.step and not made.measures:
            made = replace(made, sums=plan.sums)  # for those who have missed it
        for p in learnt:
            self.peer.event(
                "joined", text=f"Peer {p[:8]} computes from step {made.step + 1} on.", step=made.step, peer=p
            )
        self._send(replace(made, learners=self._learners(made, here)))

    def _measured(self, plan: Plan, here: Sequence[PeerId]) -> None:
        """All of this phase is measured: the next one, or the step itself."""
        end = min(plan.phase + self.work.micro_batches, self.work.held_out)
        told = (one for p in self._of_stages(plan.members)[-1] for one in self._ready(p).measured)
        found = {one[0]: one for one in told if plan.phase <= one[0] < end}
        sums = self.work.add_up(plan.sums, plan.step, [found[m] for m in sorted(found)])
        phase = end if end < self.work.held_out else TRAIN
        made = replace(plan, number=plan.number + 1, phase=phase, sums=sums)
        made = replace(made, routes=self._routes(plan.step, plan.members, phase))
        self._send(replace(made, learners=self._learners(made, here)))

    def _awaited(self, plan: Plan, here: Sequence[PeerId]) -> list[PeerId]:
        """Newcomers that have this step's weights and lack its sum alone: it comes to them after the members have it,
        so that without patience they would be too late in every step. Once for each, and not for long."""
        now, reports = time.monotonic(), self.peer.reports
        close = [p for p in plan.learners if p in here and (reports[p].era, reports[p].at) == (plan.era, plan.step)]
        missing = [p for p in close if not self._is_ready(plan, p)]
        since = {p: self._waited.setdefault((p, reports[p].born), now) for p in missing}
        return [p for p in missing if now - since[p] < self.peer.silent_s]

    def _end(self, plan: Plan, here: Sequence[PeerId]) -> None:
        """Nobody leaves while a newcomer still fetches the last state; it would have nobody to fetch it from."""
        if not plan.learners:
            return
        now, reports = time.monotonic(), self.peer.reports
        self._ended = self._ended or now
        left = {
            p: donor
            for p, donor in self._learners(plan, here).items()
            if (reports[p].era, reports[p].at) != (plan.era, plan.step) and now - self._ended < LAST_S
        }
        if left != plan.learners:
            self._send(replace(plan, number=plan.number + 1, learners=left))
        elif left:
            names = ", ".join(p[:8] for p in left)
            self._say(f"Waiting: peer {names} still fetches the last state.")

    def _learners(self, plan: Plan, here: Sequence[PeerId]) -> dict[PeerId, PeerId]:
        """Those who are here without the state, each with a sibling that has it."""
        stages = self._of_stages(plan.members)
        of = {p: i for i, peers in enumerate(self.peer.layout) for p in peers}
        kept = self.plan.learners if self.plan is not None and self.plan.era == plan.era else {}
        learners: dict[PeerId, PeerId] = {}
        for p in here:
            refused = self.peer.reports[p].refuses
            donors = [d for d in stages[of[p]] if d not in refused] or stages[of[p]]
            if p not in plan.members and donors:
                learners[p] = kept[p] if kept.get(p) in donors else donors[len(learners) % len(donors)]
        return learners

    # What is known.

    def _common(self, here: Sequence[PeerId]) -> int | None:
        """The newest step whose state every stage has somebody for."""
        held = [set().union(*(self._held(p) for p in peers)) if peers else set() for peers in self._of_stages(here)]
        return max(set.intersection(*held), default=None)

    def _held(self, peer: PeerId) -> set[int]:
        report = self.peer.reports[peer]
        live = {report.at} if self.plan is not None and report.era == self.plan.era else set()
        return live | set(report.saved)

    def _ready(self, peer: PeerId) -> Ready:
        found = self.peer.reports[peer].ready
        assert found is not None  # it was asked whether it is
        return found

    def _is_ready(self, plan: Plan, peer: PeerId) -> bool:
        ready = self.peer.reports[peer].ready
        return ready is not None and ready.order == plan.order

    def _has_learnt(self, plan: Plan, peer: PeerId) -> bool:
        """It has the weights that its sibling has, and the sum of this step."""
        return self._is_ready(plan, peer) and self._ready(peer).digest == self._ready(plan.learners[peer]).digest

    def _odd(self, plan: Plan) -> list[PeerId]:
        """Members whose weights are not those of the first of their stage."""
        digest = {p: self._ready(p).digest for p in plan.members}
        return [p for peers in self._of_stages(plan.members) for p in peers if digest[p] != digest[peers[0]]]

    def _of_stages(self, peers: Sequence[PeerId]) -> list[list[PeerId]]:
        return [[p for p in stage if p in peers] for stage in self.peer.layout]

    def _seconds(self) -> dict[PeerId, float]:
        return {p: r.seconds for p, r in self.peer.reports.items()}

    def _routes(self, step: int, members: Sequence[PeerId], phase: int) -> tuple[tuple[PeerId, ...], ...]:
        """After the last step there is nothing left to do but to measure."""
        if step >= self.peer.steps and phase == TRAIN:
            return ()
        return dealt(self.work.micro_batches, self._of_stages(members), self._seconds())

    def _send(self, plan: Plan) -> None:
        self.plan = plan
        self._said = ""
        self.peer.take(plan)
        for peer in self.peer.roster:
            if peer != self.peer.me and self.peer.alive(peer):
                self._send_to(peer, plan)

    def _send_to(self, peer: PeerId, plan: Plan) -> None:
        message = Message("plan", {"plan": plan.to_json()})
        self.peer.sending.outbox(peer, control=True).put(message, lambda: self.plan is plan and self.peer.alive(peer))

    def _say(self, text: str) -> None:
        """What is waited for, once."""
        if text != self._said:
            self._said = text
            self.peer.event("waiting", text=text)

    def _warn(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            self.peer.event("left_out", text=text)
