"""What a charter may say: a hostile inviter against a joiner that is as it was shipped."""

from __future__ import annotations

import asyncio
import copy
import hashlib
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import pytest

from shoal.cli.main import main
from shoal.cli.swarm import join
from shoal.errors import DataError, SetupError, SpecError, UsageError
from shoal.net.identity import Identity, canonical
from shoal.spec import Run, load
from shoal.spec.drivers import obeyed, refusals
from shoal.spec.names import Name
from shoal.swarm.charter import FORMAT, Charter, Input, covers, write_charter
from shoal.swarm.enter import enter
from shoal.swarm.invite import Admission
from shoal.swarm.proposal import CUT, PLACE, STAGES, TIME, WHOLE, WORD, Table, not_own, values_of
from shoal.swarm.roster import Roster
from tests.spec.settings import LEAVES, another, changes, least, put
from tests.swarm.test_cli import LOCAL, served
from tests.swarm.test_enter import First, config_in, run_file, silent

ORGANISER = Identity.new().id
PLACES = ("inputs/0-train", "inputs/1-eval", "inputs/2-model")
HOSTILE_PATHS = [
    "../../data", "/etc", "~/private", "s3://bucket/x", "file:///etc", "https://host/x", "inputs/../../data",
    "inputs/9-other", "inputs/0-train/..", "", ".", None, 3, ["inputs/0-train"],
]  # fmt: skip


@cache
def whole() -> dict[str, Any]:
    """Every section that a charter can have, filled."""
    run = {
        "name": "fishes",
        "model": {
            "weights": PLACES[2],
            "experts": {"count": 2, "top_k": 2, "ffn_dim": 8},
            "rope_scaling": {"kind": "llama3", "factor": 2.0, "original_max_seq_len": 64},
        },
        "data": {"train": [{"path": PLACES[0]}], "eval": [{"path": PLACES[1]}]},
        "train": {"steps": 9},
    }
    values = values_of(Run.model_validate(run))
    values["model"]["weights"] = PLACES[2]
    values["data"]["train"][0]["path"], values["data"]["eval"][0]["path"] = PLACES[0], PLACES[1]
    return values


@cache
def cut() -> dict[str, Any]:
    """The same of a model that is cut over peers."""
    run = {
        "name": "fishes",
        "model": {"rope_scaling": {"kind": "llama3", "factor": 2.0, "original_max_seq_len": 64}},
        "data": {"train": [{"path": PLACES[0]}], "eval": [{"path": PLACES[1]}], "skip": [4]},
        "train": {"steps": 9},
        "swarm": {"peers": 3, "stages": {"count": 2}},
    }
    values = values_of(Run.model_validate(run))
    values["data"]["train"][0]["path"], values["data"]["eval"][0]["path"] = PLACES[0], PLACES[1]
    return values


def proposed(table: Table = WHOLE, **changes: Any) -> dict[str, Any]:
    """With changes by dotted names."""
    values = copy.deepcopy(cut() if table is CUT else whole())
    for name, value in changes.items():
        put(values, name, value)
    return values


def read(run: Any, inputs: tuple[Any, ...] | None = None, **more: Any) -> Charter:
    """As a joiner reads what a peer sent."""
    held = {
        "format": FORMAT,
        "name": "fishes",
        "organiser": ORGANISER,
        "created": 1,
        "run": run,
        "inputs": [{**vars(Input(p, "f", "ab" * 32, 1, 2))} for p in PLACES] if inputs is None else list(inputs),
    }
    text = canonical({**held, **more})
    return Charter.of(text, hashlib.sha256(text).hexdigest())


def refused(run: Any, inputs: tuple[Any, ...] | None = None, **more: Any) -> str:
    with pytest.raises(SetupError) as e:
        read(run, inputs, **more)
    assert str(e.value).count("\n") == 0
    return str(e.value)


def kinds(annotation: Any) -> Iterator[Any]:
    """The plain types that can stand in a value."""
    if get_origin(annotation) is Literal:
        return
    if get_origin(annotation) is Annotated:
        yield from kinds(get_args(annotation)[0])
    elif get_args(annotation):
        for part in get_args(annotation):
            yield from kinds(part)
    else:
        yield annotation


def test_a_charter_of_the_closed_set_is_read() -> None:
    assert read(proposed()).run["train"]["steps"] == 9
    assert read(proposed()).stages == 1
    assert read(proposed(CUT)).stages == 2


def test_settings_that_came_later_are_named_only_where_they_are_used(tmp_path: Path) -> None:
    """So peers of before them join what they can train; and what is not named means what it meant."""
    plain = whole()["model"]
    assert not {"full_attention_every", "sliding_rope_theta", "query_pre_attn_scalar"} & plain.keys()
    assert not {"groups", "top_groups", "routed_scale"} & plain["experts"].keys()
    used = {"model.sliding_window": 4, "model.full_attention_every": 2, "model.experts.routed_scale": 1.5}
    model = read(proposed(**used)).local(tmp_path / "charter", {}, []).model
    assert model.experts is not None
    assert (model.full_attention_every, model.experts.groups, model.experts.routed_scale) == (2, 1, 1.5)


def test_a_charter_of_before_there_was_packing_means_chopped_windows(tmp_path: Path) -> None:
    values = proposed()
    assert read(values).local(tmp_path / "charter", {}, []).data.packing == "pairs"
    del values["data"]["packing"]
    assert read(values).local(tmp_path / "charter", {}, []).data.packing == "chop"


@pytest.mark.parametrize("table", [WHOLE, CUT], ids=["whole", "cut"])
@pytest.mark.parametrize("name", LEAVES, ids=lambda n: n.dotted)
def test_every_name_of_the_run_file_is_proposed_or_refused(name: Name, table: Table) -> None:
    """A name that was added to the run file is refused until `proposal` has it."""
    if name.dotted in table.proposed:
        assert name.dotted in {n.dotted for n in LEAVES}
        return
    said = refused(proposed(table, **{name.dotted: another(name)}))
    assert "each peer's own" in said
    if not name.dotted.startswith("swarm.stages"):  # with which it is another table's charter, and much is wrong
        assert repr(name.dotted) in said


def test_names_that_are_none_and_empty_sections_are_refused() -> None:
    assert "'train.code'" in refused(proposed(**{"train.code": "os:system"}))
    assert "'hooks'" in refused(proposed(hooks=["os:system"]))
    assert "'track'" in refused(proposed(track={}))
    assert "'note'" in refused(proposed(), note="read me")
    assert "'data.train.*.cache'" in refused(proposed(**{"data.train.0.cache": "/x"}))
    assert "'script'" in refused(proposed(), (*[vars(Input(p, "f", "", 1, 2)) for p in PLACES[:2]], {"script": "x"}))


def test_the_table_names_nothing_else_and_no_value_in_it_is_free_text() -> None:
    """So no charter can name a path, an address, or code to import."""
    known = {n.dotted: n for n in LEAVES}
    assert WHOLE.proposed.keys() | CUT.proposed.keys() <= known.keys()
    assert STAGES.keys() <= set(obeyed("cut"))
    for name, range in (*WHOLE.proposed.items(), *CUT.proposed.items()):
        found = set(kinds(known[name].field.annotation))
        if str in found:
            assert range is not WORD, name  # a range of numbers lets no text through
        if found & {int, float}:
            assert range not in (PLACE, WORD), f"{name} has no range"
            assert range[0] < range[1], name


@pytest.mark.parametrize("table", [WHOLE, CUT], ids=["whole", "cut"])
def test_every_number_has_a_range(table: Table) -> None:
    for name, range in table.proposed.items():
        if range in (WORD, PLACE):
            continue
        dotted = name.replace("*", "0")
        for value in (
            ("9999 d", "1e9 s", "x" * 1000) if range is TIME else (range[1] * 2 + 1, -1, 10**300, True, "x", [[]])
        ):
            why, long = refused(proposed(table, **{dotted: value})), type(value) is int and value >= 10**19
            assert ("digits" if long else dotted.rpartition(".")[2]) in why, (name, value)
    assert "is not there" in refused({k: v for k, v in proposed(table).items() if k != "seed"})
    assert "train.steps" in refused(proposed(**{"train.steps": "9"}))
    wide = {"model.dim": 1 << 17, "model.ffn_dim": 1 << 20, "model.layers": 4096}
    assert "parameters" in refused(proposed(**wide))
    assert "tokens" in refused(proposed(**{"train.steps": 10**9, "train.batch": 1 << 20}))
    for odd in (None, [], 3, "name: x", {"train": []}, {"train": None}):
        refused(odd)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"swarm.stages.count": 1}, "from 2 to"),
        ({"swarm.stages.count": "2"}, "swarm.stages.count is 2, and must be"),
        ({"swarm.stages.count": 10**9}, "from 2 to"),
        ({"swarm.stages": {}}, "swarm.stages"),
        ({"swarm.stages": [2]}, "swarm.stages"),
        ({"swarm.stages": None}, "swarm.stages"),
        ({"swarm.stages.count": 3, "swarm.peers": 2}, "needs a peer for each"),
        ({"swarm.stages.count": 30, "swarm.peers": 40}, "layers: lower it"),
        ({"swarm.stages.rank": 1 << 16}, "does not fit into a model of"),
        ({"swarm.stages.activations": "fp64"}, "swarm.stages.activations is not what it should be"),
        ({"model.tie_embeddings": True}, "tie_embeddings to false"),
        ({"train.precision": "fp8"}, "fp32 or bf16"),
        ({"mesh.micro_batch": 5}, "mesh.micro_batch 5"),
        ({"train.batch": 1 << 22}, "micro-batches"),
        ({"checkpoint.every": "30 s"}, "checkpoint.every"),
        ({"data.skip": [-1]}, "data.skip"),
        ({"data.skip": [3, "x"]}, "data.skip"),
        ({"swarm.round": "60 s"}, "'swarm.round'"),
        ({"model.weights": PLACES[2]}, "'model.weights'"),
        ({"model.experts": {"count": 2, "top_k": 2, "ffn_dim": 8}}, "'model.experts.count'"),
        ({"checkpoint.remote": "s3://theirs/x"}, "'checkpoint.remote'"),
    ],
)
def test_a_hostile_charter_of_a_cut_model_is_refused(changes: dict[str, Any], words: str) -> None:
    assert words in refused(proposed(CUT, **changes))


@pytest.mark.parametrize("path", HOSTILE_PATHS)
def test_a_path_is_the_place_of_an_input_and_nothing_else(path: Any) -> None:
    for name in ("data.train.0.path", "data.eval.0.path"):
        assert "no charter names a path" in refused(proposed(**{name: path})) or path is None
    if path is not None:
        refused(proposed(**{"model.weights": path}))


@pytest.mark.parametrize(
    "place", [*HOSTILE_PATHS, "inputs", "inputs/", "inputs/0-a/b", "inputs/0-..", "input/0-x", "inputs/0-x\n"]
)
def test_an_input_lies_below_the_runs_own_folder(place: Any) -> None:
    if place == "inputs/9-other":
        return  # a place like any other
    one = {**vars(Input("inputs/0-train", "f", "ab" * 32, 1, 2)), "place": place}
    assert "no place below" in refused(proposed(), (one,))


@pytest.mark.parametrize(
    "address",
    ["file:///etc", "https://host/x", "s3://key:secret@bucket/x", "s3://b?x=1", "s3://bucket/../other", "gs://b", "/x"],
)
def test_an_input_in_a_store_has_a_plain_address(address: str) -> None:
    one = {**vars(Input("inputs/0-train", "", "", 0, 0)), "address": address}
    assert "no address" in refused(proposed(), (one,))
    assert not covers("s3://bucket/a", "s3://bucket/ab")
    assert covers("s3://bucket/a/", "s3://bucket/a/b")


def test_the_writer_sends_the_closed_set_and_nothing_else(tmp_path: Path) -> None:
    file = run_file(tmp_path / "home")
    own = [
        "track.wandb=online",
        "checkpoint.keep=9",
        "resources.threads=3",
        "data.cache_dir=/private",
        "guard.restarts=7",
    ]
    charter, _ = write_charter(load(file, own).run, ORGANISER, None)
    text = charter.to_bytes().decode()
    for word in ("wandb", "/private", "threads", "restarts", "cache", str(tmp_path)):
        assert word not in text
    with pytest.raises(SpecError, match=r"swarm\.peers"):
        write_charter(load(file, ["swarm.peers=5000"]).run, ORGANISER, None)


class Changed(First):
    """An inviter whose program was changed: its charter says what it likes, and the id of its swarm fits."""

    def __init__(self, folder: Path, inputs: tuple[Input, ...] | None = None, **changes: Any) -> None:
        super().__init__(folder, run_file(folder / "home"))
        values = copy.deepcopy(self.charter.run)
        for name, value in changes.items():
            put(values, name, value)
        self.charter = replace(self.charter, run=values, inputs=inputs or self.charter.inputs)
        swarm, me = self.charter.swarm, self.roster.me
        admission = Admission.direct(swarm, me.id, self.organiser)
        self.roster = Roster(swarm, self.organiser.id, me, admission, name="first", event=self.heard)


def joined(tmp_path: Path, first: First, *more: str) -> int:
    with served(first) as invitation:
        there = ["--no-start", "--workspace", str(tmp_path / "new"), *LOCAL]
        (tmp_path / "line").write_text(invitation.line())
        (tmp_path / "line").chmod(0o600)
        return main(["swarm", "join", f"@{tmp_path / 'line'}", *there, *more])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("data.train.0.path", "../../data"),
        ("track.wandb", "online"),
        ("checkpoint.remote", "s3://theirs/prefix"),
        ("resources.processes", 64),
    ],
)
def test_an_unmodified_joiner_refuses_a_changed_inviter(
    tmp_path: Path, name: str, value: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert joined(tmp_path, Changed(tmp_path, **{name: value})) == 78
    err = capsys.readouterr().err
    assert name.replace(".0.", ".*.") in err
    assert err.count("\n") == 1
    assert not list((tmp_path / "new").rglob("run.yaml"))
    assert not list((tmp_path / "new").rglob("charter.json"))


def test_the_joiners_credentials_are_used_only_where_it_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = Changed(tmp_path)
    remote = replace(first.charter.inputs[0], folder="", fingerprint="", manifest_bytes=0, address="s3://theirs/data")
    first = Changed(tmp_path / "again", inputs=(remote, *first.charter.inputs[1:]))
    assert joined(tmp_path, first) == 78
    said = capsys.readouterr()
    assert "--allow s3://theirs/data" in said.err
    assert "not allowed yet" in said.out
    assert joined(tmp_path, first, "--allow", "s3://theirs/other") == 78
    assert joined(tmp_path, first, "--allow", "s3://theirs") == 0
    assert load(tmp_path / "new" / "runs" / "fishes" / "run.yaml").run.data.train[0].path == "s3://theirs/data"


def test_data_of_the_joiners_own_is_used_only_where_it_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody who knows the fingerprint of a private data set could have it trained on otherwise."""
    run_file(tmp_path / "mine")
    monkeypatch.chdir(tmp_path / "mine")
    first = First(tmp_path, run_file(tmp_path / "home"))
    assert joined(tmp_path, first) == 0
    assert "fetches inputs/0-train" in capsys.readouterr().out
    there = ["--workspace", str(tmp_path / "other")]
    assert joined(tmp_path, first, *there, "--data", str(tmp_path / "mine")) == 0
    assert f"read   {tmp_path / 'mine' / 'data' / 'train'}" in capsys.readouterr().out


def test_a_link_does_not_lead_out_of_the_input_folder(tmp_path: Path) -> None:
    first, config = First(tmp_path, run_file(tmp_path / "home")), config_in(tmp_path, "second")
    (tmp_path / "private").mkdir()
    (config.run_dir.path / "inputs").mkdir(parents=True)
    os.symlink(tmp_path / "private", config.run_dir.path / "inputs" / "0-train")

    async def play() -> None:
        async with first.running() as invitation:
            with pytest.raises(SetupError, match="leads out of"):
                await enter(invitation, config, [], silent)

    asyncio.run(play())


def test_no_more_data_is_fetched_than_was_announced(tmp_path: Path) -> None:
    first = Changed(tmp_path)
    small = tuple(replace(i, bytes=1000) for i in first.charter.inputs)
    first = Changed(tmp_path / "again", inputs=small)

    async def play() -> None:
        async with first.running() as invitation:
            with pytest.raises(DataError, match="where it should have 1000 at most"):
                await enter(invitation, config_in(tmp_path, "second"), [], silent)

    asyncio.run(play())


def test_more_data_than_there_is_room_for_is_refused_before_it_is_fetched(tmp_path: Path) -> None:
    first = Changed(tmp_path)
    first = Changed(tmp_path / "again", inputs=tuple(replace(i, bytes=10**14) for i in first.charter.inputs))

    async def play() -> None:
        async with first.running() as invitation:
            with pytest.raises(SetupError, match="has room for"):
                await enter(invitation, config_in(tmp_path, "second"), [], silent)

    asyncio.run(play())


def test_a_joiner_sees_what_it_will_do_and_may_say_no(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = First(tmp_path, run_file(tmp_path / "home"))
    assert joined(tmp_path, first, "--dry-run", "track.mlflow=http://tracker:5000") == 0
    said = capsys.readouterr().out
    for words in (
        "run    a llama of",
        "9 steps of 32 windows",
        "read   inputs/0-train, 1.4 MiB from the peers",
        f"write  {tmp_path / 'new' / 'runs' / 'fishes'}",
        "MLflow at http://tracker:5000",
        "send   to 1 peer",
    ):
        assert words in said
    assert not (tmp_path / "new").exists()
    monkeypatch.setattr(join, "_on_a_terminal", lambda: True)
    answers = "n\n", ""  # no, and the end of the input
    for answer in answers:
        there, here = os.pipe()
        os.write(here, answer.encode())
        os.close(here)
        with os.fdopen(there) as typed:
            monkeypatch.setattr(sys, "stdin", typed)
            assert joined(tmp_path, first) == 0
        assert "join? [y/N] nothing was joined" in capsys.readouterr().out
        assert not (tmp_path / "new" / "runs" / "fishes").exists()
    assert first.roster.members() == [first.roster.me.id]  # nobody waits for who was only looking
    assert joined(tmp_path, first, "--yes") == 0
    assert (tmp_path / "new" / "runs" / "fishes" / "run.yaml").exists()


def test_what_a_joiner_sets_for_itself_has_its_effect_or_is_refused(tmp_path: Path) -> None:
    for name in LEAVES:
        for table, more in ((WHOLE, {}), (CUT, {"swarm.stages.count": 2})):
            begun = [copy.deepcopy(values) for values in (least(name), next(changes(name))[1])]
            for values in begun:
                if name.dotted not in more:
                    for dotted, value in more.items():
                        put(values, dotted, value)
            usual, changed = map(Run.model_validate, begun)
            told = [
                *(n for n, _ in refusals(changed, table.driver)),
                *([not_own(changed, usual)] if not_own(changed, usual) else []),
            ]
            assert (told == []) == (name.dotted in table.own), (name.dotted, told)
    charter, _ = write_charter(load(run_file(tmp_path / "home")).run, ORGANISER, None)
    for override in ("train.steps=10", "model.preset=tiny", "guard.hang=off", "launch.nodes=2", "track={x: 1}"):
        with pytest.raises(UsageError, match=override.partition("=")[0]):
            charter.local(tmp_path / "run.yaml", {}, [override])
    mine = charter.local(tmp_path / "run.yaml", {}, ["track={wandb: offline}", "train.precision=bf16"])
    assert (mine.track.wandb, mine.train.precision) == ("offline", "bf16")
