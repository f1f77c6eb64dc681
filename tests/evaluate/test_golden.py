"""Shoal says of every item what lm-eval says of it: golden.json holds lm-eval's own answers (make_golden.py)."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from shoal.evaluate.answers import Answers, Head
from shoal.evaluate.ask import PLAIN, Asking, evaluated
from shoal.evaluate.model import Local
from shoal.evaluate.questions import questions
from shoal.evaluate.task import GENERATE, ROLLING
from shoal.evaluate.task_file import load_task
from shoal.generate.opened import Wanted, of_folder
from tests.evaluate import tiny

GOLDEN: dict[str, Any] = json.loads(Path(__file__).with_name("golden.json").read_text())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("golden")
    tiny.write_tasks(made / "tasks")
    for kind in ("plain", "begins"):
        tiny.write_model(made / kind, kind == "begins")
    return made


@pytest.fixture(scope="module")
def models(folder: Path) -> dict[str, Local]:
    return {kind: Local(of_folder(folder / kind, Wanted("cpu", special=True))) for kind in ("plain", "begins")}


@pytest.mark.parametrize("kind", ["plain", "begins"])
@pytest.mark.parametrize("name", list(tiny.TASKS))
def test_items_and_figures_are_those_of_lm_eval(
    folder: Path, models: dict[str, Local], tmp_path: Path, kind: str, name: str
) -> None:
    model, golden = models[kind], GOLDEN[kind][name]
    task = load_task(folder / "tasks" / f"{name}.yaml")
    figures = evaluated(task, model, tmp_path, Asking(group=7))
    asked = questions(task)
    with Answers(tmp_path, Head(task.name, task.digest, model.name, model.digest, PLAIN, 7)) as kept:
        said = [kept.done[one.digest] for one in asked]
    # lm-eval adds the parts of a long text up in float32, which has 7 digits: hence the relative bound.
    for question, answer, (texts, theirs) in zip(asked, said, golden["items"], strict=True):
        asks = [list(pair) for pair in question.asks]
        parts = [[a[1]] if task.kind == ROLLING else a[:1] if task.kind == GENERATE else a for a in asks]
        assert hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:12] == texts, "asked in other words"
        if task.kind == GENERATE:
            assert [answer.text] == theirs
            continue
        for (score, likeliest), one in zip(answer.scores, theirs, strict=True):
            assert score == pytest.approx(one[0] if isinstance(one, list) else one, abs=1e-4, rel=5e-7)
            assert not isinstance(one, list) or likeliest == one[1]
    exact = {"acc", "acc_norm", "acc_bytes", "exact_match"}
    for figure in figures:
        mean = golden["results"][f"{figure.metric},{figure.filter}"]
        if figure.metric not in exact:
            assert figure.found.mean == pytest.approx(mean, rel=1e-5)
            continue
        assert figure.found.mean == mean
        stderr = golden["results"][f"{figure.metric}_stderr,{figure.filter}"]
        assert figure.found.stderr == pytest.approx(stderr, abs=1e-12)


def test_what_lm_eval_was_asked_covers_more_than_one_outcome() -> None:
    """Golden values that are all alike would hold nothing."""
    accuracies = {one["results"].get("acc,none") for kind in ("plain", "begins") for one in GOLDEN[kind].values()}
    assert len(accuracies) > 3
    answers = [said for _, said in GOLDEN["plain"]["write"]["items"]]
    assert len({json.dumps(one) for one in answers}) > 10
