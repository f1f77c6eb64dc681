"""Pipelines of toys over real connections: nothing lost, nothing counted twice, whoever goes or comes."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from shoal.net.api import Message, Refused
from shoal.stages.routes import Plan
from tests.patience import limit
from tests.stages.toy import Pond, alone, deal_in_turn


def weights(pond: Pond) -> list[list[float]]:
    return [[pond.toys[p].w for p in stage] for stage in pond.layout]


async def finished(pond: Pond, within_s: float = 600.0) -> None:
    async with asyncio.timeout(within_s):
        await asyncio.gather(*pond.tasks.values())


async def begun(pond: Pond) -> None:
    for stage in pond.layout:
        for peer in stage:
            await pond.start(peer)
    for peer in pond.peers:
        pond.run(peer)


@pytest.mark.parametrize("counts", [[1], [1, 1, 1], [2, 3]])
def test_any_layout_takes_the_steps_of_one_process(counts: list[int]) -> None:
    async def main() -> None:
        pond = Pond(counts, micro_batches=6, steps=4)
        await begun(pond)
        await finished(pond)
        right, losses = alone(len(counts), 6, 4)
        for stage, w in zip(weights(pond), right, strict=True):
            assert stage == pytest.approx([w] * len(stage), abs=1e-12)
            assert len(set(stage)) == 1
        first = pond.layout[0][0]
        assert [e["loss"] for p, k, e in pond.events if k == "step" and p == first] == pytest.approx(losses)
        await pond.close()

    asyncio.run(main())


@pytest.mark.parametrize("who", [(1, 1), (1, 0), (0, 0)], ids=["a sibling", "the first of its stage", "the lead"])
def test_a_peer_lost_in_the_middle_of_a_step_costs_its_micro_batches_again_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, who: tuple[int, int]
) -> None:
    deal_in_turn(monkeypatch)

    async def main() -> None:
        pond = Pond([2, 2, 1], micro_batches=8, steps=6, silent_s=2.0)
        await begun(pond)
        victim = pond.layout[who[0]][who[1]]
        hit = asyncio.Event()
        loop = asyncio.get_running_loop()

        def before(what: str, m: int) -> None:
            time.sleep(0.003)
            toy = pond.toys[victim]
            reached = (
                toy.step == 2 and what == "backward" and len(toy.grads) == 1
            )  # one is summed, others are under way
            if reached and not hit.is_set():  # once: nothing of the victim changes any more
                loop.call_soon_threadsafe(hit.set)
                time.sleep(1.0)  # it does no more before it is killed, however busy the machine is

        for toy in pond.toys.values():
            toy.before = before
        await asyncio.wait_for(hit.wait(), 600)
        await pond.kill(victim)
        await finished(pond)
        right, _ = alone(3, 8, 6)
        for stage, peers, w in zip(weights(pond), pond.layout, right, strict=True):
            left = [x for x, p in zip(stage, peers, strict=True) if p != victim]
            assert left == pytest.approx([w] * len(left), abs=1e-12)
        assert any(e["step"] == 2 for e in pond.seen("rerouted"))
        assert not pond.seen("went_back")
        for p in pond.disks:
            if p != victim:
                steps = [e["step"] for q, k, e in pond.events if k == "step" and q == p]
                assert steps == [1, 2, 3, 4, 5, 6]  # nobody began again
        await pond.close()

    asyncio.run(main())


def test_a_peer_that_comes_back_learns_from_its_sibling_while_the_others_go_on() -> None:
    async def main() -> None:
        pond = Pond([1, 2], micro_batches=6, steps=60, silent_s=2.0)
        await begun(pond)
        for toy in pond.toys.values():
            toy.before = lambda what, m: time.sleep(0.002)
        victim = pond.layout[1][1]
        await pond.until(lambda: pond.peers[victim].at >= 3)
        await pond.kill(victim)
        pond.disks[victim].clear()
        other = pond.peers[pond.layout[1][0]]
        await pond.until(lambda: len(other.plan.members) == 2 if other.plan else False)
        await pond.start(victim)
        pond.run(victim)
        await finished(pond)
        right, _ = alone(2, 6, 60)
        assert weights(pond)[1] == pytest.approx([right[1]] * 2, abs=1e-12)
        assert pond.seen("joined")
        await pond.close()

    asyncio.run(main())


def test_when_all_of_a_stage_are_gone_the_others_wait_and_go_on_with_its_saved_state() -> None:
    async def main() -> None:
        pond = Pond([1, 1, 1], micro_batches=4, steps=12, silent_s=2.0)
        await begun(pond)
        for toy in pond.toys.values():
            toy.before = lambda what, m: time.sleep(0.005)
        victim = pond.layout[1][0]
        await pond.until(lambda: pond.peers[victim].at >= 5)
        await pond.kill(victim)
        await pond.until(lambda: any("stage 2 are gone" in e["text"] for e in pond.seen("waiting")))
        await pond.start(victim)
        pond.run(victim)
        await finished(pond)
        assert pond.seen("went_back")[0]["step"] % 3 == 0
        right, _ = alone(3, 4, 12)
        assert [w for (w,) in weights(pond)] == pytest.approx(right, abs=1e-12)
        await pond.close()

    asyncio.run(main())


def test_more_micro_batches_go_to_the_faster_sibling() -> None:
    async def main() -> None:
        pond = Pond([1, 2], micro_batches=12, steps=6)
        await begun(pond)
        slow = pond.layout[1][1]
        pond.toys[slow].before = lambda what, m: time.sleep(limit(0.03))  # longer than what others add to it
        pond.toys[pond.layout[1][0]].before = lambda what, m: time.sleep(limit(0.01))
        shares = []
        peer = pond.peers[slow]
        take = peer.take

        def noted(plan):  # type: ignore[no-untyped-def]
            shares.append(len(plan.mine(slow, 1)))
            take(plan)

        peer.take = noted  # type: ignore[method-assign]
        await finished(pond)
        assert shares[0] == 6
        assert 2 <= shares[4] <= 4
        await pond.close()

    asyncio.run(main())


def test_only_the_lead_may_say_what_is_done_and_only_neighbours_send() -> None:
    async def main() -> None:
        pond = Pond([1, 1, 1], micro_batches=2, steps=1)
        for stage in pond.layout:
            for peer in stage:
                await pond.start(peer)
        first, _, last = (stage[0] for stage in pond.layout)
        plan = Plan(9, 9, 1, 0, (last,), ((first, last, last),) * 2, lead=last)
        wrong = [
            Message("plan", {"plan": plan.to_json()}),
            Message("act", {"era": 1, "step": 0, "m": 0}, b"x" * 8),
            Message("part", {"era": 1, "step": 0, "of": [0]}, b"x" * 8),
            Message("state", {"era": 1, "least": 0}),
            Message("act", {}),
        ]
        for message in wrong:
            with pytest.raises(Refused):
                await pond.endpoints[first].ask(last, message)
        for endpoint in pond.endpoints.values():
            await endpoint.close()

    asyncio.run(main())


def test_a_peer_with_another_run_is_left_out_and_named() -> None:
    async def main() -> None:
        pond = Pond([1, 2], micro_batches=4, steps=3, silent_s=1.0)
        for stage in pond.layout:
            for peer in stage:
                await pond.start(peer)
        strange = pond.layout[1][1]
        pond.peers[strange].fingerprint = "other"
        for peer in pond.peers:
            pond.run(peer)
        await pond.until(lambda: all(pond.toys[p].w != pond.toys[p]._first() for p in pond.toys if p != strange))
        await asyncio.gather(*(t for p, t in pond.tasks.items() if p != strange))
        assert strange[:8] in pond.seen("left_out")[0]["text"]
        assert pond.toys[strange].w == pond.toys[strange]._first()
        await pond.close()

    asyncio.run(main())


def test_a_peer_that_is_told_to_stop_at_the_moment_something_comes_in_stops() -> None:
    """Python 3.11's `wait_for` forgets a cancellation that comes when what it waits for has just happened."""

    async def main() -> None:
        for turns in range(5):
            pond = Pond([1, 1], micro_batches=2, steps=2)
            peer = pond.layout[0][0]
            await pond.start(peer)  # it waits for the other, which never comes
            pond.run(peer)
            while not pond.peers[peer].changed._waiters:  # type: ignore[attr-defined]
                await asyncio.sleep(0)
            pond.peers[peer].changed.set()
            for _ in range(turns):
                await asyncio.sleep(0)
            pond.tasks[peer].cancel()
            done, _ = await asyncio.wait({pond.tasks[peer]}, timeout=30)
            assert done, f"after {turns} turns of the loop it goes on"
            await pond.close()

    asyncio.run(main())


def test_with_one_peer_a_stage_a_gradient_is_summed_in_the_same_order_whatever_overtakes_what() -> None:
    """In floats another order is another last bit, and a run would not repeat."""
    steps, micro_batches = 3, 4
    forwards, backwards = list[int](), list[int]()

    def late(kind: str) -> Any:
        """The first message of this kind of each step is the last to be taken in."""
        looked = iter(range(1000))

        def check(came: str, payload: Any) -> None:
            if came == kind and next(looked) % micro_batches == 0:
                time.sleep(0.05)

        return check

    async def main() -> None:
        pond = Pond([1, 1, 1], micro_batches, steps)
        for stage in pond.layout:
            await pond.start(stage[0])
        middle, last = (pond.toys[stage[0]] for stage in pond.layout[1:])
        middle.check, last.check = late("grad"), late("act")  # type: ignore[method-assign]
        middle.before = lambda what, m: backwards.append(m) if what == "backward" else None
        last.before = lambda what, m: forwards.append(m)
        for peer in pond.peers:
            pond.run(peer)
        await finished(pond)
        await pond.close()

    asyncio.run(main())
    assert forwards == backwards == [*range(micro_batches)] * steps
