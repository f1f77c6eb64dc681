"""A swarm of six of which one answers nonsense: the others, and who comes new, train as if it were not there."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.islands.nonsense import Bus, Made, Nonsense
from tests.islands.virtual import virtual_time
from tests.swarm.toy_swarm import swarm
from tests.swarm.virtual_swarm import Member

HONEST, NEWCOMER, SMALLEST, LARGEST = (2, 3, 4, 5, 6), 7, 8, 9  # numbers of their keys
COMES_S, ENDS_S = 8.0, 15.0  # virtual


async def trained(folder: Path, wrong: str = "", number: int = SMALLEST) -> tuple[Bus, list[Member], Member | None]:
    """Five honest peers, a newcomer after a while, and perhaps one more from the beginning on."""
    bus = Bus()
    honest = [Member(bus, folder, n) for n in HONEST]
    odd = Member(bus, folder, number, wrong) if wrong else None
    for member in [*honest, *([odd] if odd else [])]:
        await member.start()
    await asyncio.sleep(COMES_S)
    honest.append(Member(bus, folder, NEWCOMER))
    await honest[-1].start()
    await asyncio.sleep(ENDS_S - COMES_S)
    assert bus.broken == []  # no handler has failed of anything it was told
    for member in [*honest, *([odd] if odd else [])]:
        assert member.task is not None
        assert not member.task.done(), member.task
        assert not member.of("task-failed"), member.of("task-failed")
        await member.stop()
    return bus, honest, odd


def weights(honest: list[Member]) -> dict[int, set[Any]]:
    """By round, what each who has computed it has."""
    found: dict[int, set[Any]] = {}
    for member in honest:
        for name, digest in member.node.work.digests.items():
            found.setdefault(member.node.chain.get(name).round, set()).add(digest)
    return found


@pytest.mark.slow
def test_weights_with_a_member_that_says_nonsense_only_are_those_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with virtual_time(monkeypatch) as run:
        _, alone, _ = run(trained(tmp_path / "alone"))
    with virtual_time(monkeypatch) as run:
        bus, beside, odd = run(trained(tmp_path / "beside", "all"))
    assert odd is not None
    assert odd.id < min(member.id for member in beside)  # it would be the first member
    right, found = weights(alone), weights(beside)
    assert max(found) == max(right) > 8
    assert found == right  # to the last bit, in every round
    assert all(len(digests) == 1 for digests in found.values())
    for one in (alone, beside):
        assert one[-1].id in one[0].node.chain.head.members  # the newcomer has come in
        assert one[-1].of("base")[-1]["round"] > 0  # with a state of others
    assert any(whom == odd.id and what == "snapshots" for _, whom, what in bus.asked)
    for member in beside:
        assert any(e.get("peer") == odd.id for e in member.of("nonsense", "refused", "muted", "liar"))


def test_a_member_whose_answers_are_nonsense_is_named_once_asked_less_and_keeps_nobody_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with virtual_time(monkeypatch) as run:
        bus, honest, odd = run(trained(tmp_path, "answers", LARGEST))
    assert odd is not None
    newcomer, head = honest[-1], honest[0].node.chain.head
    assert newcomer.id in head.members
    assert head.round >= 10  # nobody waits for what it has trained
    for digests in weights(honest).values():
        assert len(digests) == 1
    took = {part.peer for record in honest[0].node.chain.past(head.hash) for part in record.took}
    # What it trained can be fetched from nobody; the newcomer may have come too late to have trained.
    assert {member.id for member in honest[:-1]} <= took <= {member.id for member in honest}
    for member in honest:
        named = [e for e in member.of("nonsense") if e["peer"] == odd.id]
        assert len(named) == 1
        assert "makes no sense" in named[0]["text"]
        asked = sum(1 for by, whom, _ in bus.asked if by == member.id and whom == odd.id)
        most = max(sum(1 for by, whom, _ in bus.asked if by == member.id and whom == p.id) for p in honest)
        assert asked < most


@pytest.mark.slow  # real processes and sockets: 20 s
def test_over_real_links_a_newcomer_gets_in_beside_one_that_answers_nonsense(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm(tmp_path, 2) as it:
            honest = list(it.peers)
            await it.until(lambda: all(peer.round >= 1 for peer in honest))
            odd = await it.add(wrap=lambda endpoint: Nonsense(endpoint, Made(11, drip_s=60.0)))
            await it.until(lambda: all(peer.round >= 5 for peer in honest))
            newcomer = await it.add()
            honest.append(newcomer)
            await it.until(lambda: all(newcomer.me in peer.node.chain.head.members for peer in honest), 60)
            came = newcomer.round
            await it.until(
                lambda: all(newcomer.node.work.begun > came and peer.round > came + 2 for peer in honest), 60
            )
            heads = set.intersection(*(set(peer.node.work.digests) for peer in honest))
            assert heads
            for name in heads:
                assert len({peer.node.work.digests[name] for peer in honest}) == 1
            assert all(not peer.task.done() for peer in it.peers)
            named = [e for peer in honest for e in peer.events if e["kind"] == "nonsense"]
            assert {e["peer"] for e in named} == {odd.me}

    asyncio.run(main())
