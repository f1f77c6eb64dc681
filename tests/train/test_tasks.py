"""Tasks while training: the same figures on every layout, and the same steps as without them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.decide.auto import decide
from shoal.errors import SpecError, UsageError
from shoal.evaluate.generated.catalogue import named, write
from shoal.journal import journal
from shoal.journal.tail import is_closed
from shoal.observe.report import as_json, as_text, report
from shoal.own.code import NONE
from shoal.parallel.build import build
from shoal.parallel.place import Place
from shoal.spec.rules import broken
from shoal.track.events import Reader
from shoal.train.tasks import Tasks
from tests.slow import some_slow
from tests.train.asked import make_text
from tests.train.tiny import digest_of, make_run, train_on

pytestmark = pytest.mark.usefixtures("kept_ranks")

ASKED: dict[str, Any] = {
    "train.steps": 2,
    "model.max_seq_len": 256,
    "model.layers": 2,
    "eval.tasks": ["brackets", "arithmetic", "cloze"],
    "eval.limit": 40,  # two groups of unlike sizes
    "eval.samples": ["Repeat: a b", "12 + 5 =", "c"],
    "eval.sample_tokens": 6,
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_text(tmp_path_factory.mktemp("text"))


def told(records: list[dict[str, Any]]) -> tuple[dict[str, float], list[str]]:
    (tasks,) = [r for r in records if r["kind"] == "tasks"]
    (samples,) = [r for r in records if r["kind"] == "samples"]
    figures = {f"{one['task']} {one['measure']}": float(one["value"]) for one in tasks["figures"]}
    return figures, [one["text"] for one in samples["texts"]]


@pytest.fixture(scope="module")
def alone(data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, float], list[str]]:
    run_dir = train_on(make_run(data, name="alone", **ASKED), tmp_path_factory.mktemp("alone"), 1)
    return told(journal.records(run_dir.journal_file))


LAYOUTS = {
    "shards": (2, {"mesh.dp_shard": 2}),
    "copies": (2, {"mesh.dp_replicate": 2}),
    "pipeline": (2, {"mesh.pp": 2, "mesh.micro_batch": 4}),
    "tensors": (2, {"mesh.tp": 2}),
    "context": (2, {"mesh.cp": 2}),
    "shards and tensors": (4, {"mesh.dp_shard": 2, "mesh.tp": 2}),
    "pipeline and shards": (4, {"mesh.pp": 2, "mesh.dp_shard": 2, "mesh.micro_batch": 4}),
    "four": (4, {"mesh.dp_shard": 2, "mesh.dp_replicate": 2}),
}


@pytest.mark.parametrize("layout", some_slow(list(LAYOUTS), slow=[*list(LAYOUTS)[1:2], *list(LAYOUTS)[3:]]))
def test_the_figures_are_those_of_one_process(
    layout: str, data: Path, alone: tuple[dict[str, float], list[str]], tmp_path: Path
) -> None:
    world, mesh = LAYOUTS[layout]
    figures, texts = told(journal.records(train_on(make_run(data, **ASKED, **mesh), tmp_path, world).journal_file))
    assert figures.keys() == alone[0].keys()
    for name, value in figures.items():
        assert value == pytest.approx(alone[0][name], rel=1e-5 if "perplexity" in name else 0), name
    assert texts == alone[1]


def test_a_run_with_tasks_takes_the_steps_of_one_without(data: Path, tmp_path: Path) -> None:
    few = {**ASKED, "train.steps": 3, "eval.every": 1, "eval.limit": 3, "eval.tasks": ["brackets", "arithmetic"]}
    asked = train_on(make_run(data, name="asked", **few), tmp_path, 1)
    plain = {name: value for name, value in few.items() if not name.startswith("eval.")}
    assert digest_of(asked) == digest_of(train_on(make_run(data, name="plain", **plain), tmp_path, 1))
    records = journal.records(asked.journal_file)
    assert [r["step"] for r in records if r["kind"] == "tasks"] == [1, 2, 3]
    assert [r["step"] for r in records if r["kind"] == "samples"] == [1, 2, 3]

    found = report(asked)
    page, rows = as_text(found), as_json(found)
    assert "tasks (95% intervals)" in page
    assert "samples at step 3" in page
    assert "  Repeat: a b → " in page
    assert [len(one["points"]) for one in rows["tasks"]] == [3, 3, 3]
    assert [len(one["texts"]) for one in rows["samples"]] == [3, 3, 3]
    assert json.dumps(rows)
    assert any(path.name == "tasks.png" for path in found.pictures)
    assert rows["ledger"]["parts_s"]["evaluation"] > 0

    events = [e for e in Reader(asked.journal_file).batch(10_000) if any(k.startswith("task/") for k in e.values)]
    assert [e.step for e in events] == [1, 2, 3]
    assert {"task/brackets 4-shot/acc", "task/brackets 4-shot/acc/low"} <= events[0].values.keys()


def test_own_task_files_are_asked(data: Path, tmp_path: Path) -> None:
    file = write(named("brackets", 7, 5), tmp_path / "tasks")
    changes = {**ASKED, "eval.tasks": [str(file)], "eval.samples": [], "eval.sample_tokens": 64, "eval.limit": None}
    records = journal.records(train_on(make_run(data, **changes), tmp_path, 1).journal_file)
    (found,) = [r for r in records if r["kind"] == "tasks"]
    assert [(one["measure"], one["n"]) for one in found["figures"]] == [("acc", 5), ("acc_norm", 5)]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"eval.tasks": ["away/none.yaml"]}, "none.yaml"),
        (
            {"eval.tasks": ["copy"], "model.max_seq_len": 64},
            "eval.tasks copy cannot be asked of this model: max_gen_toks",
        ),
        ({"eval.samples": ["x" * 300]}, "eval.samples 'x.*' has 300 tokens, and 6 are written .* the model sees 256"),
    ],
)
def test_what_cannot_be_asked_is_refused_before_the_first_step(
    changes: dict[str, Any], words: str, data: Path, tmp_path: Path
) -> None:

    run = decide(make_run(data, **{**ASKED, **changes}), tmp_path, 1).run
    place = Place(0, 1, torch.device("cpu"))
    with pytest.raises((SpecError, UsageError), match=words):
        Tasks(run, place, build(run, place, False), NONE, lambda kind, **fields: None)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"eval.limit": 5}, "eval.limit 5 is about tasks; name them in eval.tasks"),
        ({"eval.sample_tokens": 5}, "eval.sample_tokens 5 is about samples"),
        ({"eval.every": 5}, "eval.every 5 needs held-out data"),
        ({"eval.tasks": ["bracket"]}, "no made task and no task file (.yaml); did you mean brackets?"),
        ({"eval.tasks": ["copy", "copy"]}, "eval.tasks has 2 entries; name each once"),
        ({"eval.tasks": ["copy"], "engine.name": "deepspeed"}, "DeepSpeed does not hand out the whole model"),
    ],
)
def test_values_that_do_not_go_together_are_refused(changes: dict[str, Any], words: str, data: Path) -> None:
    assert any(words in sentence for _, sentence in broken(make_run(data, **changes)))


def test_tasks_alone_are_enough_for_eval_every(data: Path) -> None:
    assert broken(make_run(data, **{"eval.every": 5, "eval.tasks": ["copy"]})) == []


def test_figures_of_shoal_eval_are_in_the_report_and_change_nothing_else(data: Path, tmp_path: Path) -> None:
    """However many there are: the state of a run is still found behind them."""
    run_dir = train_on(make_run(data, **{"train.steps": 2}), tmp_path, 1)
    log = journal.Journal(run_dir.journal_file)
    log.append("close", session=0, status="finished", exit_code=0)
    before = as_json(report(run_dir, pictures=False))
    rows = [{"task": f"t{k}", "measure": "acc", "value": 0.5, "low": 0.4, "high": "inf", "n": 9} for k in range(1000)]
    for _ in range(4):
        log.append("evaluated", step=2, figures=rows)
    log.close()
    after = as_json(report(run_dir, pictures=False))
    assert is_closed(run_dir.journal_file)
    assert len(after.pop("tasks")) == 1000
    assert before.pop("tasks") == []
    assert after == before
