"""Made tasks: the same items everywhere, right answers, and files that go through as lm-eval's do."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from scripts import make_cloze

from shoal.errors import UsageError
from shoal.evaluate.generated.catalogue import KINDS, first_of, named, write
from shoal.evaluate.questions import questions
from shoal.evaluate.task_file import load_task
from shoal.spec.asked_rules import MADE_TASKS
from tests.evaluate.make_made_golden import digest

NAMES = list(KINDS)


@pytest.mark.parametrize("name", NAMES)
def test_the_same_seed_gives_the_same_items_and_another_one_others(name: str) -> None:
    few = named(name, 3, 5)
    assert named(name, 3, 5) == few
    assert named(name, 4, 5).items != few.items
    assert len({item["id"] for item in few.items}) == 5
    if name != "cloze":  # drawn out of what there is
        assert named(name, 3, 9).items[:5] == few.items
        assert named(name, 3).items[:5] == few.items


def test_run_files_know_the_same_names() -> None:
    assert set(MADE_TASKS) == set(KINDS)


def test_a_limit_asks_the_first_ones() -> None:
    for name in ("copy", "cloze"):
        assert first_of(name, 7).items[:7] == named(name).items[:7]
    assert len(first_of("copy", 300).items) == 300
    assert len(first_of("cloze", 10_000).items) == len(named("cloze").items)


def test_items_stay_what_they_were() -> None:
    """Numbers of two versions of Shoal compare: what is changed gets another version of the task."""
    first = {name: named(name, 0, 1).items[0] for name in ("arithmetic", "copy", "sorting", "brackets", "json")}
    assert {name: (item["text"], item.get("target", item.get("answer"))) for name, item in first.items()} == {
        "arithmetic": ("299 - 9 =", "290"),
        "copy": ("Repeat: u syzf wfje asl nm k\nRepeated:", "u syzf wfje asl nm k"),
        "sorting": ("Sort these numbers: 29 43 51 30 94\nSorted:", "29 30 43 51 94"),
        "brackets": ("{ } ( { } ) < > < { }", 3),
        "json": (
            "Amina is 67 years old, lives in Quito and works as a farmer.\nAs JSON with the keys name, job, city, age:",
            '{"name": "Amina", "job": "farmer", "city": "Quito", "age": 67}',
        ),
    }


def test_answers_are_right() -> None:
    for item in named("arithmetic", 1, 300).items:
        a, sign, b, _ = item["text"].split()
        expected = {"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b)}[sign]
        assert item["target"] == str(expected)
    for item in named("sorting", 1, 100).items:
        said = [int(n) for n in re.findall(r"\d+", item["text"])]
        assert item["target"].split() == [str(n) for n in sorted(said)]
    for item in named("brackets", 1, 300).items:
        text = item["text"].replace(" ", "")
        while (shorter := re.sub(r"\(\)|\[\]|\{\}|<>", "", text)) != text:
            text = shorter
        assert len(text) == item["open"] >= 1
        assert item["choices"][item["answer"]] == {"(": ")", "[": "]", "{": "}", "<": ">"}[text[-1]]
    for item in named("json", 1, 100).items:
        told = json.loads(item["target"])
        assert list(told) == item["text"].partition("keys ")[2].rstrip(":").split(", ")
        assert all(str(value) in item["text"] for value in told.values())
    for item in named("needle", 1, 50).items:
        place = item["text"].rpartition("The number of ")[2].removesuffix(" is")
        assert item["text"].count(f"The number of {place} is {item['target']}.") == 1
        assert 0 <= item["depth"] <= 1
        assert 1_000 <= len(item["text"]) < 1_400


@pytest.mark.parametrize("name", NAMES)
def test_what_is_taken_as_an_answer_is_the_right_answer(name: str) -> None:
    """A model that says exactly the target, and goes on, is right by the filter of the task."""
    made = named(name, 2, 20)
    if made.keys["output_type"] != "generate_until":
        return
    pattern = made.keys["filter_list"][0]["filter"][0]["regex_pattern"]
    stops = made.keys["generation_kwargs"]["until"]
    for item in made.items:
        said = f" {item['target']}\nand more"
        for stop in stops:
            said = said.split(stop)[0]
        assert re.findall(pattern, said)[0].strip() == item["target"]


def test_brackets_cannot_be_won_by_always_saying_the_same() -> None:
    answers = [item["answer"] for item in named("brackets", 5, 2_000).items]
    assert max(answers.count(k) for k in range(4)) < 0.3 * len(answers)


def test_the_cloze_items_are_those_that_the_script_makes() -> None:
    assert make_cloze.OUT.read_text(encoding="utf-8") == make_cloze.made()
    made = named("cloze")
    assert len(made.items) > 150
    assert made.keys["metadata"]["cluster"] == "chapter"
    for item in made.items:
        assert re.search(rf"\b{item['target']}\b", item["text"].lower())


@pytest.mark.parametrize("name", NAMES)
def test_written_out_it_is_a_task_file_with_its_data(name: str, tmp_path: Path) -> None:
    made = named(name, 0, 4)
    path = write(made, tmp_path / "out")
    keys: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    files = keys["dataset_kwargs"]["data_files"]
    lines = (path.parent / files["test"]).read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in lines] == list(made.items)
    assert ("train" in files) == (keys.get("num_fewshot", 0) > 0) == bool(made.examples)
    assert not {item["text"] for item in made.examples} & {item["text"] for item in made.items}


def test_mistakes_are_one_sentence() -> None:
    with pytest.raises(UsageError, match=r"no made task 'arithmetics'; there are .* Did you mean arithmetic\?"):
        named("arithmetics")
    with pytest.raises(UsageError, match="0 items of copy were asked for; it can be 1 to 1,000,000"):
        named("copy", 0, 0)
    with pytest.raises(UsageError, match=r"items were asked for, and cloze.jsonl has \d+"):
        named("cloze", 0, 100_000)


def test_lm_eval_asks_the_same_of_the_same_files(tmp_path: Path) -> None:
    """To the letter, examples included; and an answer that is right is right there (made_golden.json)."""
    golden = json.loads((Path(__file__).parent / "made_golden.json").read_text(encoding="utf-8"))
    assert len(golden["asked"]) == 7
    for name, expected in golden["asked"].items():
        task = load_task(write(named(name, 0, 6), tmp_path))
        pairs: list[list[str]] = []
        for one in questions(task):
            writes = task.kind == "generate_until"
            pairs += [[one.asks[0][0], one.right[0]]] if writes else [list(ask) for ask in one.asks]
        assert [digest(pair) for pair in pairs] == expected, name
        if task.kind == "generate_until":
            assert list(golden["figures"][name].values()) == [1.0]
