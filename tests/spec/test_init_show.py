"""`shoal init` writes run files that load, and `shoal show` prints them whole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shoal.cli.init import about, templates
from shoal.cli.main import main
from shoal.decide.checks import trainable
from shoal.spec import load
from shoal.spec.schema import schema
from tests.spec.test_load import SMOL
from tests.spec.wrong import GOOD


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def shoal(*argv: str) -> None:
    assert main(list(argv)) == 0


@pytest.mark.parametrize("template", templates())
def test_every_template_is_a_run_that_can_be_trained(template: str, capsys: pytest.CaptureFixture[str]) -> None:
    shoal("init", template, "sub/mine.yaml")
    assert "shoal show sub/mine.yaml" in capsys.readouterr().out
    Path("sub/models/base").mkdir(parents=True)
    Path("sub/models/base/config.json").write_text(json.dumps(SMOL))
    run = load("sub/mine.yaml").run
    trainable(run)
    assert run.name == "mine"
    assert run.data.train[0].path == str(Path("sub/data/train").resolve())


@pytest.mark.parametrize("template", templates())
def test_a_template_names_its_schema_where_an_editor_finds_it(template: str) -> None:
    shoal("init", template, "a/b/run.yaml")
    first = Path("a/b/run.yaml").read_text().splitlines()[0]
    relative = first.removeprefix("# yaml-language-server: $schema=")
    assert relative != first
    assert json.loads((Path("a/b") / relative).read_text()) == schema()


@pytest.mark.parametrize("file", ["PROFILE.yaml", "FILE.yaml", "NAME.yml", "2026.yaml"])
def test_the_run_is_named_after_its_file_whatever_that_is(file: str) -> None:
    shoal("init", "pretrain", file)
    assert load(file).run.name == Path(file).stem
    assert f"shoal train {file}" in Path(file).read_text()


def test_a_file_name_that_is_no_run_name_gets_a_plain_one() -> None:
    shoal("init", "pretrain", "my run.yaml")
    assert load("my run.yaml").run.name == "run"


def test_init_never_overwrites_unless_forced(capsys: pytest.CaptureFixture[str]) -> None:
    Path("pretrain.yaml").write_text("mine")
    assert main(["init", "pretrain"]) == 2
    assert "pretrain.yaml exists; give another name, or --force" in capsys.readouterr().err
    assert Path("pretrain.yaml").read_text() == "mine"
    shoal("init", "pretrain", "--force")
    assert load("pretrain.yaml").run.model.preset == "tiny"


@pytest.mark.parametrize(
    ("argv", "says", "code"),
    [
        (["init"], "which template?", 2),
        (["init", "pretrian"], "did you mean pretrain?", 2),
        (["init", "pretrain", "."], "is a folder", 2),
        (["init", "pretrain", "file/run.yaml"], "cannot be written", 78),
        (["show"], "which run file?", 2),
        (["show", "gone.yaml"], "there is no run file gone.yaml; `shoal init pretrain gone.yaml`", 2),
        (["show", "run.yaml", "--train.steps"], "needs a value", 2),
        (["show", "run.yaml", "--josn"], "--josn", 2),
    ],
)
def test_wrong_usage_is_one_sentence(argv: list[str], says: str, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    Path("file").touch()
    Path("run.yaml").write_text(GOOD)
    assert main(argv) == code
    err = capsys.readouterr().err
    assert says in err
    assert err.count("\n") == 1


def test_init_lists_its_templates(capsys: pytest.CaptureFixture[str]) -> None:
    shoal("init", "--list")
    assert capsys.readouterr().out.splitlines() == [f"{name:<8}  {about(text)}" for name, text in templates().items()]


def test_show_prints_each_value_with_its_origin_in_columns(capsys: pytest.CaptureFixture[str]) -> None:
    Path("run.yaml").write_text(GOOD + "model: {preset: llama3-8b}\n")
    shoal("show", "run.yaml", "--train.batch", "64", "--all")
    *rows, empty, rate, size = capsys.readouterr().out.splitlines()
    table = {row.split()[0]: row.split(None, 2)[1:] for row in rows}
    assert table["train.steps"] == ["100", "run.yaml:5"]
    assert table["train.batch"] == ["64", "command line"]
    assert table["model.dim"] == ["4096", "preset llama3-8b"]
    assert table["train.clip"] == ["1.0", "default"]
    assert table["model.weights"] == ["-", "default"]
    starts = {row.rindex(origin) for row in rows for origin in ("run.yaml:", "default") if row.endswith(origin)}
    assert len(starts) == 1
    assert empty == ""
    assert rate == "rate from step 1: up to 0.0003 over 5 steps, then cosine to 3e-05 at step 100"
    assert size == "parameters: 8,030,261,248 (8.03B); vocabulary 128,256"


def test_show_leaves_out_sections_of_which_nothing_was_set(capsys: pytest.CaptureFixture[str]) -> None:
    Path("run.yaml").write_text(GOOD + "launch: {slurm: {account: me}}\n")
    shoal("show", "run.yaml")
    out = capsys.readouterr().out
    shown = {line.split()[0].rpartition(".")[0] for line in out.splitlines()[:-5]}
    assert shown == {"", "data", "data.train.0", "train", "launch", "launch.slurm"}
    assert "all defaults, and left out: model, eval, mesh, engine, resources" in out
    assert "(`--all` shows them)" in out
    shoal("show", "run.yaml", "--all")
    whole = capsys.readouterr().out
    assert "left out" not in whole
    assert len(whole.splitlines()) > 3 * len(out.splitlines())


def test_show_says_how_many_steps_follow_from_tokens_and_that_epochs_need_the_data(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("run.yaml").write_text(GOOD)
    shoal("show", "run.yaml", "train.tokens=1M")
    assert "steps: 62 (1,000,000 tokens in steps of 32 x 512)" in capsys.readouterr().out
    shoal("show", "run.yaml", "train.epochs=2")
    assert "steps: not known until data.train is prepared" in capsys.readouterr().out


def test_show_counts_with_the_vocabulary_of_the_prepared_data(capsys: pytest.CaptureFixture[str]) -> None:
    Path("run.yaml").write_text(GOOD + "model: {preset: tiny}\n")
    shoal("show", "run.yaml")
    assert "not known until data.train is prepared" in capsys.readouterr().out
    Path("shards").mkdir()
    Path("shards/index.json").write_text(json.dumps({"vocab_size": 257}))
    shoal("show", "run.yaml")
    assert "parameters: 1,636,032 (1.64M); vocabulary 320" in capsys.readouterr().out


def test_show_json_is_values_origins_and_size(capsys: pytest.CaptureFixture[str]) -> None:
    Path("run.yaml").write_text(GOOD + "model: {preset: mixtral-8x7b}\n")
    shoal("show", "run.yaml", "--json", "seed=3")
    shown = json.loads(capsys.readouterr().out)
    assert shown["run"]["seed"] == 3
    assert shown["origins"]["seed"] == "command line"
    assert (shown["params"], shown["active_params"]) == (46_702_792_704, 12_879_925_248)


def test_show_yaml_is_a_run_file_of_the_same_run(capsys: pytest.CaptureFixture[str]) -> None:
    Path("run.yaml").write_text(GOOD)
    shoal("show", "run.yaml", "--yaml", "train.steps=7")
    Path("whole.yaml").write_text(capsys.readouterr().out)
    assert load("whole.yaml").run == load("run.yaml", ["train.steps=7"]).run


def test_show_prints_the_schema_and_the_presets(capsys: pytest.CaptureFixture[str]) -> None:
    shoal("show", "--schema")
    assert json.loads(capsys.readouterr().out) == schema()
    shoal("show", "--presets")
    rows = capsys.readouterr().out.splitlines()
    assert rows[0].split()[:2] == ["preset", "parameters"]
    assert any(row.split()[:3] == ["qwen3-235b-a22b", "235B", "22.2B"] for row in rows)
