"""A peer that comes while the others go on: whatever gets lost on its way, it computes with them in the end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest

from shoal.errors import TransientError
from shoal.net.api import Refused
from shoal.stages import lead
from shoal.stages.pending import MOST_PARTS, History
from shoal.stages.routes import Commit, Plan
from tests.stages.test_peer import begun, finished, weights
from tests.stages.toy import Pond, alone


async def come_back(steps: int, before_it_runs: Callable[[Pond, str], None]) -> tuple[Pond, str]:
    """A peer of the second stage is lost in step 3 and comes back with nothing, to others that go on."""
    pond = Pond([1, 2], micro_batches=6, steps=steps, silent_s=2.0)
    await begun(pond)
    for toy in pond.toys.values():
        toy.before = lambda what, m: time.sleep(0.001)
    victim = pond.layout[1][1]
    await pond.until(lambda: pond.peers[victim].at >= 2)
    await pond.lose(victim)
    other = pond.peers[pond.layout[1][0]]
    await pond.until(lambda: len(other.plan.members) == 2 if other.plan else False)
    await pond.start(victim)
    before_it_runs(pond, victim)
    pond.run(victim)
    return pond, victim


def right(pond: Pond) -> None:
    assert weights(pond)[1] == pytest.approx([alone(2, 6, pond.steps)[0][1]] * 2, abs=1e-12)


def test_a_newcomer_that_misses_a_plan_fetches_a_newer_state_and_not_the_same_again() -> None:
    lost: list[int] = []

    def lossy(pond: Pond, victim: str) -> None:
        peer, toy = pond.peers[victim], pond.toys[victim]
        take, restore = peer.take, toy.restore

        def taken(plan: Plan) -> None:
            learns = peer.plan is not None and victim in peer.plan.learners and victim in plan.learners
            if not lost and learns and peer.plan is not None and plan.step > peer.plan.step:
                lost.append(plan.step)  # as when its link is replaced by another at this moment
            if plan.step not in lost:  # nor does it come when it is sent again
                take(plan)

        def slow(step: int, state: bytes) -> None:
            until = time.monotonic() + 60
            while not lost and time.monotonic() < until:  # the others take a step meanwhile
                time.sleep(0.001)
            restore(step, state)

        peer.take, toy.restore = taken, slow  # type: ignore[method-assign]

    async def main() -> None:
        pond, _ = await come_back(40, lossy)
        await finished(pond, 120)
        assert lost
        assert pond.seen("joined")
        assert len(pond.seen("fetched")) == 2
        right(pond)
        await pond.close()

    asyncio.run(main())


def test_the_others_wait_with_the_last_state_for_a_newcomer_that_still_fetches_it() -> None:
    over = asyncio.Event()

    def held(pond: Pond, victim: str) -> None:
        learn = pond.peers[victim]._learn

        async def later() -> None:
            await over.wait()
            await learn()

        pond.peers[victim]._learn = later  # type: ignore[method-assign]

    async def main() -> None:
        pond, victim = await come_back(8, held)
        first = pond.peers[pond.layout[0][0]]
        await pond.until(lambda: any("still fetches" in e["text"] for e in pond.seen("waiting")))
        assert first.at == 8
        over.set()
        await finished(pond, 120)
        right(pond)
        assert 8 in pond.disks[victim]
        await pond.close()

    asyncio.run(main())


def test_a_newcomer_that_does_not_come_to_the_end_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lead, "LAST_S", 0.0)

    def held(pond: Pond, victim: str) -> None:
        pond.peers[victim]._learn = lambda: asyncio.sleep(3600)  # type: ignore[method-assign]

    async def main() -> None:
        pond, victim = await come_back(8, held)
        newcomer = pond.tasks.pop(victim)
        await finished(pond, 120)
        with pytest.raises(TransientError, match="others have finished, and this peer has come to step 0 of 8"):
            await asyncio.wait_for(newcomer, 120)
        pond.tasks[victim] = newcomer
        await pond.close()

    asyncio.run(main())


def test_a_newcomer_whose_sum_is_always_the_last_is_waited_for() -> None:
    def slow(pond: Pond, victim: str) -> None:
        toy = pond.toys[victim]
        total = toy.total

        def later(parts: Any) -> float:
            plan = pond.peers[victim].plan
            if plan is not None and victim in plan.learners:
                time.sleep(0.08)  # by then all others are ready
            return total(parts)

        toy.total = later  # type: ignore[method-assign]

    async def main() -> None:
        pond, _ = await come_back(30, slow)
        await finished(pond, 120)
        assert pond.seen("joined")
        right(pond)
        await pond.close()

    asyncio.run(main())


def test_a_history_has_no_gap_and_an_end() -> None:
    def plan(step: int, learns: bool = True) -> Plan:
        commit = Commit(step - 1, 1.0, 0.0, 0.0) if step else None
        return Plan(1, step + 1, 1, step, ("a",), (), {"me": "a"} if learns else {}, commit, "a")

    history = History()
    for step in range(3, 6):
        history.take(plan(step - 1, learns=step > 3), plan(step), "me")
    assert history.first(plan(5)) == 3
    history.take(plan(5), plan(7), "me")
    assert history.first(plan(7)) == 7
    assert history.of((1, 5)) == (None, None)
    for step in range(MOST_PARTS):
        history.add_part(1, step, "a", [0], b"x")
    with pytest.raises(Refused, match="too many"):
        history.add_part(1, MOST_PARTS, "a", [0], b"x")
    history.forget((1, 8))
    history.add_part(1, MOST_PARTS, "a", [0], b"x")
    assert history.found((1, MOST_PARTS), [("a", [0])]) == [b"x"]
    assert history.found((1, MOST_PARTS), [("a", [0, 1])]) is None
