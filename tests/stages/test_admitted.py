"""A cut model in a swarm: who came by an invitation and holds a stage by the organiser's word takes part, no other."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.cli.main import main as cli
from shoal.errors import SetupError, Stopped
from shoal.net.api import Message, Refused, Unreachable
from shoal.net.identity import Identity
from shoal.spec import dump, load
from shoal.stages.layers import StageLayers
from shoal.stages.report import Report
from shoal.stages.routes import Plan
from shoal.swarm.control import tell
from shoal.swarm.enter import Heard, visit
from shoal.swarm.entries import revocation
from shoal.swarm.invite import Admission
from shoal.swarm.layout import LAYOUT, SignedLayout
from shoal.swarm.roster import Roster
from shoal.values import BadValue
from tests.stages.admitted import LIMIT_S, Cut
from tests.stages.test_layers import CPU, a_run
from tests.stages.toy import alone
from tests.train.tiny import make_data, train_on


def right(cut: Cut, steps: int, *who: str) -> None:
    weights, _ = alone(2, cut.micro_batches, steps)
    for name in who:
        assert cut.toys[name].w == pytest.approx(weights[cut.toys[name].stage], abs=1e-12)


def revoke(cut: Cut, who: str) -> None:
    organiser = Identity.load(cut.config("founder").organiser_file)
    new = revocation(cut.charter.swarm, organiser, "peer", cut.id(who), [], time.time())
    tell(cut.config("founder"), "revoke", revocation=new.to_json())


def test_peers_that_came_by_invitation_take_the_steps_of_one_process(tmp_path: Path) -> None:
    cut = Cut(tmp_path, peers=3)

    async def main() -> None:
        async with cut.running("b", "c"):
            assert await cut.ended("founder", "b", "c") == {"founder": None, "b": None, "c": None}
        right(cut, 6, "founder", "b", "c")
        signed = {cut.config(who).layout_file.read_bytes() for who in ("founder", "b", "c")}
        assert len(signed) == 1
        layout = SignedLayout.of(signed.pop(), cut.charter)
        assert layout.stages == ((cut.id("founder"), cut.id("c")), (cut.id("b"),))
        status = json.loads(cut.config("b").status_file.read_text())
        assert (status["step"], status["steps"], status["stages"]) == (6, 6, 2)
        assert {m["name"]: m["stage"] for m in status["members"]} == {"founder": 1, "c": 1, "b": 2}

    asyncio.run(main())


def test_a_peer_that_was_killed_is_started_again_and_all_go_on(tmp_path: Path) -> None:
    cut = Cut(tmp_path, peers=2, steps=24, crawl_after=4)

    async def main() -> None:
        async with cut.running("b"):
            await cut.until(lambda: len(cut.seen("step", "b")) >= 4)
            await cut.kill("b")
            await cut.until(lambda: cut.said("all peers of stage 2 are gone"))
            cut.free.set()
            cut.start("b")  # needs no invitation
            assert await cut.ended("founder", "b") == {"founder": None, "b": None}
        right(cut, 24, "founder", "b")
        assert cut.seen("went_back")[0]["step"] % 3 == 0

    asyncio.run(main())


def test_whoever_comes_later_becomes_a_sibling_and_never_takes_the_others_back(tmp_path: Path) -> None:
    cut = Cut(tmp_path, peers=2, steps=24, crawl_after=4)

    async def main() -> None:
        async with cut.running("b"):
            await cut.until(lambda: len(cut.seen("step", "b")) >= 2)
            assert await cut.join("c") == 0
            before = cut.config("b").layout_file.read_bytes()
            cut.start("c")
            await cut.until(lambda: cut.seen("joined"))
            assert cut.seen("joined")[0]["peer"] == cut.id("c")
            cut.free.set()
            await cut.ended("founder", "b", "c")
        right(cut, 24, "founder", "b", "c")
        assert not cut.seen("went_back")
        layout, old = (
            SignedLayout.of(data, cut.charter) for data in (cut.config("b").layout_file.read_bytes(), before)
        )
        assert layout.extends(old)
        assert layout.late(cut.id("c"))
        assert not layout.late(cut.id("b"))

    asyncio.run(main())


def test_a_newcomer_without_the_state_is_no_reason_to_begin_again(tmp_path: Path) -> None:
    """The only one who has the layers of stage 2 is gone before the newcomer has fetched them: all wait for it."""
    cut = Cut(tmp_path, peers=3, steps=24, crawl_after=4)

    async def main() -> None:
        make, gate, loop = cut.make, asyncio.Event(), asyncio.get_running_loop()

        def later(who: str, stage: int) -> Any:
            asyncio.run_coroutine_threadsafe(gate.wait(), loop).result()
            return make(who, stage)

        async with cut.running("b", "c"):
            await cut.until(lambda: len(cut.seen("step", "b")) >= 4)
            cut.make = later
            assert await cut.join("d") == 0
            cut.start("d")
            layout = cut.config("d").layout_file
            await cut.until(lambda: layout.exists() and cut.id("d") in layout.read_text())
            await cut.kill("b")
            await cut.until(lambda: cut.said("all peers of stage 2 are gone"))
            gate.set()
            await cut.until(lambda: cut.seen("start", "d"))
            before = len(asked)
            await cut.until(lambda: len(asked) > before + 3)  # the lead has heard what the newcomer has
            assert not cut.seen("went_back")
            cut.make = make
            cut.free.set()
            cut.start("b")
            await cut.ended("founder", "b", "c", "d")
        right(cut, 24, "founder", "b", "c", "d")
        assert cut.seen("went_back")[0]["step"] >= 3

    asked: list[str] = []
    told = Report.to_json

    def noted(report: Report) -> Any:
        if report.saved == ():
            asked.append(report.born)
        return told(report)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Report, "to_json", noted)
        asyncio.run(main())


def test_who_is_revoked_is_gone_for_the_others_and_does_not_come_back(tmp_path: Path) -> None:
    cut = Cut(tmp_path, peers=3, steps=24, crawl_after=4)

    async def main() -> None:
        async with cut.running("b", "c"):
            await cut.until(lambda: len(cut.seen("step", "c")) >= 2)
            revoke(cut, "c")
            ended = await cut.ended("c")
            assert "the organiser has revoked this peer" in str(ended["c"])
            cut.start("c")
            assert "the organiser has revoked this peer" in str((await cut.ended("c"))["c"])
            cut.free.set()
            await cut.ended("founder", "b")
        right(cut, 24, "founder", "b")
        assert any(cut.id("c") in fields["gone"] for fields in cut.seen("rerouted"))

    asyncio.run(main())


def test_a_peer_that_leaves_is_missed_at_once_and_comes_back(tmp_path: Path) -> None:
    cut = Cut(tmp_path, peers=2, steps=24, crawl_after=4)

    async def main() -> None:
        async with cut.running("b"):
            await cut.until(lambda: len(cut.seen("step", "b")) >= 4)
            tell(cut.config("b"), "leave")
            assert isinstance((await cut.ended("b"))["b"], Stopped)
            await cut.until(lambda: cut.said("all peers of stage 2 are gone"))
            cut.free.set()
            cut.start("b")
            await cut.ended("founder", "b")
        right(cut, 24, "founder", "b")

    asyncio.run(main())


def test_who_only_visits_gets_no_stage(tmp_path: Path) -> None:
    """`join --dry-run` and `join --no-start` have links, too."""

    cut = Cut(tmp_path, peers=2)

    async def main() -> None:
        async with cut.running():
            await cut.until(lambda: cut.said("1 of 2 are here"))
            assert await cut.join("c", "--dry-run") == 0
            assert await cut.join("c") == 0
            assert await cut.join("b") == 0
            cut.start("b")
            await cut.ended("founder", "b")
            layout = SignedLayout.of(cut.config("b").layout_file.read_bytes(), cut.charter)
            assert layout.peers == [cut.id("founder"), cut.id("b")]

    asyncio.run(main())


@asynccontextmanager
async def talking(cut: Cut, who: str) -> AsyncIterator[Any]:
    """A member whose program was changed: its links and its key are true, what it says is the test's."""
    config, heard = cut.config(who), Heard()
    roster = Roster.load(config.roster_file, Identity.load(config.identity_file), heard)
    async with visit(config, roster, heard) as (endpoint, _):
        yield endpoint


async def asking(endpoint: Any, peer: str) -> None:
    """For as long as there are answers."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            await endpoint.ask(peer, Message("where"), 5.0)
            await asyncio.sleep(0.02)


def test_a_stage_is_nobodys_own_word(tmp_path: Path) -> None:
    """A member makes up a layout in which it holds the first stage; then it acts as another stage than its own."""

    cut = Cut(tmp_path, peers=3, steps=200, crawl_after=0)

    async def main() -> None:
        async with cut.running("b"):
            assert await cut.join("liar") == 0
            me = Identity.load(cut.config("liar").identity_file)
            mine = SignedLayout.new(cut.charter.swarm, me, [me.id, cut.id("b"), cut.id("founder")], 2)
            organiser = Identity.load(cut.config("founder").organiser_file)
            second = SignedLayout.new(cut.charter.swarm, organiser, [me.id, cut.id("b"), cut.id("founder")], 2)
            asked: list[str] = []
            later: set[str] = set()

            async def answer(peer: str, message: Message) -> Message:
                """First its own layout, then that it waits, then a second beginning: signed, but no longer true."""
                if message.fields["known"]:
                    later.add(peer)
                    return Message(LAYOUT, {}, second.to_bytes())
                asked.append(peer)
                return Message(LAYOUT, {}, mine.to_bytes() if len(set(asked)) < 2 else b"")

            async with talking(cut, "liar") as endpoint:
                endpoint.on(LAYOUT, answer, 0)
                await cut.until(lambda: len(cut.toys) == 2)
                layout = SignedLayout.of(cut.config("b").layout_file.read_bytes(), cut.charter)
                assert layout.stage_of(me.id) == 0
                assert layout.stages[0][0] == cut.id("founder")
                liar = layout.stages[0][1]
                assert liar == me.id
                where = {"era": 1, "step": 0, "phase": 0, "m": 0}
                anothers = Plan(9, 9, 1, 0, tuple(layout.peers), (), {}, None, cut.id("founder"))
                routed = Plan(9, 9, 1, 0, tuple(layout.peers), ((cut.id("b"), me.id),) * 4, {}, None, me.id)
                for to, message, why in (
                    ("b", Message("grad", where, b"x" * 8), "no message for this stage"),
                    ("founder", Message("grad", where, b"x" * 8), "no message for this stage"),
                    ("b", Message("part", {"era": 1, "step": 0, "of": [0]}, b"x" * 8), "no sibling"),
                    ("b", Message("state", {"era": 1, "least": 0}), "no sibling"),
                    ("b", Message("plan", {"plan": routed.to_json()}), "for this layout"),
                    ("b", Message("plan", {"plan": anothers.to_json()}), "comes from its lead"),
                ):
                    with pytest.raises(Refused, match=why):
                        await endpoint.ask(cut.id(to), message)
                await cut.until(lambda: {cut.id("founder"), cut.id("b")} <= later)
                assert (await endpoint.ask(cut.id("b"), Message("where"))).kind == "here"
                revoke(cut, "liar")
                with pytest.raises((Refused, Unreachable)):
                    await asking(endpoint, cut.id("b"))
                assert not any(task.done() for task in cut.tasks.values())
                for who in ("founder", "b"):
                    known = SignedLayout.of(cut.config(who).layout_file.read_bytes(), cut.charter)
                    assert known.stages == layout.stages
        named = (
            (cut.config("founder").folder / "events.jsonl").read_text(),
            (cut.config("b").folder / "events.jsonl").read_text(),
        )
        assert any("a layout that its author has not signed" in text for text in named)

    asyncio.run(main())


def test_a_member_without_a_stage_is_not_listened_to(tmp_path: Path) -> None:
    cut = Cut(tmp_path, peers=2, steps=24, crawl_after=4)

    async def main() -> None:
        async with cut.running("b"):
            assert await cut.join("c") == 0
            await cut.until(lambda: cut.seen("step", "b"))
            async with talking(cut, "c") as endpoint:
                for kind in ("plan", "report", "where", "act", "grad", "part"):
                    with pytest.raises(Refused, match="no peer of this pipeline"):
                        await endpoint.ask(cut.id("b"), Message(kind))
                for kind in ("state", "piece"):
                    with pytest.raises(Refused, match="no sibling"):
                        await endpoint.ask(cut.id("b"), Message(kind))

    asyncio.run(main())


def test_a_forged_admission_gets_no_link_and_no_stage(tmp_path: Path) -> None:
    cut = Cut(tmp_path, peers=2)

    async def main() -> None:
        async with cut.running():
            await cut.until(lambda: cut.said("1 of 2 are here"))
            stranger, heard = Identity.new(), Heard()
            config, charter = cut.config("founder"), cut.charter
            forged = Admission.direct(charter.swarm, stranger.id, stranger)  # its own word for itself
            roster = Roster(charter.swarm, charter.organiser, stranger, forged, event=heard)
            entry = Roster.load(config.roster_file, Identity.load(config.identity_file)).entry(cut.id("founder"))
            assert entry is not None
            there = replace(config, folder=tmp_path / "stranger", port=0)
            async with visit(there, roster, heard) as (endpoint, _):
                endpoint.on(LAYOUT, lambda peer, message: asyncio.sleep(0, Message(LAYOUT)), 0)
                endpoint.know(cut.id("founder"), entry.address)
                await cut.until(lambda: heard.of("link_denied"))
                with pytest.raises(Unreachable):
                    await endpoint.ask(cut.id("founder"), Message(LAYOUT, {"known": 0}), 0.5)
            assert await cut.join("b") == 0
            cut.start("b")
            await cut.ended("founder", "b")
            layout = SignedLayout.of(cut.config("b").layout_file.read_bytes(), cut.charter)
            assert stranger.id not in layout.peers

    asyncio.run(main())


def test_an_organiser_that_has_lost_the_layout_takes_the_one_that_it_has_signed(tmp_path: Path) -> None:
    cut = Cut(tmp_path, peers=2, steps=24, crawl_after=4)

    async def main() -> None:
        async with cut.running("b"):
            await cut.until(lambda: len(cut.seen("step", "b")) >= 4)
            await cut.kill("founder")
            file = cut.config("founder").layout_file
            signed = file.read_bytes()
            file.unlink()
            cut.free.set()
            cut.start("founder")
            await cut.ended("founder", "b")
            assert file.read_bytes() == signed
        right(cut, 24, "founder", "b")

    asyncio.run(main())


def test_a_layout_is_what_the_organiser_has_signed_for_this_swarm_and_this_cut(tmp_path: Path) -> None:
    cut = Cut(tmp_path, peers=2)
    charter, organiser = cut.charter, Identity.load(cut.config("founder").organiser_file)
    a, b, c = (Identity.new().id for _ in range(3))
    good = SignedLayout.new(charter.swarm, organiser, [a, b], 2)
    assert SignedLayout.of(good.to_bytes(), charter) == good
    moved = {**json.loads(good.to_bytes()), "stages": [[b], [a]]}
    more = {**json.loads(good.to_bytes()), "stages": [[a, c], [b]]}

    def signed(stages: list[list[str]], first: list[int]) -> bytes:
        return SignedLayout._signed(charter.swarm, organiser, tuple(map(tuple, stages)), tuple(first)).to_bytes()

    for bad, why in (
        (SignedLayout.new(charter.swarm, Identity.new(), [a, b], 2).to_bytes(), "not signed"),
        (SignedLayout.new("ab" * 32, organiser, [a, b], 2).to_bytes(), "not signed"),
        (json.dumps(moved).encode(), "not signed"),
        (json.dumps(more).encode(), "not signed"),
        (signed([[a], [b], [c]], [1, 1, 1]), "each of 2 stages"),
        (signed([[a, b]], [2]), "each of 2 stages"),
        (signed([[a, b], []], [2, 0]), "each of 2 stages"),
        (signed([[a], [b]], [1, 2]), "each of 2 stages"),
        (signed([[a], [b]], [1]), "each of 2 stages"),
        (signed([[a, b], [b]], [1, 1]), "two places"),
        (b"[]", "JSON object"),
        (b"{}", "no list"),
        (b'{"stages": [["x"]], "first": [1], "signature": ""}', "64 hexadecimal"),
    ):
        with pytest.raises(BadValue, match=why):
            SignedLayout.of(bad, charter)
    grown = good.with_more(charter.swarm, organiser, {c: 1})
    assert grown.stages == ((a,), (b, c))
    assert grown.extends(good)
    assert not good.extends(grown)
    assert not good.extends(good)
    assert not SignedLayout.new(charter.swarm, organiser, [b, a, c], 2).extends(good)  # nobody moves
    file = cut.config("founder").layout_file
    file.write_text(json.dumps(moved))
    with pytest.raises(SetupError, match=r"layout\.json is not what the swarm's organiser has signed"):
        SignedLayout.load(file, charter)


def test_a_real_model_over_invited_peers_has_the_bits_of_one_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.set_num_threads(1)  # as the plain run
    data, saved = make_data(tmp_path / "data"), {"checkpoint": {"every": 3}}
    stages = {"count": 2, "activations": "fp32"}
    (tmp_path / "run.yaml").write_text(dump(a_run(data, **saved, **{"swarm.stages": stages})))
    cut = Cut(tmp_path, peers=2, file=tmp_path / "run.yaml")
    fingerprints: list[str] = []

    def make(who: str, stage: int) -> Any:
        config = cut.config(who)
        work = StageLayers(load(config.run).run, stage, config.run_dir.path, CPU)
        fingerprints.append(work.fingerprint)
        return work, work.fingerprint

    cut.make = make

    async def main() -> None:
        async with cut.running("b"):
            assert await cut.ended("founder", "b") == {"founder": None, "b": None}

    asyncio.run(main())
    assert len(set(fingerprints)) == 1
    folders = [str(cut.config(who).run_dir.path) for who in ("b", "founder")]
    plain = train_on(a_run(data, **{"checkpoint.every": 3}), tmp_path / "plain", 1)
    for step in (3, 6):
        whole = tmp_path / f"whole-{step}"
        assert cli(["checkpoint", "join", *folders, str(whole), "--step", str(step)]) == 0
        assert cli(["checkpoint", "diff", f"{whole}@{step}", f"{plain.path}@{step}"]) == 0  # moments too
    assert cut.word("status", "tiny", who="b") == 0
    said = capsys.readouterr().out
    assert "tiny: step 6 of 6, 2 stages, 2 peers, loss " in said
    assert "this peer is not running" in said
