"""Before a run starts: its inputs are here, and the model is one that can be trained and taken elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shoal.decide.checks import local_inputs, trainable
from shoal.errors import WRONG_ENVIRONMENT, ShoalError, SpecError
from shoal.spec import Run


def run(train: object, **model: Any) -> Run:
    return Run.model_validate({"name": "a", "data": {"train": train}, "train": {"steps": 9}, "model": model})


def prepared(folder: Path) -> Path:
    folder.mkdir()
    (folder / "index.json").write_text("{}")
    return folder


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda path: None, "does not exist; run `shoal data prepare"),
        (lambda path: path.write_text("x"), "is a file and not a folder"),
        (lambda path: path.mkdir(), "has no index.json and so is no finished data set"),
    ],
    ids=["nothing", "a file", "unfinished"],
)
def test_data_that_is_not_prepared_is_refused_with_the_command_that_prepares_it(
    make: Any, says: str, tmp_path: Path
) -> None:
    make(tmp_path / "shards")
    with pytest.raises(ShoalError) as refused:
        local_inputs(run(str(tmp_path / "shards")))
    assert says in str(refused.value)
    assert f"--out {tmp_path / 'shards'}" in str(refused.value)
    assert refused.value.exit_code == WRONG_ENVIRONMENT


def test_held_out_data_is_looked_for_too(tmp_path: Path) -> None:
    spec = run(str(prepared(tmp_path / "a")))
    with_eval = spec.model_copy(
        update={"data": spec.data.model_copy(update={"eval": run(str(tmp_path / "b")).data.train})}
    )
    local_inputs(spec)
    with pytest.raises(ShoalError, match=r"data\.eval names .*b, which does not exist"):
        local_inputs(with_eval)


@pytest.mark.parametrize("missing", ["train", "eval"])
def test_a_missing_half_of_a_pair_is_answered_with_the_command_that_makes_both(missing: str, tmp_path: Path) -> None:
    prepared(tmp_path / ("eval" if missing == "train" else "train"))
    paths = {"train": str(tmp_path / "train"), "eval": str(tmp_path / "eval")}
    pair = Run.model_validate({"name": "a", "data": paths, "train": {"steps": 9}})
    with pytest.raises(ShoalError) as refused:
        local_inputs(pair)
    assert f"`shoal data prepare TEXT… --eval-fraction 0.05 --out {tmp_path}`" in str(refused.value)


def test_remote_data_is_not_looked_for() -> None:
    local_inputs(run("s3://bucket/shards"))


def test_weights_must_be_a_folder_with_a_config_and_safetensors(tmp_path: Path) -> None:
    data, weights = str(prepared(tmp_path / "data")), tmp_path / "weights"
    for make, says in (
        (lambda: None, "is not a folder here; download"),
        (weights.mkdir, "has no config.json"),
        ((weights / "config.json").touch, r"has no \*\.safetensors"),
    ):
        make()
        with pytest.raises(ShoalError, match=says) as refused:
            local_inputs(run(data, weights=str(weights)))
        assert refused.value.exit_code == WRONG_ENVIRONMENT
    (weights / "model.safetensors").touch()
    local_inputs(run(data, weights=str(weights)))


def test_a_run_built_in_python_is_held_to_the_same_rules() -> None:
    with pytest.raises(SpecError, match=r"model\.dim 250 is not a multiple of model\.heads 4"):
        trainable(run("x", dim=250))


def test_a_model_cut_over_peers_is_not_quietly_trained_whole() -> None:
    whole = run("x")
    stages = whole.swarm.stages.model_copy(update={"count": 4})
    cut = whole.model_copy(update={"swarm": whole.swarm.model_copy(update={"stages": stages})})
    trainable(whole)
    with pytest.raises(SpecError, match=r"swarm\.stages\.count is 4: .*shoal swarm create"):
        trainable(cut)


def test_a_model_that_could_not_be_exported_is_refused_before_it_is_trained() -> None:
    with pytest.raises(SpecError, match="qk_norm true does not go with family llama"):
        trainable(run("x", qk_norm=True))
