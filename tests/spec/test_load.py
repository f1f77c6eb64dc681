"""A run file, the command line and a preset together make one run, and each value knows where it came from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shoal.errors import SpecError, UsageError
from shoal.spec import Loaded, Run, dump, load
from shoal.spec.duration import seconds
from shoal.spec.overrides import split_overrides
from tests.spec.wrong import GOOD

SMOL = {
    "model_type": "llama", "hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9,
    "num_key_value_heads": 3, "intermediate_size": 1536, "vocab_size": 49152, "rope_theta": 100000,
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "files").mkdir()
    monkeypatch.chdir(tmp_path / "here")


def read(text: str, *overrides: str) -> Loaded:
    file = Path("../files/run.yaml")
    file.write_text(text)
    return load(file, overrides)


def weights(**changes: object) -> Path:
    folder = Path("../files/smol").resolve()
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**SMOL, **changes}))
    return folder


def test_each_value_knows_its_origin() -> None:
    loaded = read(
        GOOD + "model:\n  preset: llama3-8b\n  layers: 2\n", "train.optimizer.lr=1e-4", "data.train.0.weight=2"
    )
    assert {
        key: loaded.origins[key]
        for key in ("name", "train.steps", "train.batch", "train.optimizer.lr", "model.dim", "model.layers")
    } == {
        "name": "run.yaml:1",
        "train.steps": "run.yaml:5",
        "train.batch": "default",
        "train.optimizer.lr": "command line",
        "model.dim": "preset llama3-8b",
        "model.layers": "run.yaml:8",
    }
    assert loaded.origins["data.train.0.path"] == "run.yaml:3"
    assert loaded.origins["data.train.0.weight"] == "command line"
    assert (loaded.run.model.dim, loaded.run.model.layers, loaded.run.model.rope_theta) == (4096, 2, 500_000)


def test_there_is_an_origin_for_every_value_of_the_resolved_file() -> None:
    loaded = read(GOOD, "data.eval=[a, b]", "model.rope_scaling={kind: linear, factor: 2}")
    resolved = json.loads(json.dumps(loaded.run.model_dump(mode="json")))

    def count(value: object) -> int:
        if isinstance(value, dict):
            return sum(count(item) for item in value.values())
        if isinstance(value, list) and value and isinstance(value[0], dict):
            return sum(count(item) for item in value)
        return 1

    assert len(loaded.origins) == count(resolved)


def test_a_replaced_list_keeps_no_origin_of_the_old_one() -> None:
    loaded = read(GOOD.replace("shards", "[{path: a, weight: 2}, {path: b, weight: 3}]"), "data.train=c")
    assert [s.weight for s in loaded.run.data.train] == [1.0]
    assert loaded.origins["data.train.0.weight"] == "default"
    assert "data.train.1.path" not in loaded.origins


@pytest.mark.parametrize("train", ["x", "[x]", "{path: x}", "[{path: x}]", "\n  - x", "\n    path: x"])
def test_every_short_form_of_a_source_is_the_same_source(train: str) -> None:
    assert read(GOOD.replace("shards", train)).run == read(GOOD.replace("shards", "x")).run


def test_relative_paths_start_at_the_run_file_and_on_the_command_line_at_the_current_folder(tmp_path: Path) -> None:
    run = read(GOOD + "  # x\n", "data.eval=held", "data.cache_dir=~/c").run
    assert run.data.train[0].path == str(tmp_path / "files" / "shards")
    assert run.data.eval[0].path == str(tmp_path / "here" / "held")
    assert run.data.cache_dir == str(Path.home() / "c")
    assert read(GOOD.replace("shards", "s3://bucket/x")).run.data.train[0].path == "s3://bucket/x"
    assert Run(name="a", data={"train": "y"}, train={"steps": 1}).data.train[0].path == str(tmp_path / "here" / "y")


@pytest.mark.parametrize(
    ("lines", "name", "value"),
    [
        ("track: {wandb: off}", "track.wandb", "off"),
        ("track: {mlflow: off}", "track.mlflow", False),
        ("track: {mlflow: no}", "track.mlflow", False),
        ("  optimizer: {lr: 1e-4}", "train.optimizer.lr", 1e-4),
        ("  optimizer: {lr: 3E-4}", "train.optimizer.lr", 3e-4),
        ("  optimizer: {lr: .5}", "train.optimizer.lr", 0.5),
        ("  batch: 1_024", "train.batch", 1024),
        ("  batch: 1e3", "train.batch", 1000),
        ("  batch: 010", "train.batch", 10),
        ("  batch: '64'", "train.batch", 64),
        ("  clip:", "train.clip", None),
        ("  clip: ~", "train.clip", None),
        ("  compile: yes", "train.compile", True),
        ("track: {experiment: 2026}", "track.experiment", "2026"),
        ("track: {experiment: 1e5}", "track.experiment", "1e5"),
        ("track: {experiment: off}", "track.experiment", "off"),
        ("track: {experiment: 2026_11_03}", "track.experiment", "2026_11_03"),
        ("eval:", "eval.every", 0),
        ("checkpoint: {every: 10min}", "checkpoint.every", "10 min"),
        ("checkpoint: {every: 600 seconds}", "checkpoint.every", "10 min"),
        ("checkpoint: {every: 1.5 h}", "checkpoint.every", "90 min"),
        ("checkpoint: {every: 0.25 s}", "checkpoint.every", "0.25 s"),
        ("checkpoint: {every: 1e3}", "checkpoint.every", 1000),
        ("checkpoint: {every: 0}", "checkpoint.every", 0),
        ("checkpoint:", "checkpoint.every", "auto"),
        ("checkpoint: {memory: off}", "checkpoint.memory", "off"),
        ("checkpoint: {remote: s3://bucket/prefix/}", "checkpoint.remote", "s3://bucket/prefix"),
        ("track:\n  # mlflow: false", "track.mlflow", True),
    ],
)
def test_yaml_means_what_a_person_means(lines: str, name: str, value: object) -> None:
    found: object = read(GOOD + lines + "\n").run
    for part in name.split("."):
        found = getattr(found, part)
    assert found == value
    assert type(found) is type(value)


def test_a_byte_order_mark_and_windows_line_ends_are_read() -> None:
    Path("run.yaml").write_bytes(b"\xef\xbb\xbf" + GOOD.replace("\n", "\r\n").encode())
    assert load("run.yaml").run.train.steps == 100


def test_the_later_override_wins_and_null_takes_a_preset_away() -> None:
    text = GOOD + "model: {preset: llama3.2-1b}\n"
    assert read(text, "seed=1", "seed=2").run.seed == 2
    assert read(text, "model.preset=").run.model.dim == 256
    assert read(text, "model.rope_scaling=null").run.model.rope_scaling is None
    scaling = read(text, "model.rope_scaling.factor=4").run.model.rope_scaling
    assert scaling is not None
    assert (scaling.kind, scaling.factor, scaling.original_max_seq_len) == ("llama3", 4, 8192)


def test_an_override_is_not_cut_at_a_hash_or_a_colon() -> None:
    assert read(GOOD, "track.experiment=a #1: b").run.track.experiment == "a #1: b"
    assert read(GOOD, "track.experiment='12'").run.track.experiment == "12"
    assert read(GOOD, "track.experiment=12").run.track.experiment == "12"


@pytest.mark.parametrize("spelt", ["10min", "10 min", "'10 min'", "600s", "10 minutes"])
def test_a_time_is_the_same_however_it_is_spelt_on_the_command_line(spelt: str) -> None:
    run = read(GOOD, f"checkpoint.every={spelt}").run
    assert run.checkpoint.every == "10 min"
    assert seconds(run.checkpoint.every) == 600


def test_overrides_are_parted_from_a_verbs_own_arguments() -> None:
    argv = ["run.yaml", "--json", "train.steps=5", "--train.batch", "8", "--data.eval=[a, b]", "seed=1", "--name", "x"]
    assert split_overrides(argv) == (
        ["run.yaml", "--json"],
        ["train.steps=5", "train.batch=8", "data.eval=[a, b]", "seed=1", "name=x"],
    )
    assert split_overrides(["dir/a.b=c.yaml", "--out=x", "--", "a.b=c"]) == (
        ["dir/a.b=c.yaml", "--out=x", "--", "a.b=c"],
        [],
    )
    assert split_overrides(["--train.schedule.min_ratio", "-1"]) == ([], ["train.schedule.min_ratio=-1"])
    with pytest.raises(UsageError, match=r"`--train\.steps` on the command line needs a value"):
        split_overrides(["--train.steps", "--json"])
    with pytest.raises(UsageError, match="needs a value") as caught:
        split_overrides(["--train." + "x" * 9000])
    assert len(str(caught.value)) < 500


def test_the_shape_comes_from_the_config_of_the_weights() -> None:
    folder = weights()
    loaded = read(GOOD + "model: {weights: smol, max_seq_len: 2048}\n")
    assert loaded.run.model.weights == str(folder)
    assert (loaded.run.model.dim, loaded.run.model.layers, loaded.run.model.max_seq_len) == (576, 30, 2048)
    assert loaded.origins["model.dim"] == "weights config.json"
    assert loaded.origins["model.max_seq_len"] == "run.yaml:6"


def test_a_shape_that_the_weights_do_not_have_is_refused() -> None:
    weights()
    with pytest.raises(SpecError, match=r"run\.yaml:6:24: model\.layers is 12, but the weights have 30; remove it\."):
        read(GOOD + "model: {weights: smol, layers: 12}\n")


def test_weights_of_a_kind_shoal_does_not_know_are_refused_with_the_line_that_named_them() -> None:
    weights(model_type="gpt2")
    with pytest.raises(SpecError, match=r"run\.yaml:6:9: .*smol: config\.json has model_type 'gpt2'"):
        read(GOOD + "model: {weights: smol}\n")


def test_a_resolved_file_loads_after_its_weights_are_gone() -> None:
    folder = weights()
    run = read(GOOD + "model: {weights: smol}\n").run
    (folder / "config.json").unlink()
    assert read(dump(run)).run == run
    resolved = dump(run)
    assert "  mamba:" in resolved
    older = "".join(line for line in resolved.splitlines(keepends=True) if not line.startswith("  mamba:"))
    assert read(older).run == run  # written before there were such models
