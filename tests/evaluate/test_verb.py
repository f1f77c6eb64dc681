"""`shoal eval` of a run that was really trained, of what it exports, and the mistakes that people make."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from shoal.cli.main import main
from shoal.journal.journal import read
from shoal.journal.rundir import RunDir
from tests.train.tiny import make_run, train_on

Captured = pytest.CaptureFixture[str]
SENTENCE = "the whale swims in the deep sea. "


@pytest.fixture(scope="module")
def space(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workspace with the run `tiny`, two checkpoints, and a task about the sentence that it knows."""
    space = tmp_path_factory.mktemp("workspace")
    (space / "text.txt").write_text("\n".join([SENTENCE * 3] * 40))
    assert (
        main(["data", "prepare", str(space / "text.txt"), "--per-line", "--out", str(space / "data"), "--workers", "1"])
        == 0
    )
    changes = {
        "train.steps": 60,
        "train.batch": 8,
        "train.optimizer.lr": 1e-2,
        "checkpoint.every": 20,
        "data.seq_len": 64,
    }
    train_on(make_run(space / "data", **changes), space, world=1)
    items = [
        {"text": "the whale swims in the", "options": ["deep sea.", "green bottle."], "right": 0, "part": n % 2}
        for n in range(6)
    ]
    (space / "knows.jsonl").write_text("".join(json.dumps(one) + "\n" for one in items))
    keys: dict[str, Any] = {
        "task": "knows",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": "knows.jsonl"}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "text",
        "doc_to_choice": "options",
        "doc_to_target": "right",
        "metric_list": [{"metric": "acc"}],
        "metadata": {"version": 3, "cluster": "part"},
    }
    (space / "knows.yaml").write_text(yaml.safe_dump(keys))
    whole = {key: keys[key] for key in ("dataset_path", "dataset_kwargs", "test_split")}
    whole |= {"task": "whole", "output_type": "loglikelihood_rolling", "doc_to_target": "{{text}} {{options[0]}}"}
    (space / "whole.yaml").write_text(yaml.safe_dump(whole))
    return space


def figures(space: Path, capsys: Captured, *argv: str) -> list[dict[str, Any]]:
    capsys.readouterr()
    assert main(["eval", *argv, "--json", "--workspace", str(space)]) == 0
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["figures"]
    return found


def recorded(space: Path) -> list[dict[str, Any]]:
    return [record for record, _ in read(RunDir.of("tiny", space).journal_file) if record["kind"] == "evaluated"]


def test_a_run_is_asked_and_its_journal_has_the_figures_once(space: Path, capsys: Captured) -> None:
    tasks = ["--tasks", f"{space / 'knows.yaml'},{space / 'whole.yaml'}"]
    found = figures(space, capsys, "tiny", *tasks)
    by = {one["measure"]: one for one in found}
    assert by["acc"]["value"] == 1.0
    assert (by["acc"]["n"], by["acc"]["clusters"], by["acc"]["version"]) == (6, 2, "3")
    assert by["bits_per_byte"]["value"] < 0.5, "it knows this sentence by heart"
    (kept,) = recorded(space)
    assert kept["step"] == 60
    assert kept["figures"] == found
    assert figures(space, capsys, "tiny", *tasks) == found
    assert len(recorded(space)) == 1
    files = sorted((RunDir.of("tiny", space).path / "evaluations").glob("*.jsonl"))
    assert [len(path.read_text().splitlines()) for path in files] == [7, 7]


def test_each_checkpoint_is_asked(space: Path, capsys: Captured) -> None:
    found = figures(space, capsys, "tiny", "--tasks", str(space / "whole.yaml"), "--step", "every")
    bits = {one["weights"]: one["value"] for one in found if one["measure"] == "bits_per_byte"}
    assert list(bits) == ["tiny@20", "tiny@40", "tiny@60"]
    assert bits["tiny@60"] < bits["tiny@20"]
    assert {record["step"] for record in recorded(space)} == {20, 40, 60}


def test_what_it_exports_says_the_same(space: Path, capsys: Captured) -> None:
    folder = space / "exported"
    assert main(["checkpoint", "export", "tiny", str(folder), "--workspace", str(space)]) == 0
    tasks = ["--tasks", f"{space / 'knows.yaml'},{space / 'whole.yaml'}"]
    own, others = figures(space, capsys, "tiny", *tasks), figures(space, capsys, str(folder), *tasks)
    for a, b in zip(own, others, strict=True):
        assert a["value"] == pytest.approx(b["value"], rel=1e-6)
    assert main(["eval", str(folder), *tasks, "--against", "tiny", "--workspace", str(space)]) == 0
    assert "no difference can be seen with 6 items" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["tiny"], "say what to ask"),
        (["tiny", "--tasks", "knows"], "no made task 'knows'"),
        (["tiny", "--tasks", "gone.yaml"], "gone.yaml"),
        (["tinny", "--tasks", "copy"], "did you mean 'tiny'"),
        (["tiny", "copy", "--tasks", "copy"], "one word too many"),
        (["tiny", "--tasks", "copy,copy"], "each task once"),
        (["tiny", "--tasks", "copy", "--limit", "0"], "--limit is 0"),
        (["tiny", "--tasks", "copy", "--step", "last"], "--step is 'last'"),
        (["tiny", "--tasks", "copy", "--step", "every", "--against", "tiny"], "do not go together"),
        (["tiny", "--tasks", "copy", "--step", "7"], "no checkpoint of step 7"),
        (["tiny", "--tasks", "copy", "--template"], "brings no chat template"),
        (["ftp://host", "--tasks", "copy"], "no address"),
        (["http://127.0.0.1:9", "--tasks", "copy"], "--model NAME"),
        (["http://127.0.0.1:9", "--tasks", "copy", "--model", "m", "--key-from", "NO_SUCH_KEY"], "which is not set"),
        (["tiny", "--tasks", "copy", "--key-from", "HOME"], "--key-from is for a URL"),
        (["lm-eval"], "say which model"),
    ],
)
def test_mistakes_are_answered_in_one_sentence(space: Path, capsys: Captured, argv: list[str], words: str) -> None:
    assert main(["eval", *argv, "--workspace", str(space)]) == 2
    said = capsys.readouterr().err
    assert words in said
    assert said.count("\n") == 1


def test_a_task_that_the_model_cannot_hold_is_refused(space: Path, capsys: Captured) -> None:
    assert main(["eval", "tiny", "--tasks", "copy", "--count", "2", "--workspace", str(space)]) in (0, 78)
    said = capsys.readouterr()
    assert "copy" in said.out or "max_gen_toks" in said.err


def test_items_that_stand_in_the_training_data_are_named(space: Path, capsys: Captured) -> None:
    long = [
        {"text": SENTENCE * 4, "options": ["a", "b"], "right": 0},
        {"text": "something else " * 9, "options": ["a", "b"], "right": 1},
    ]
    (space / "seen.jsonl").write_text("".join(json.dumps(one) + "\n" for one in long))
    keys = yaml.safe_load((space / "knows.yaml").read_text()) | {"task": "seen", "metadata": {"version": 1}}
    keys["dataset_kwargs"] = {"data_files": {"test": "seen.jsonl"}}
    (space / "seen.yaml").write_text(yaml.safe_dump(keys))
    argv = ["--tasks", str(space / "seen.yaml"), "--contamination", str(space / "data"), "--workspace", str(space)]
    assert main(["eval", "tiny", *argv]) == 0
    said = capsys.readouterr().out
    assert "1 of 2 items" in said
    assert "seen item 0" in said
