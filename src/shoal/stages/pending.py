"""What has come in of steps that are not taken here yet: their plans, their commits and the siblings' gradients.

A newcomer fetches a state while the others go on, and takes the steps since then from this. So it must be without
gaps: a plan that got lost begins it anew, with that plan the newcomer needs a newer state. Asked for the old one
again, its sibling would give the same snapshot, and the same gap would follow it, for ever.
"""

from __future__ import annotations

from shoal.net.api import PeerId, Refused
from shoal.stages.routes import Commit, Plan

MOST_PARTS = 64  # of one sibling that wait: steps that a newcomer is behind, at most
Key = tuple[int, int]  # era, committed steps before this one
Share = tuple[PeerId, list[int]]  # whose gradient, of which micro-batches


class History:
    def __init__(self) -> None:
        self._parts: dict[tuple[int, int, PeerId], tuple[list[int], bytes]] = {}
        self._plans: dict[Key, Plan] = {}  # the last of each step
        self._commits: dict[Key, Commit] = {}

    def add_part(self, era: int, step: int, peer: PeerId, of: list[int], body: bytes) -> None:
        held = sum(1 for key in self._parts if key[2] == peer)
        if (era, step, peer) not in self._parts and held >= MOST_PARTS:
            raise Refused("too many parts wait here")
        self._parts[era, step, peer] = of, body

    def take(self, before: Plan | None, plan: Plan, me: PeerId) -> None:
        """`before`: the plan that `me` had until now."""
        if me not in plan.learners:
            self.forget((plan.era, plan.step - 1))
        elif not (before is not None and before.era == plan.era and me in before.learners):
            self.forget((plan.era, plan.step))  # it begins to learn
        elif plan.step - before.step > 1:
            self.forget((plan.era, plan.step))  # one in between got lost
        if not plan.measures:  # its routes say nothing of the step's gradient
            self._plans[plan.era, plan.step] = plan
        if plan.commit is not None:
            self._commits[plan.era, plan.commit.step] = plan.commit

    def forget(self, before: Key) -> None:
        """What is of steps before this one."""
        self._parts = {k: v for k, v in self._parts.items() if k[:2] >= before}
        self._plans = {k: v for k, v in self._plans.items() if k >= before}
        self._commits = {k: v for k, v in self._commits.items() if k >= before}

    def first(self, plan: Plan) -> int:
        """The oldest step from which on everything has come in, up to the plan's."""
        return min((step for era, step in self._plans if era == plan.era), default=plan.step)

    def of(self, key: Key) -> tuple[Plan | None, Commit | None]:
        return self._plans.get(key), self._commits.get(key)

    def found(self, key: Key, wanted: list[Share]) -> list[bytes] | None:
        """The gradients that make up a stage's; None while one of them is missing."""
        parts = []
        for peer, of in wanted:
            part = self._parts.get((*key, peer))
            if part is None or part[0] != of:
                return None
            parts.append(part[1])
        return parts
