"""Every wrong run file is refused with a sentence that names the place, the value and the way out."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shoal.cli.main import main
from shoal.errors import ShoalError, SpecError
from shoal.spec import load
from tests.spec.wrong import ALL, GOOD, Wrong


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("row", ALL, ids=lambda row: row.what)
def test_a_wrong_run_file_is_refused_with_its_place_and_the_way_out(row: Wrong) -> None:
    Path("run.yaml").write_bytes(row.file if isinstance(row.file, bytes) else row.file.encode())
    with pytest.raises(ShoalError) as refused:
        load("run.yaml", row.overrides)
    message = str(refused.value)
    assert [part for part in row.says if part not in message] == [], message
    assert refused.value.exit_code == row.code
    assert all(line.endswith((".", "?")) for line in message.splitlines()), "an error is made of sentences"


def test_a_password_on_the_command_line_is_not_repeated() -> None:
    Path("run.yaml").write_text(GOOD)
    with pytest.raises(SpecError) as refused:
        load("run.yaml", ["track.mlflow=http://me:hunter2@host"])
    assert "hunter2" not in str(refused.value)


def test_everything_wrong_is_said_at_once_in_the_order_of_the_file_then_of_the_command_line() -> None:
    Path("run.yaml").write_text(
        "name: a b\nsteps: 3\ndata: {train: x, seq_len: -1}\ntrain: {steps: 5, optimizer: {lr: 0}}\n"
    )
    with pytest.raises(SpecError) as refused:
        load("run.yaml", ["eval.every=-1"])
    places = [line.split(": ")[0] for line in str(refused.value).splitlines()]
    in_file = ["run.yaml:1:1", "run.yaml:2:1", "run.yaml:3:18", "run.yaml:4:31"]
    assert places == [*in_file, "`eval.every=-1` on the command line"]


def test_a_value_set_with_a_space_is_answered_with_the_equals_sign(capsys: pytest.CaptureFixture[str]) -> None:
    Path("run.yaml").write_text(GOOD)
    assert main(["train", "run.yaml", "train.steps", "600"]) == 2
    assert "did you mean `train.steps=600`?" in capsys.readouterr().err
    for typed in (["--steps", "600"], ["--steps=600"], ["--max-steps", "600"], ["--max_steps=600"]):
        assert main(["train", "run.yaml", *typed]) == 2
        assert "did you mean `train.steps=600`?" in capsys.readouterr().err
    assert main(["train", "run.yaml", "--every", "600"]) == 2  # of what?
    assert "see `shoal train --help`" in capsys.readouterr().err
    assert main(["train", "run.yaml", "some.thing", "600"]) == 2
    assert "see `shoal train --help`" in capsys.readouterr().err


def test_a_misspelt_needed_name_is_one_sentence_not_two() -> None:
    Path("run.yaml").write_text(GOOD.replace("steps", "stpes"))
    with pytest.raises(SpecError) as refused:
        load("run.yaml")
    assert len(str(refused.value).splitlines()) == 1


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_copies_inside_an_island_are_refused_in_one_sentence_not_two(processes: int) -> None:
    """The mesh itself need not fit then, and the nearest that does would be one with copies."""
    Path("run.yaml").write_text(GOOD)
    with pytest.raises(SpecError) as refused:
        load("run.yaml", ["fleet.islands=2", "mesh.dp_replicate=2", f"resources.processes={processes}"])
    assert len(str(refused.value).splitlines()) == 1


def test_an_unknown_preset_does_not_hide_what_else_is_wrong() -> None:
    Path("run.yaml").write_text(GOOD + "model: {preset: nope}\nseeed: 1\n")
    with pytest.raises(SpecError, match=r"(?s)no preset 'nope'.*did you mean seed\?"):
        load("run.yaml")


def test_a_rule_points_at_what_was_stated_not_at_the_preset() -> None:
    Path("run.yaml").write_text(GOOD + "model:\n  preset: llama3-8b\n  heads: 33\n")
    with pytest.raises(SpecError, match=r"run\.yaml:8:3: model\.dim 4096 is not a multiple of model\.heads 33"):
        load("run.yaml")


@pytest.mark.parametrize(
    ("path", "says"),
    [("gone.yaml", "there is no run file gone.yaml"), (".", "is a folder"), ("pipe", "is not a regular file")],
)
def test_what_is_no_file_is_refused(path: str, says: str) -> None:
    if path == "pipe":
        os.mkfifo("pipe")
    with pytest.raises(SpecError, match=says):
        load(path)


def test_the_command_line_prints_one_sentence_and_exits_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    Path("run.yaml").write_text(GOOD)
    assert main(["show", "run.yaml", "--train.stpes", "3"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == (
        "shoal: `train.stpes=3` on the command line: train.stpes is not a name of the run file; "
        "did you mean train.steps?\n"
    )
