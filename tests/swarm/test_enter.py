"""From a run file to a newcomer that has everything, over real endpoints on loopback."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import xxhash

from shoal.cli.swarm import relay
from shoal.data.index import ShardInfo, write_index
from shoal.errors import DataError, SetupError, ShoalError, TransientError, UsageError
from shoal.journal.rundir import RunDir
from shoal.net.api import Address
from shoal.net.identity import Identity
from shoal.net.relay import token
from shoal.spec import Run, load
from shoal.swarm import enter as entering
from shoal.swarm.blob_folder import add_folder
from shoal.swarm.blob_store import Store
from shoal.swarm.blobs import Blobs
from shoal.swarm.charter import Charter, write_charter
from shoal.swarm.config import NodeConfig, folder_of
from shoal.swarm.control import alone, obey, running, tell
from shoal.swarm.doctor import examine
from shoal.swarm.enter import Heard, enter, visit
from shoal.swarm.entries import revocation
from shoal.swarm.invite import Admission, Invitation
from shoal.swarm.roster import Roster
from tests.net.ends import until

DAY_S = 86400.0


def run_file(folder: Path, fingerprint: str = "f1") -> Path:
    """A run and something like a data set; nobody here reads its tokens."""
    for name in ("train", "eval"):
        (folder / "data" / name).mkdir(parents=True)
        sums = dict.fromkeys(
            ("tokens_xxh3", "docs_xxh3", "sums_xxh3"), xxhash.xxh3_128_hexdigest(f"{fingerprint}-{name}".encode())
        )
        shard = ShardInfo("shard", tokens=100, documents=1, mask_xxh3=None, tokens_bytes=200, **sums)
        write_index(folder / "data" / name, [shard], vocab_size=300, eos_id=0, tokenizer="bytes")
        (folder / "data" / name / "shard-0").write_bytes(name.encode() * 300_000)
    file = folder / "run.yaml"
    file.write_text(
        "name: fishes\nmodel: {dim: 64, layers: 2, heads: 4}\nresources: {processes: 4}\n"
        "data: {train: data/train, eval: data/eval}\ntrain: {steps: 9}\n"
    )
    return file


def config_in(folder: Path, name: str) -> NodeConfig:
    run_dir = RunDir.of("fishes", folder / name)
    return NodeConfig(folder_of(run_dir), name=name, host="127.0.0.1", tcp_only=True)


class First:
    """The organiser's peer, as `create` and a node would make it."""

    def __init__(self, folder: Path, file: Path, serve: bool = True) -> None:
        self.organiser, self.config = Identity.new(), config_in(folder, "first")
        self.run: Run = load(file).run
        me, heard = Identity.at(self.config.identity_file), Heard()
        store = Store(self.config.blobs)
        add = (lambda there: add_folder(store, there, outside=True)) if serve else None
        self.charter, _ = write_charter(self.run, self.organiser.id, add)
        swarm = self.charter.swarm
        admission = Admission.direct(swarm, me.id, self.organiser)
        self.roster = Roster(swarm, self.organiser.id, me, admission, name="first", event=heard)
        self.heard = heard

    @asynccontextmanager
    async def running(self, expires_in_s: float = DAY_S) -> AsyncIterator[Invitation]:
        async with visit(self.config, self.roster, self.heard, self.charter.to_bytes()) as (endpoint, _):
            Blobs(self.config.blobs, endpoint, self.heard)
            where = {self.roster.me.id: endpoint.address()}
            yield Invitation.new(self.charter.swarm, self.organiser, "fishes", time.time() + expires_in_s, where)


def silent(text: str) -> None:
    pass


def test_a_charter_holds_what_all_share_and_nothing_of_the_organisers_machine(tmp_path: Path) -> None:
    file = run_file(tmp_path / "home")
    charter = First(tmp_path, file).charter
    text = charter.to_bytes()
    assert str(tmp_path).encode() not in text
    assert Charter.of(text, charter.swarm) == charter
    with pytest.raises(SetupError):
        Charter.of(text.replace(b"fishes", b"whales"), charter.swarm)
    shared = load(file).run
    mine = charter.local(tmp_path / "x" / "run.yaml", {"inputs/0-train": tmp_path / "t"}, ["resources.processes=2"])
    schedule = shared.train.schedule.model_copy(update={"decay_steps": 1, "warmup_steps": 0})  # of 9 steps
    assert mine.train == shared.train.model_copy(update={"schedule": schedule})
    assert mine.model == shared.model.model_copy(update={"init": "scaled"})
    assert mine.seed == shared.seed
    assert mine.swarm == shared.swarm.model_copy(update={"feedback": 0.95, "outer_lr": 2.5, "outer_momentum": 0.0})
    assert mine.data.train[0].path == str(tmp_path / "t")
    assert mine.resources.processes == 2  # its own, not the organiser's 4
    with pytest.raises(UsageError, match=r"train\.steps"):
        charter.local(tmp_path / "x" / "run.yaml", {}, ["train.steps=100"])


def test_a_newcomer_gets_run_and_data_from_the_peers_and_needs_no_invitation_again(tmp_path: Path) -> None:
    async def play() -> None:
        file = run_file(tmp_path / "home")
        first, config = First(tmp_path, file), config_in(tmp_path, "second")
        async with first.running() as invitation:
            invitation = Invitation.read(invitation.line())
            at = await enter(invitation, config, [tmp_path / "nothing"], silent)
            assert await enter(invitation, config, [], silent) == at  # again: it is all here
            await until(lambda: len(first.roster.summary()) == 2)
        for place, name in (("inputs/0-train", "train"), ("inputs/1-eval", "eval")):
            shard = (at[place] / "shard-0").read_bytes()
            assert shard == (tmp_path / "home" / "data" / name / "shard-0").read_bytes()
        charter = Charter.load(config.charter_file)
        assert charter.local(config.run, at, []).train.steps == 9
        roster = Roster.load(config.roster_file, Identity.load(config.identity_file))
        assert first.roster.me.id in roster.members()
        own = roster.entry(roster.me.id)
        assert own is not None
        assert own.witness is not None
        assert own.witness.by == first.roster.me.id

    asyncio.run(play())


def test_data_that_is_here_already_is_not_fetched(tmp_path: Path) -> None:
    async def play() -> None:
        first, config = First(tmp_path, run_file(tmp_path / "home"), serve=False), config_in(tmp_path, "second")
        run_file(tmp_path / "mine")
        run_file(tmp_path / "other", fingerprint="f2")
        async with first.running() as invitation:
            with pytest.raises(DataError, match="--data"):
                await enter(invitation, config, [tmp_path / "other"], silent)
            at = await enter(invitation, config, [tmp_path / "mine"], silent)
        assert at["inputs/0-train"] == tmp_path / "mine" / "data" / "train"

    asyncio.run(play())


def test_why_one_does_not_get_in_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entering, "REACH_S", 1.0)

    async def refused(invitation: Invitation, folder: str) -> str:
        with pytest.raises(ShoalError) as e:
            await enter(invitation, config_in(tmp_path, folder), [], silent)
        return f"{type(e.value).__name__}: {e.value}"

    async def play() -> None:
        first = First(tmp_path, run_file(tmp_path / "home"))
        async with first.running(expires_in_s=-2000) as invitation:
            told = await refused(invitation, "late")
            assert told.startswith("SetupError")
            assert "not invited" in told
            assert "expired" in told
            good = replace(invitation, ticket=replace(invitation.ticket))
            fresh = Invitation.new(first.charter.swarm, first.organiser, "fishes", time.time() + DAY_S, good.peers)
            assert "names no peer" in await refused(fresh.at({}), "nobody")
            first.roster.revoke(first.organiser, "invite", fresh.id)
            assert "not invited" in await refused(fresh, "revoked")
            gone = {Identity.new().id: Address(tcp=("127.0.0.1:9",))}
            assert (await refused(fresh.at(gone), "gone")).startswith(TransientError.__name__)
            wrong = Invitation.new("ab" * 32, first.organiser, "fishes", time.time() + DAY_S, good.peers)
            assert "not invited" in await refused(wrong, "wrong")

    asyncio.run(play())


def test_the_doctor_names_the_cause(tmp_path: Path) -> None:
    async def play() -> None:
        first = First(tmp_path, run_file(tmp_path / "home"))
        async with first.running() as invitation:
            well = {f.about: f for f in await examine(invitation, config_in(tmp_path, "well"))}
            assert {"invitation", "peer", "clock", "UDP"} <= well.keys()
            assert [well[about].level for about in ("invitation", "peer", "clock")] == ["good"] * 3
            assert "TCP" in well["peer"].text
            # Whoever was only looking is not waited for.
            await until(lambda: first.roster.members() == [first.roster.me.id])
            config = replace(config_in(tmp_path, "ill"), relays=("http://127.0.0.1:9",))
            gone = {Identity.new().id: Address(tcp=("127.0.0.1:9",))}
            old = Invitation.new(first.charter.swarm, first.organiser, "fishes", time.time() - DAY_S, gone)
            ill = {f.about: f for f in await examine(old, config, look_s=1.0)}
            assert [ill[about].level for about in ("invitation", "relay", "swarm")] == ["bad"] * 3
            assert "nothing listens" in ill["relay"].text
            assert "expired" in ill["invitation"].text

    asyncio.run(play())


def test_a_running_node_is_told_by_files_and_only_the_organiser_is_obeyed(tmp_path: Path) -> None:
    first = First(tmp_path, run_file(tmp_path / "home"))
    config, roster = first.config, first.roster
    assert not running(config)
    with alone(config):
        assert running(config)
        with pytest.raises(UsageError), alone(config):
            pass
        victim = Identity.new().id
        for organiser in (Identity.new(), first.organiser):
            word = revocation(roster.swarm, organiser, "peer", victim, [], time.time())
            tell(config, "revoke", revocation=word.to_json())
            assert not obey(config, roster)
            assert (victim in roster.revoked()) == (organiser is first.organiser)
        (config.commands / "1-x.json").write_text("nonsense")
        tell(config, "leave")
        assert obey(config, roster)
        assert not obey(config, roster)
    assert not running(config)


def test_a_relay_for_the_invited_carries_members_only(tmp_path: Path) -> None:
    first = First(tmp_path, run_file(tmp_path / "home"))
    invitation = Invitation.new(first.charter.swarm, first.organiser, "fishes", time.time() + DAY_S, {})
    admit = relay._admit([invitation.line()])
    assert admit(first.roster.me.id, token(first.roster.proof())) == ""
    assert admit(Identity.new().id, token(first.roster.proof())) != ""
    assert admit(first.roster.me.id, "") != ""
