"""Whole peers, with a toy in place of the model: they train, come, go, are cut off, and stay one history."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from shoal.errors import Stopped
from shoal.net.api import Message, PeerId
from shoal.swarm.digests import Told
from shoal.swarm.ranges import count, union
from shoal.swarm.snapshots import Snapshot
from shoal.swarm.trainer_process import Training
from tests.swarm.toy_swarm import Peer, Swarm, swarm

pytestmark = pytest.mark.usefixtures("warm_starts")
QUICK: Any = {"round": "0.5 s"}
SAID_OF_BASE = ("base", "base-failed", "trainer-gone")


def used_once(it: Swarm) -> int:
    """Samples that the history has used; each of them once."""
    chain = it.alive[0].node.chain
    ranges = [part.used for record in chain.past(chain.head.hash) for part in record.took]
    assert sum(map(count, ranges)) == count(union(*ranges)) == chain.head.ledger.done
    return chain.head.ledger.done


def test_peers_train_to_the_end_and_hold_the_same_weights(tmp_path: Path) -> None:
    async def story() -> None:
        async with swarm(tmp_path, 3, steps=60) as it:
            await it.until(lambda: all(p.task.done() for p in it.peers), 60)
            assert [p.task.result() for p in it.peers] == [0, 0, 0]
            nodes = [p.node for p in it.peers]
            heads = {n.chain.head.hash for n in nodes}
            assert len(heads) == 1
            assert len({n.work.digests[n.chain.head.hash] for n in nodes}) == 1
            chain = nodes[0].chain
            parts = [part for record in chain.past(chain.head.hash) for part in record.took]
            assert {part.peer for part in parts} == {p.me for p in it.peers}
            used = [part.used for part in parts]
            assert sum(map(count, used)) == count(union(*used)) > 480 - 3

    asyncio.run(story())


@pytest.mark.slow
def test_the_first_member_dies_and_a_newcomer_takes_over_its_place(tmp_path: Path) -> None:
    async def story() -> None:
        async with swarm(tmp_path, 4, **QUICK) as it:
            await it.until(lambda: it.agree() and it.peers[0].round >= 5)
            leader = next(p for p in it.peers if p.node.leads)
            before = max(p.round for p in it.peers)
            await leader.kill()
            await it.until(lambda: it.agree() and it.alive[0].round >= before + 2)
            newcomer = await it.add()
            await it.until(lambda: it.agree() and len(it.alive) == 4)
            assert any(e["kind"] == "base" for e in newcomer.events)
            chain = it.alive[0].node.chain
            joined = chain.head.round
            await it.until(lambda: it.alive[0].round >= joined + 3)
            past = chain.past(chain.head.hash)
            assert any(part.peer == newcomer.me for record in past for part in record.took)
            used_once(it)

    asyncio.run(story())


async def offer(liar: Peer, folder: Path) -> None:
    """From now on it says that these files are the state after the round before."""
    node = liar.node
    blob, size = await node.blobs.add(folder)
    node._pinned |= {blob}
    record = node.chain.get(node.chain.head.parent)
    said = asdict(Snapshot(record.hash, record.round, blob, size, node.work.digests[record.hash]))

    async def lie(peer: PeerId, message: Message) -> Message:
        return Message("snapshots", {}, json.dumps([said]).encode())

    liar.endpoint.on("snapshots", lie)


def liars_first(newcomer: Peer, honest: Peer, liars: list[Peer]) -> None:
    """Whom it has a link to first is chance otherwise, and before it has heard the history it would begin with round 0.
    To be called before the newcomer takes its first step."""
    linked, newest, known = newcomer.node.talk.linked, newcomer.node.training._newest_state, honest.round

    def seen() -> list[PeerId]:
        now, happened = linked(), {e["kind"] for e in newcomer.events if e.get("sources", True)}
        if not {liar.me for liar in liars} <= set(now):
            return []
        return [peer for peer in now if peer != honest.me or happened >= {"base-failed", "trainer-gone"}]

    async def once_linked() -> tuple[Snapshot | None, list[PeerId]]:
        while not seen() or newcomer.round < known:
            await asyncio.sleep(0.02)
        return await newest()

    newcomer.node.talk.linked = seen  # type: ignore[method-assign]
    newcomer.node.training._newest_state = once_linked  # type: ignore[method-assign]


@pytest.mark.slow
def test_a_newcomer_begins_with_an_honest_state_whatever_others_offer(tmp_path: Path) -> None:
    """One has too many bytes, the other is not what it is said to be; both are newer than the honest one."""

    async def story() -> None:
        async with swarm(tmp_path, 3, steps=1 << 20, **QUICK) as it:
            honest, *liars = it.peers
            await it.until(lambda: it.agree() and bool(honest.node.snapshots.all))
            honest.node.work._save_every = 1 << 30
            at = honest.round
            await it.until(lambda: it.agree() and honest.round >= at + 5)
            large, wrong = tmp_path / "large", tmp_path / "wrong"
            for folder in (large, wrong):
                folder.mkdir()
                (folder / "outer.safetensors").write_bytes(b"nothing")
            (large / "more").write_bytes(bytes(4 << 20))
            await offer(liars[0], large)
            await offer(liars[1], wrong)
            newcomer = await it.add()
            liars_first(newcomer, honest, liars)
            await it.until(lambda: it.agree() and len(it.peers) == 4)
            said = {kind: [e for e in newcomer.events if e["kind"] == kind] for kind in SAID_OF_BASE}
            [failed] = [e for e in said["base-failed"] if e["sources"]]
            assert "where it should have" in failed["why"]
            assert failed["sources"] == [liars[0].me[:8]]
            assert len(said["trainer-gone"]) == 1
            begun = [e["round"] <= at for e in said["base"] if e["sources"]]
            assert begun == [False, True], "the wrong one was tried once"
            sizes = [file.stat().st_size for file in newcomer.node.blobs.store.folder.iterdir()]
            assert max(sizes) < 4 << 20, "what is too large is not fetched"

    asyncio.run(story())


def test_halves_of_a_cut_train_on_and_merge_and_no_sample_is_lost(tmp_path: Path) -> None:
    async def story() -> None:
        async with swarm(tmp_path, 4) as it:
            await it.until(lambda: it.agree() and it.peers[0].round >= 4)
            before, cut = it.peers[0].round, time.monotonic()
            it.cut(it.peers[:1])
            await it.until(lambda: all(p.round >= before + 4 for p in it.peers), 40)
            rounds_s = [p.node.round_s * (p.round - before - 3) for p in it.peers]
            assert max(rounds_s) <= time.monotonic() - cut, "rounds of a branch last as long as others"
            assert len({p.node.chain.head.hash for p in it.peers}) > 1
            it.heal()
            await it.until(lambda: it.agree(), 20)
            chain = it.peers[0].node.chain
            kinds = [record.kind for record in chain.past(chain.head.hash)]
            assert "merge" in kinds
            past = list(chain.past(chain.head.hash))
            assert all(record.took for record in past if record.kind == "round"), [(r.round, r.kind) for r in past]
            merged, joined = it.peers[0].round, time.monotonic()
            await it.until(lambda: it.agree() and it.peers[0].round >= merged + 5)
            assert time.monotonic() - joined > 2 * it.peers[0].node.round_s
            ledger = chain.head.ledger
            kept = count(ledger.free) + sum(count(r) for r in ledger.held.values())
            assert not ledger.away
            assert used_once(it) + kept == ledger.cursor

    asyncio.run(story())


@pytest.mark.slow
def test_a_trainer_that_dies_and_a_peer_that_comes_back_go_on_where_they_were(tmp_path: Path) -> None:
    async def story() -> None:
        async with swarm(tmp_path, 3) as it:
            await it.until(lambda: it.agree() and it.peers[0].round >= 4)
            it.peers[0].node.training.process.kill()
            await it.until(lambda: any(e["kind"] == "trainer-gone" for e in it.peers[0].events))
            at = it.peers[0].round
            await it.until(lambda: it.agree() and it.peers[0].round >= at + 3)
            await it.peers[1].kill()
            await it.peers[1].start()
            it.introduce()
            await it.until(lambda: it.agree(), 20)
            at = it.peers[1].round
            await it.until(lambda: it.peers[1].round >= at + 3)
            past = it.peers[1].node.chain.past(it.peers[1].node.chain.head.hash)
            recent = [record for record in past if record.round > at]
            assert any(part.peer == it.peers[1].me for record in recent for part in record.took)
            used_once(it)

    asyncio.run(story())


@pytest.mark.slow
def test_slow_peers_do_what_they_can_and_nobody_waits_for_them(tmp_path: Path) -> None:
    async def story() -> None:
        async with swarm(tmp_path, 2) as it:
            slow = await it.add(steps_per_s=5.0)
            slower = await it.add(steps_per_s=0.6)  # a step is longer than a round
            await it.until(lambda: it.agree() and it.peers[0].round >= 12, 60)
            chain = it.peers[0].node.chain
            parts = [part for record in chain.past(chain.head.hash) for part in record.took if record.round > 5]
            steps = {p.me: [part.steps for part in parts if part.peer == p.me] for p in it.peers}
            fast = sum(steps[it.peers[0].me]) / len(steps[it.peers[0].me])
            assert steps[slow.me]
            assert len(steps[slower.me]) >= 2
            assert sum(steps[slow.me]) / len(steps[slow.me]) < fast / 3
            assert it.peers[0].node.work.status["busy"] > 0.5
            used_once(it)

    asyncio.run(story())


def test_who_leaves_hands_in_what_it_has_and_the_others_go_on(tmp_path: Path) -> None:
    async def story() -> None:
        async with swarm(tmp_path, 3, **QUICK) as it:
            await it.until(lambda: it.agree() and it.peers[0].round >= 4)
            goes = it.peers[1]
            goes.node.leave()
            await it.until(lambda: goes.task.done(), 20)
            assert isinstance(goes.task.exception(), Stopped)
            await it.until(lambda: it.agree(), 10)
            chain = it.peers[0].node.chain
            record = next(r for r in chain.past(chain.head.hash) if goes.me in r.left)
            assert record.left[goes.me] == "goodbye"
            last = next(r for r in chain.past(chain.head.hash) if any(p.peer == goes.me for p in r.took))
            assert last.round == goes.node.work.begun
            assert goes.me not in chain.head.ledger.held
            used_once(it)

    asyncio.run(story())


@pytest.mark.parametrize("first", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_peer_whose_weights_are_wrong_notices_and_fetches_them_again(tmp_path: Path, first: bool) -> None:
    async def story() -> None:
        async with swarm(tmp_path, 3, wrong=["flip"] * first, **QUICK) as it:
            wrong = it.peers[0] if first else await it.add(attack="flip")
            await it.until(lambda: any(e["kind"] == "differs" for e in wrong.events), 40)
            at = it.peers[0].round
            await it.until(lambda: it.agree() and it.peers[0].round >= at + 2, 40)
            used_once(it)
            assert not [e for p in it.peers if p is not wrong for e in p.events if e["kind"] == "differs"]

    asyncio.run(story())


def said(it: Swarm, *kinds: str) -> list[dict[str, Any]]:
    """By all peers."""
    return [{**e, "by": i} for i, p in enumerate(it.peers) for e in p.events if e["kind"] in kinds]


def were_wrong(it: Swarm) -> set[int]:
    """Who has found out that its weights were: by computing again, or since most have others by then."""
    return {e["by"] for e in said(it, "differs", "split-settled") if e.get("changed", True)}


async def until_settled(it: Swarm, *kinds: str) -> None:
    """These were said, and all have the same weights again, for some rounds."""
    await it.until(lambda: all(said(it, kind) for kind in kinds), 40)
    await it.until(lambda: it.agree() and not any(p.node.training.doubt.split for p in it.peers), 40)
    at = it.peers[0].round
    await it.until(lambda: it.agree() and it.peers[0].round >= at + 2)
    used_once(it)


@pytest.mark.parametrize(
    "wrong",
    [
        ["flip", ""],
        pytest.param(["slow ", "slow flip"], marks=pytest.mark.slow),
        pytest.param(["flip", "flip", "", ""], marks=pytest.mark.slow),
        pytest.param(["", "flip", "", "flip"], marks=pytest.mark.slow),
    ],
)
def test_of_two_halves_that_differ_those_who_were_wrong_find_out(tmp_path: Path, wrong: list[str]) -> None:
    async def story() -> None:
        async with swarm(tmp_path, len(wrong), wrong, **QUICK) as it:
            await until_settled(it, "split")
            assert were_wrong(it) == {i for i, attack in enumerate(wrong) if "flip" in attack}
            names = [p.me[:8] for p in it.peers]
            sides = [
                [name for name, y in zip(names, wrong, strict=True) if x == y]
                for x in sorted({*wrong}, key=wrong.index)
            ]
            assert all(split["sides"] == sides for split in said(it, "split"))
            assert len({e["by"] for e in said(it, "split")}) == len(said(it, "split")), "nobody computes again twice"
            assert not said(it, "split-decided"), "nobody has to give in"

    asyncio.run(story())


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [["insist", ""], ["insist", "insist", "", ""]])
def test_where_both_halves_insist_that_of_the_first_member_counts(tmp_path: Path, wrong: list[str]) -> None:
    async def story() -> None:
        async with swarm(tmp_path, len(wrong), wrong, **QUICK) as it:
            await until_settled(it, "split", "split-decided")
            assert were_wrong(it) == {i for i, attack in enumerate(wrong) if not attack}, "by the rule, not in truth"
            assert {e["by"] for e in said(it, "split-decided")} >= were_wrong(it)

    asyncio.run(story())


@pytest.mark.slow
def test_weights_that_differ_after_the_last_round_are_noticed_before_peers_end(tmp_path: Path) -> None:
    async def story() -> None:
        async with swarm(tmp_path, 2, ["flip at the end"], steps=30, **QUICK) as it:
            await it.until(lambda: all(p.task.done() for p in it.peers), 60)
            assert [p.task.result() for p in it.peers] == [0, 0]
            assert were_wrong(it) == {0}
            head = it.peers[0].node.chain.head.hash
            assert len({p.node.work.digests[head] for p in it.peers}) == 1

    asyncio.run(story())


class Liar(Training):
    @property
    def told(self) -> Told | None:
        true = super().told
        return None if true is None else replace(true, digest="1e" * 32, twice=True)


@pytest.mark.slow
def test_a_liar_in_a_swarm_of_two_costs_the_first_member_one_check_and_no_weights(tmp_path: Path) -> None:
    async def story() -> None:
        async with swarm(tmp_path, 2, **QUICK) as it:
            await it.until(lambda: it.agree() and it.peers[0].round >= 4)
            honest, liar = it.peers
            liar.node.training.__class__ = Liar
            liar.node.training.doubt.tick = lambda: None
            await it.until(lambda: bool(said(it, "split-decided")))
            at = honest.round
            await it.until(lambda: honest.round >= at + 6)
            assert were_wrong(it) == set()
            assert len(said(it, "split")) == 1
            assert honest.node.training.doubt.split is not None, "it is said as long as it lasts"
            recent = [r for r in honest.node.chain.past(honest.node.chain.head.hash) if r.round > at + 1]
            assert all(any(part.peer == honest.me for part in r.took) for r in recent), "it trains on"

    asyncio.run(story())
