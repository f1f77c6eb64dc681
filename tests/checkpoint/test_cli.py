"""`shoal checkpoint`: a run that was really trained, listed, verified, compared, thinned out and exported."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.checkpoint.nodes import leave
from tests.data.reading import make_documents, write_data_set
from tests.patience import limit
from tests.services import s3_server
from tests.slow import some_slow
from tests.train.tiny import make_run, train_on

from shoal import checkpoint
from shoal.checkpoint import Name, ledger
from shoal.checkpoint.memory.ram import hold, memory_folder
from shoal.checkpoint.store import Folder
from shoal.cli.main import main
from shoal.decide.load import load
from shoal.errors import ShoalError
from shoal.journal.rundir import RunDir
from shoal.model.decoder import Decoder
from shoal.spec import dump
from shoal.spec.shape import shape_of

Captured = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workspace with the run `tiny`: checkpoints of steps 2 and 4, sharded over two ranks."""
    space = tmp_path_factory.mktemp("workspace")
    write_data_set(space / "data", [make_documents(60)])
    changes = {"train.steps": 4, "checkpoint.every": 2, "mesh.dp_shard": 2, "mesh.dp_replicate": 1}
    train_on(make_run(space / "data", **changes), space, world=2)
    return space


@pytest.fixture
def space(trained: Path, tmp_path: Path) -> Path:
    """A copy to break."""
    shutil.copytree(trained, tmp_path / "workspace")
    return tmp_path / "workspace"


def shoal(space: Path, *argv: str) -> int:
    return main(["checkpoint", *argv, "--workspace", str(space)])


def folder(space: Path, step: int) -> Path:
    return RunDir.of("tiny", space).checkpoints / f"step-{step:08d}-term-1"


def steps(space: Path) -> list[int]:
    return sorted(one.name.step for one in checkpoint.published(RunDir.of("tiny", space).checkpoints))


def flip_last_bit(space: Path, step: int) -> None:
    path = folder(space, step) / "rank-00001.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_ls_shows_each_checkpoint_and_what_is_wrong_with_it(space: Path, capsys: Captured) -> None:
    (folder(space, 4) / "rank-00001.safetensors").unlink()
    assert shoal(space, "ls", "tiny") == 0
    header, good, bad = capsys.readouterr().out.splitlines()
    assert header.split() == ["step", "term", "tier", "saved", "size", "ranks", "eval", "loss", "state"]
    assert good.split()[:3] == ["2", "1", "disk"]
    assert good.split()[-3:] == ["2", "-", "complete"]
    assert bad.split()[:3] == ["4", "1", "disk"]
    assert bad.endswith("bad: rank-00001.safetensors is missing")

    assert shoal(space, "ls", str(RunDir.of("tiny", space).path), "--json") == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["step"], row["good"]) for row in rows] == [(2, True), (4, False)]
    assert rows[0]["world"] == 2


def test_ls_tells_what_is_quarantined_gone_or_of_a_history_that_was_left(space: Path, capsys: Captured) -> None:
    store = Folder(RunDir.of("tiny", space).checkpoints)
    ledger.quarantine(store, Name(2, 1), "a bit has flipped")
    ledger.claim([store], from_step=3)  # another start went on from step 3: what the first one published after is past
    shutil.copytree(folder(space, 2), store.path("step-00000001-term-1"))
    ledger.note_published(store, Name(3, 1))
    assert shoal(space, "ls", "tiny", "--json") == 0
    states = {row["step"]: row["state"] for row in json.loads(capsys.readouterr().out)}
    assert states == {
        1: "bad: its manifest.json is that of step-00000002-term-1",
        2: "quarantined: a bit has flipped",
        3: "bad: it was published, and is gone",
        4: "not on history",
    }


def test_ls_and_verify_see_what_is_in_memory(space: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    monkeypatch.setenv("SHOAL_MEMORY", str(space / "memory"))
    node = hold(memory_folder(RunDir.of("tiny", space).path, 0))
    left = leave(node.folder, Name(6, 1), rank=0, world=1)
    node.close()
    assert shoal(space, "ls", "tiny") == 0
    assert [line.split()[:3] for line in capsys.readouterr().out.splitlines()[1:]] == [
        ["2", "1", "disk"],
        ["4", "1", "disk"],
        ["6", "1", "memory"],
    ]
    assert shoal(space, "verify", "tiny") == 0
    assert "step-00000006-term-1 (memory): every byte" in capsys.readouterr().out
    # A deletion counts only what a power cut leaves.
    assert shoal(space, "rm", "tiny", "--step", "2", "--step", "4") == 78
    data = bytearray(left.path.read_bytes())
    data[-1] ^= 1
    left.path.write_bytes(data)
    assert shoal(space, "verify", "tiny") == 78


def test_verify_is_silent_about_nothing(space: Path, capsys: Captured) -> None:
    assert shoal(space, "verify", "tiny") == 0
    assert "step-00000004-term-1: every byte is as it was written" in capsys.readouterr().out
    (folder(space, 2) / "notes.txt").write_text("mine")
    flip_last_bit(space, 4)
    assert shoal(space, "verify", "tiny") == 78
    captured = capsys.readouterr()
    assert "step-00000002-term-1: every byte" in captured.out
    assert "note: notes.txt is no part of it" in captured.out
    assert captured.err.startswith("shoal: 1 of 2 checkpoints of run 'tiny' cannot be used: step-00000004-term-1: ")
    assert "rank-00001.safetensors" in captured.err
    assert shoal(space, "verify", "tiny", "--step", "2") == 0
    assert shoal(space, "verify", "tiny@2") == 0
    assert shoal(space, "verify", "tiny", "--step", "4", "--json") == 78
    ledger.quarantine(Folder(RunDir.of("tiny", space).checkpoints), Name(4, 1), "seen")
    capsys.readouterr()
    assert shoal(space, "verify", "tiny") == 0  # known, and no news
    assert "step-00000004-term-1: quarantined: seen" in capsys.readouterr().out


def test_a_folder_of_checkpoints_and_one_of_them_stand_for_a_run(space: Path, tmp_path: Path, capsys: Captured) -> None:
    root = RunDir.of("tiny", space).checkpoints
    copied = tmp_path / "the-best"
    shutil.copytree(folder(space, 4), copied)
    for place, count in ((root, 2), (folder(space, 4), 1), (copied, 1)):
        assert shoal(space, "ls", str(place), "--json") == 0
        rows = json.loads(capsys.readouterr().out)
        assert len(rows) == count
        assert rows[-1]["step"] == 4
        assert shoal(space, "verify", str(place)) == 0
        assert shoal(space, "diff", str(place), "tiny") == 0
        out = tmp_path / f"out-{place.name}"
        assert shoal(space, "export", str(place), str(out)) == 0  # its manifest says of what model and data it is
        assert (out / "config.json").exists()
        capsys.readouterr()
    assert shoal(space, "diff", "tiny@2", "tiny@4") == 1
    (copied / "rank-00001.safetensors").unlink()
    capsys.readouterr()
    assert shoal(space, "verify", str(copied)) == 78
    assert "rank-00001.safetensors is missing" in capsys.readouterr().err


def test_export_opens_in_transformers_with_the_same_logits(space: Path, tmp_path: Path, capsys: Captured) -> None:
    transformers = pytest.importorskip("transformers")
    out = tmp_path / "exported"
    assert shoal(space, "export", "tiny", str(out)) == 0
    assert "step 4 of run 'tiny'" in capsys.readouterr().out

    run_dir = RunDir.of("tiny", space)
    found = checkpoint.newest(run_dir.checkpoints)
    assert found is not None
    model = Decoder(shape_of(load(run_dir.spec_file).run.model))
    model.load_state_dict(checkpoint.read_full(found))
    tokens = torch.arange(40).reshape(2, 20)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out)
    with torch.no_grad():
        torch.testing.assert_close(theirs(tokens).logits, model(tokens), rtol=1e-5, atol=1e-5)
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    assert tokenizer.decode(tokenizer("Call me Ishmael.")["input_ids"]) == "Call me Ishmael."


def test_export_passes_over_a_damaged_one_and_casts_when_asked(space: Path, tmp_path: Path, capsys: Captured) -> None:
    found = checkpoint.newest(RunDir.of("tiny", space).checkpoints)
    assert found is not None
    weights = next(found.manifest.rows.slices("model.embed.weight"))
    with open(folder(space, found.step) / weights.file, "r+b") as f:
        f.seek(weights.at)
        f.write(b"\xff\xff")
    assert shoal(space, "export", "tiny", str(tmp_path / "out"), "--dtype", "bf16", "--tokenizer", "none") == 0
    captured = capsys.readouterr()
    assert "step 2 of run 'tiny'" in captured.out
    assert "passed over checkpoint" in captured.err
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    assert not (tmp_path / "out" / "tokenizer.json").exists()


WRONG = {
    "no verb": ([], 2, "say what to do"),
    "unknown verb": (["list", "tiny"], 2, "there is no `shoal checkpoint list`; there are ls, verify"),
    "unknown run": (["ls", "tinny"], 2, "did you mean 'tiny'"),
    "unknown step": (["verify", "tiny", "--step", "3"], 2, "it has 2, 4"),
    "unknown step of diff": (["diff", "tiny@3", "tiny"], 2, "has no checkpoint of step 3; it has 2, 4"),
    "rm of nothing": (["rm", "tiny"], 2, "--step N"),
    "rm of an unknown step": (["rm", "tiny", "--step", "3"], 2, "it has 2, 4"),
    "rm of an unknown term": (["rm", "tiny", "--step", "4", "--term", "2"], 2, "of step 4, term 2"),
    "rm of all": (["rm", "tiny", "--all-but", "0"], 2, "at least 1"),
    "import of nothing": (["import", "NOWHERE", "OUT"], 2, "there is no run"),
    "import like nothing": (["import", "tiny", "OUT", "--like", "nowhere.yaml"], 2, "--like names nowhere.yaml"),
    "a file is no folder": (["ls", "FULL/mine"], 2, "there is no run"),
    "folder not empty": (["export", "tiny", "FULL"], 2, "not empty"),
    "no tokenizer there": (["export", "tiny", "OUT", "--tokenizer", "nowhere.json"], 78, "nowhere.json"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_usage_is_one_sentence(case: str, space: Path, tmp_path: Path, capsys: Captured) -> None:
    argv, code, words = WRONG[case]
    (tmp_path / "FULL").mkdir()
    (tmp_path / "FULL" / "mine").write_text("")
    argv = [str(tmp_path / a) if a.isupper() else a for a in argv]
    assert (main(["checkpoint"]) if not argv else shoal(space, *argv)) == code
    error = capsys.readouterr().err
    assert error.startswith("shoal: ")
    assert words in error


def test_rm_deletes_what_is_named_and_refuses_the_last_good_one(space: Path, capsys: Captured) -> None:
    assert shoal(space, "rm", "tiny", "--step", "2", "--step", "4") == 78
    assert "nothing was deleted: no good checkpoint of run 'tiny' would remain" in capsys.readouterr().err
    assert steps(space) == [2, 4]
    flip_last_bit(space, 4)  # complete by its header; only a full read tells that it is not good
    assert shoal(space, "rm", "tiny", "--step", "2") == 78
    assert steps(space) == [2, 4]
    assert shoal(space, "rm", "tiny", "--step", "4") == 0
    assert "deleted" in capsys.readouterr().out
    assert steps(space) == [2]  # also gone from the ledger: nobody misses it
    assert shoal(space, "verify", "tiny") == 0
    assert shoal(space, "rm", "tiny@2", "--step", "2", "--even-the-last", "--json") == 0
    assert not folder(space, 2).exists()


def test_rm_all_but_keeps_the_newest_good_ones(space: Path, capsys: Captured) -> None:
    (folder(space, 4) / "manifest.json").unlink()
    assert shoal(space, "rm", "tiny", "--all-but", "1", "--json") == 0
    assert json.loads(capsys.readouterr().out) == [{"step": 4, "term": 1, "tier": "disk"}]
    assert steps(space) == [2]
    assert shoal(space, "rm", "tiny", "--all-but", "3") == 0
    assert capsys.readouterr().out == "nothing to delete\n"


@pytest.mark.cluster
def test_the_copies_in_a_bucket_are_listed_verified_compared_and_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    write_data_set(tmp_path / "data", [make_documents(60)])
    with s3_server(tmp_path / "s3") as server:
        server.make_bucket("shoal")
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        changes = {"train.steps": 4, "checkpoint.every": 2, "checkpoint.remote": "s3://shoal/runs"}
        (tmp_path / "run.yaml").write_text(dump(make_run(tmp_path / "data", **changes)))
        # Not in a forked process: the threads of the S3 client do not survive a fork.
        command = [Path(sys.executable).with_name("shoal"), "train", "run.yaml", "--processes", "1"]
        subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, timeout=limit(120))
        assert shoal(tmp_path, "ls", "tiny", "--json") == 0
        rows = json.loads(capsys.readouterr().out)
        both = [(2, "remote"), (2, "disk"), (4, "remote"), (4, "disk")]
        assert [(row["step"], row["tier"], row["state"]) for row in rows] == [(*one, "complete") for one in both]
        assert shoal(tmp_path, "verify", "tiny", "--remote") == 0
        assert "step-00000004-term-1 (remote): every byte" in capsys.readouterr().out
        assert shoal(tmp_path, "diff", "s3://shoal/runs/tiny/step-00000004-term-1", "tiny") == 0
        assert shoal(tmp_path, "diff", "s3://shoal/runs/tiny@2", "tiny") == 1

        shutil.rmtree(folder(tmp_path, 4))  # the disk has lost it, and the bucket has it
        assert shoal(tmp_path, "export", "tiny", str(tmp_path / "out"), "--step", "4") == 0
        assert shoal(tmp_path, "rm", "tiny", "--step", "2", "--tier", "disk") == 0
        assert shoal(tmp_path, "rm", "tiny", "--step", "2", "--step", "4") == 78
        assert shoal(tmp_path, "rm", "s3://shoal/runs/tiny", "--step", "2") == 0
        assert shoal(tmp_path, "import", "s3://shoal/runs/tiny", "s3://shoal/weights", "--weights") == 0
        capsys.readouterr()
        assert shoal(tmp_path, "ls", "s3://shoal/weights", "--json") == 0
        assert [row["step"] for row in json.loads(capsys.readouterr().out)] == [4]
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another")
        assert shoal(tmp_path, "ls", "tiny") == 0
        assert "only what is on this machine is listed" in capsys.readouterr().err


def test_what_import_writes_is_a_checkpoint_like_any_other(space: Path, tmp_path: Path, capsys: Captured) -> None:
    out = tmp_path / "weights"
    assert shoal(space, "import", "tiny@2", str(out), "--weights") == 0
    told = capsys.readouterr().out
    assert "step 2" in told
    assert f"model: {{weights: {out}}}" in told
    assert shoal(space, "diff", "tiny@2", str(out), "--weights") == 0
    assert shoal(space, "diff", "tiny@2", str(out)) == 1
    assert shoal(space, "verify", str(out)) == 0
    assert shoal(space, "export", str(out), str(tmp_path / "hf"), "--tokenizer", "byte") == 0
    assert shoal(space, "export", "tiny", str(tmp_path / "hf-2"), "--step", "2") == 0
    assert shoal(space, "import", str(tmp_path / "hf"), str(tmp_path / "again"), "--json") == 0
    assert shoal(space, "diff", str(tmp_path / "again"), str(out)) == 0
    capsys.readouterr()
    assert shoal(space, "export", str(out), str(tmp_path / "hf-3")) == 2
    assert "--tokenizer" in capsys.readouterr().err


RUN_FILE = """
name: next
model: {{weights: "{weights}"}}
data: {{train: "{data}", seq_len: 32}}
train: {{steps: 1, batch: 16, optimizer: {{lr: 1.0e-9, weight_decay: 0}}, schedule: {{warmup_steps: 0}}}}
mesh: {{dp_shard: {world}, dp_replicate: 1}}
track: {{mlflow: false}}
resources: {{threads: 1, device: cpu}}
"""


PLACES = [("runs/tiny", 2), ("runs/tiny@2", 1), ("imported", 2)]


@pytest.mark.parametrize(("weights", "world"), some_slow(PLACES, slow=PLACES[:1]))
def test_a_run_starts_from_the_weights_of_another(
    weights: str, world: int, space: Path, tmp_path: Path, capsys: Captured
) -> None:
    """Its learning rate is next to nothing, so that the checkpoint after its first step tells what it started from."""
    if weights == "imported":
        assert shoal(space, "import", "tiny", str(space / "imported"), "--weights") == 0
    file = tmp_path / "next.yaml"
    file.write_text(RUN_FILE.format(weights=space / weights, data=load_data(space), world=world))
    spec = load(file).run
    assert spec.model.dim == 32  # from the manifest
    train_on(spec, space, world=world)
    capsys.readouterr()
    before = "tiny@2" if "@" in weights else "tiny@4"
    assert shoal(space, "diff", before, "next", "--weights", "--json") == 1
    told = json.loads(capsys.readouterr().out)
    assert not told["only_a"] + told["only_b"]
    assert max(changed["numbers"]["max_abs"] for changed in told["changed"]) < 1e-7


def load_data(space: Path) -> str:
    return load(RunDir.of("tiny", space).spec_file).run.data.train[0].path


WRONG_WEIGHTS = {
    "another shape": (", dim: 64", "model.dim is 64, but the weights have 32; remove it"),
    "damaged": ("", "no checkpoint that can be used"),
}


@pytest.mark.parametrize("case", WRONG_WEIGHTS)
def test_weights_that_cannot_be_used_are_told_with_the_line_that_named_them(case: str, space: Path) -> None:
    more, words = WRONG_WEIGHTS[case]
    file = space / "next.yaml"
    text = RUN_FILE.format(weights=space / "runs" / "tiny", data=load_data(space), world=1)
    file.write_text(text.replace('tiny"}', f'tiny"{more}}}'))
    if case == "damaged":
        for step in (2, 4):
            (folder(space, step) / "rank-00000.safetensors").unlink()
    with pytest.raises(ShoalError, match=rf"next\.yaml:3:\d+: .*{words}"):
        load(file)


def test_data_that_is_gone_asks_for_a_tokenizer(space: Path, tmp_path: Path, capsys: Captured) -> None:
    spec = RunDir.of("tiny", space).spec_file
    gone = load(spec).run.data.train[0].path
    spec.write_text(spec.read_text().replace(gone, "/nowhere/data"))
    assert shoal(space, "export", "tiny", str(tmp_path / "out")) == 78
    assert "--tokenizer PATH" in capsys.readouterr().err
    assert shoal(space, "export", "tiny", str(tmp_path / "out"), "--tokenizer", "byte") == 0


def test_a_run_without_checkpoints_says_so(space: Path, capsys: Captured) -> None:
    shutil.rmtree(RunDir.of("tiny", space).checkpoints)
    assert shoal(space, "ls", "tiny") == 78
    assert "has no checkpoint yet" in capsys.readouterr().err
