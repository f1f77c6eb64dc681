"""`shoal sample`: text from a run that was really trained, and from what it exports."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from shoal.cli.main import main
from shoal.journal.rundir import RunDir
from tests.train.tiny import make_run, train_on

Captured = pytest.CaptureFixture[str]
SENTENCE = "the whale swims in the deep sea. "
TEXT = "\n".join([SENTENCE * 3] * 40)


@pytest.fixture(scope="module")
def space(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workspace with the run `tiny`, which has read its one sentence often enough to know it."""
    space = tmp_path_factory.mktemp("workspace")
    (space / "text.txt").write_text(TEXT)
    text, data = str(space / "text.txt"), str(space / "data")
    assert main(["data", "prepare", text, "--per-line", "--out", data, "--workers", "1"]) == 0
    changes = {
        "train.steps": 80,
        "train.batch": 8,
        "train.optimizer.lr": 1e-2,
        "checkpoint.every": 40,
        "data.seq_len": 64,
    }
    train_on(make_run(space / "data", **changes), space, world=1)
    return space


def sample(space: Path, *argv: str) -> int:
    return main(["sample", *argv, "--workspace", str(space)])


def test_it_says_what_it_was_taught(space: Path, capsys: Captured) -> None:
    assert sample(space, "tiny", "--prompt", "the whale swims", "--temperature", "0", "--max-tokens", "40") == 0
    assert capsys.readouterr().out.startswith("the whale swims in the deep sea. the whale swims")


def test_an_empty_prompt_begins_a_document_as_training_did(space: Path, capsys: Captured) -> None:
    for prompt, tokens in (("", [256]), ("t", [256, ord("t")])):
        assert sample(space, "tiny", "--prompt", prompt, "--temperature", "0", "--max-tokens", "40", "--json") == 0
        said = json.loads(capsys.readouterr().out)
        assert said["prompt_tokens"] == tokens
        assert (prompt + said["text"]).startswith("the whale swims in the deep sea.")


def test_without_a_start_token_an_empty_prompt_is_nothing_to_go_on_from(space: Path, capsys: Captured) -> None:
    assert sample(space, "tiny", "--prompt", "", "--start", "none") == 2
    assert "there is nothing to go on from" in capsys.readouterr().err
    assert sample(space, "tiny", "--prompt", "a", "--start", "none", "--max-tokens", "1", "--json") == 0
    assert json.loads(capsys.readouterr().out)["prompt_tokens"] == [ord("a")]


def test_a_start_token_that_is_none_of_the_tokenizers_is_named_as_such(space: Path, capsys: Captured) -> None:
    assert sample(space, "tiny", "--prompt", "a", "--start", "<nope>") == 78
    said = capsys.readouterr().err
    assert "starts documents with its own id 256; leave out --start" in said
    assert "--tokenizer" not in said, "the tokenizer is there"


def test_a_seed_decides_the_text_and_json_says_where_it_came_from(space: Path, capsys: Captured) -> None:
    said = []
    for seed in ("1", "1", "2"):
        argv = ["tiny", "--prompt", "the ", "--temperature", "3", "--max-tokens", "20", "--seed", seed, "--json"]
        assert sample(space, *argv) == 0
        said.append(json.loads(capsys.readouterr().out))
    assert said[0] == said[1] != said[2]
    assert said[0]["step"] == 80
    assert len(said[0]["tokens"]) <= 20
    assert all(token < 257 for token in said[0]["tokens"])


def test_an_exported_folder_says_the_same_as_the_run(space: Path, tmp_path: Path, capsys: Captured) -> None:
    assert main(["checkpoint", "export", "tiny", str(tmp_path / "hf"), "--workspace", str(space)]) == 0
    capsys.readouterr()
    argv = ["--prompt", "the sea", "--seed", "3", "--max-tokens", "30"]
    assert sample(space, "tiny", *argv) == 0
    assert main(["sample", "--weights", str(tmp_path / "hf"), *argv]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first == second


def test_a_damaged_checkpoint_is_passed_over_and_an_older_one_can_be_asked_for(
    space: Path, tmp_path: Path, capsys: Captured
) -> None:
    broken = shutil.copytree(space, tmp_path / "broken")
    file = RunDir.of("tiny", broken).checkpoints / "step-00000080-term-1" / "rank-00000.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1  # in the last tensor; those of the model may lie before it, so all of the file's end is flipped
    data[len(data) // 10 :] = bytes(b ^ 1 for b in data[len(data) // 10 :])
    file.write_bytes(data)
    assert sample(broken, "tiny", "--json") == 0
    captured = capsys.readouterr()
    assert "passed over" in captured.err
    assert json.loads(captured.out)["step"] == 40
    assert sample(space, "tiny", "--step", "40", "--json") == 0
    assert json.loads(capsys.readouterr().out)["step"] == 40


@pytest.mark.parametrize(
    ("argv", "code", "said"),
    [
        ([], 2, "say what to sample from"),
        (["tiny", "--weights", "x"], 2, "say what to sample from"),
        (["tinny"], 2, "did you mean 'tiny'"),
        (["tiny", "--max-tokens", "0"], 2, "--max-tokens is 0"),
        (["tiny", "--temperature", "-1"], 2, "--temperature is -1.0"),
        (["tiny", "--prompt", "", "--start", "<s>"], 78, "its own id 256; leave out --start"),
        (["tiny", "--step", "7"], 2, "no checkpoint of step 7"),
        (["tiny", "--device", "cuda"], 2, "no GPU"),
        (["--weights", "/nowhere/model"], 78, "/nowhere/model/config.json is not there"),
    ],
)
def test_wrong_usage_is_one_sentence(argv: list[str], code: int, said: str, space: Path, capsys: Captured) -> None:
    import torch

    if "cuda" in argv and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    assert sample(space, *argv) == code
    error = capsys.readouterr().err
    assert error.startswith("shoal: ")
    assert said in error
    assert error.count("\n") == 1
