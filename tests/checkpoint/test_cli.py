"""`shoal checkpoint`: a run that was really trained, listed, verified and exported."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from tests.data.reading import make_documents, write_data_set
from tests.train.tiny import make_run, train_on

from shoal import checkpoint
from shoal.cli.main import main
from shoal.model.decoder import Decoder
from shoal.spec import load
from shoal.spec.shape import shape_of
from shoal.track.rundir import RunDir

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


def flip_last_bit(space: Path, step: int) -> None:
    path = RunDir.of("tiny", space).checkpoints / f"step-{step:08d}" / "rank-00001.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_ls_shows_each_checkpoint_and_what_is_wrong_with_it(space: Path, capsys: Captured) -> None:
    (RunDir.of("tiny", space).checkpoints / "step-00000004" / "rank-00001.safetensors").unlink()
    assert shoal(space, "ls", "tiny") == 0
    _, good, bad = capsys.readouterr().out.splitlines()
    assert good.split()[0] == "2"
    assert good.endswith("complete")
    assert bad.split()[0] == "4"
    assert bad.endswith("bad: rank-00001.safetensors is missing")

    assert shoal(space, "ls", str(RunDir.of("tiny", space).path), "--json") == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["step"], row["good"]) for row in rows] == [(2, True), (4, False)]
    assert rows[0]["world"] == 2


def test_verify_is_silent_about_nothing(space: Path, capsys: Captured) -> None:
    assert shoal(space, "verify", "tiny") == 0
    assert "step-00000004: every byte is as it was written" in capsys.readouterr().out
    flip_last_bit(space, 4)
    assert shoal(space, "verify", "tiny") == 78
    captured = capsys.readouterr()
    assert "step-00000002: every byte" in captured.out
    assert captured.err.startswith("shoal: 1 of 2 checkpoints of run 'tiny' cannot be used: step-00000004: ")
    assert "rank-00001.safetensors" in captured.err
    assert shoal(space, "verify", "tiny", "--step", "2") == 0
    assert shoal(space, "verify", "tiny", "--step", "4", "--json") == 78


def test_export_opens_in_transformers_with_the_same_logits(space: Path, tmp_path: Path, capsys: Captured) -> None:
    transformers = pytest.importorskip("transformers")
    out = tmp_path / "exported"
    assert shoal(space, "export", "tiny", str(out)) == 0
    assert "step 4 of run tiny" in capsys.readouterr().out

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
    weights = found.manifest.tensors["model.embed.weight"].slices[0]
    with open(found.path / weights.file, "r+b") as f:
        f.seek(weights.at)
        f.write(b"\xff\xff")
    assert shoal(space, "export", "tiny", str(tmp_path / "out"), "--dtype", "bf16", "--tokenizer", "none") == 0
    captured = capsys.readouterr()
    assert "step 2 of run tiny" in captured.out
    assert "passed over checkpoint" in captured.err
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    assert not (tmp_path / "out" / "tokenizer.json").exists()


WRONG = {
    "no verb": ([], 2, "say what to do"),
    "unknown verb": (["rm", "tiny"], 2, "invalid choice"),
    "unknown run": (["ls", "tinny"], 2, "did you mean 'tiny'"),
    "unknown step": (["verify", "tiny", "--step", "3"], 2, "it has 2, 4"),
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
