"""`model.init`: which rule a run begins by, where one has no effect, and what files from before it mean."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any, get_args

import pytest

from shoal.errors import SpecError
from shoal.spec import Run, dump, load
from shoal.spec.begun import differences
from shoal.spec.families import FAMILIES
from shoal.spec.hf.config import to_hf
from shoal.spec.model import Model
from shoal.spec.rules import broken
from shoal.spec.run import Optimizer
from shoal.spec.shape import shape_of
from shoal.spec.start_values import AUTO, FROM_THE_SHAPE, RULES, STD, rule_of, with_rule
from shoal.spec.yaml_text import dump_yaml
from shoal.swarm.charter import write_charter

BASE: dict[str, Any] = {"name": "a", "data": {"train": "/x"}, "train": {"steps": 9}}


def run_of(**model: Any) -> Run:
    return Run.model_validate({**BASE, "model": model})


def written(folder: Path, values: dict[str, Any]) -> Path:
    file = folder / "run.yaml"
    file.write_text(dump_yaml(values))
    return file


def test_every_rule_can_be_named_and_every_family_has_one_by_itself() -> None:
    assert set(get_args(Model.model_fields["init"].annotation)) == {"auto", *RULES}
    assert set(AUTO) == set(FAMILIES)
    optimizers = get_args(Optimizer.model_fields["name"].annotation)
    for family, optimizer in product(AUTO, optimizers):
        assert rule_of(Model(family=family), optimizer)[0] == AUTO[family][optimizer] in RULES
        assert with_rule(Model(family=family), optimizer).init == AUTO[family][optimizer]


def test_a_stated_rule_is_kept_and_a_stated_deviation_alone_means_that_all_matrices_have_it() -> None:
    assert rule_of(Model(init="zero"))[0] == "zero"
    assert rule_of(Model(init_std=0.3)) == ("normal", "model.init_std 0.3 is for all matrices")
    assert shape_of(Model(init_std=0.3, vocab_size=64)).init_std == 0.3
    assert shape_of(Model(init="torchtitan", init_std=0.3, vocab_size=64)).init == "torchtitan"
    assert shape_of(Model(vocab_size=64)).init_std == STD


@pytest.mark.parametrize("init", FROM_THE_SHAPE)
def test_a_deviation_that_would_do_nothing_is_refused(init: str) -> None:
    (names, sentence), *more = broken(run_of(init=init, init_std=0.3))
    assert (names, more) == (("model.init_std", "model.init"), [])
    assert f"model.init {init} takes its standard deviations from the shape" in sentence
    assert not broken(run_of(init=init))
    assert not broken(run_of(init="torchtitan", init_std=0.3))


def test_an_unknown_rule_is_one_sentence_that_names_them_all(tmp_path: Path) -> None:
    file = written(tmp_path, {**BASE, "model": {"init": "xavier"}})
    with pytest.raises(SpecError) as caught:
        load(file)
    assert str(caught.value).count("\n") == 0
    assert "model.init is 'xavier'" in str(caught.value)
    assert all(f"`{name}`" in str(caught.value) for name in ("auto", *RULES))


def test_with_weights_a_rule_or_a_deviation_is_refused_and_none_is_chosen(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(to_hf(shape_of(Model(vocab_size=64, init_std=0.2)))))
    weights = {"weights": str(tmp_path)}
    with pytest.raises(SpecError, match=r"model\.init torchtitan is for a model that begins from nothing"):
        load(written(tmp_path, {**BASE, "model": {**weights, "init": "torchtitan"}}))
    with pytest.raises(SpecError, match=r"model\.init_std is 0\.3, but the weights have 0\.2; remove it"):
        load(written(tmp_path, {**BASE, "model": {**weights, "init_std": 0.3}}))
    run = load(written(tmp_path, {**BASE, "model": weights})).run
    assert with_rule(run.model, "muon").init == "auto"


def test_a_resolved_file_from_before_the_rules_begins_as_it_began(tmp_path: Path) -> None:
    before = run_of(preset="tiny", dim=64, heads=4, init_std=0.02).model_dump(mode="json")
    del before["model"]["init"]
    old = load(written(tmp_path, before))
    assert old.run.model.init == "normal"
    assert old.run.model.dim == 64  # the preset is not asked again
    assert [d.key for d in differences(old.run, run_of(preset="tiny", dim=64, heads=4), auto_is_equal=True)] == []
    changed = differences(old.run, run_of(preset="tiny", dim=64, heads=4, init="zero"), auto_is_equal=True)
    assert [(str(d), d.safe) for d in changed] == [("model.init was normal, now zero", False)]


def test_a_resolved_file_from_before_the_rules_needs_its_weights_no_more(tmp_path: Path) -> None:
    before = run_of(weights="/gone", init_std=0.02).model_dump(mode="json")
    del before["model"]["init"]
    assert load(written(tmp_path, before)).run.model.init == "auto"


def test_a_swarm_agrees_on_the_rule_and_not_on_auto(tmp_path: Path) -> None:
    (tmp_path / "shards").mkdir()
    run = Run.model_validate({**BASE, "data": {"train": str(tmp_path / "shards")}, "model": {"vocab_size": 64}})
    charter, _ = write_charter(run, "aa" * 32, add=None)
    assert charter.run["model"]["init"] == rule_of(run.model)[0] != "auto"
    assert "init: auto" in dump(run)
