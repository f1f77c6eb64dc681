"""Task files: what is read, what is refused by name, and that a stranger's template gets nowhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from shoal.errors import DataError, ShoalError, SpecError
from shoal.evaluate.ask import Asking, grouped
from shoal.evaluate.metrics import together
from shoal.evaluate.questions import questions
from shoal.evaluate.task_file import load_task

ITEMS = [
    {"q": "two and two", "options": ["three", "four"], "right": 1, "p": "a"},
    {"q": "a dog", "options": ["barks", "sings"], "right": 0, "p": "b"},
]
GOOD: dict[str, Any] = {
    "task": "quiz",
    "dataset_path": "json",
    "dataset_kwargs": {"data_files": {"test": "items.jsonl"}},
    "output_type": "multiple_choice",
    "test_split": "test",
    "doc_to_text": "{{q}} is",
    "doc_to_choice": "options",
    "doc_to_target": "right",
}


def written(folder: Path, more: dict[str, Any] | None = None, items: str | None = None, less: str = "") -> Path:
    (folder / "items.jsonl").write_text(
        items if items is not None else "".join(json.dumps(one) + "\n" for one in ITEMS)
    )
    keys = {key: value for key, value in {**GOOD, **(more or {})}.items() if key != less}
    (folder / "quiz.yaml").write_text(yaml.safe_dump(keys))
    return folder / "quiz.yaml"


def test_questions_are_the_texts_with_their_choices(tmp_path: Path) -> None:
    first, second = questions(load_task(written(tmp_path, {"metadata": {"version": 2, "cluster": "p"}})))
    assert first.asks == (("two and two is", " three"), ("two and two is", " four"))
    assert (first.right, second.right, first.cluster) == ((1,), (0,), "a")
    assert first.digest != second.digest


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"dataset_path": "allenai/arc"}, "local files alone"),
        ({"process_docs": "x"}, "it is a program"),
        ({"doc_to_texts": "x"}, "did you mean doc_to_text"),
        ({"output_type": "mcq"}, "multiple_choice"),
        ({"test_split": "validation"}, "none of the splits"),
        ({"metric_list": [{"metric": "bleu"}]}, "acc"),
        ({"metric_list": [{"metric": "perplexity"}]}, "multiple_choice"),
        ({"metric_list": [{"metric": "acc", "aggregation": "median"}]}, "aggregation"),
        ({"repeats": 4}, "asked once"),
        ({"num_fewshot": "many"}, "num_fewshot"),
        ({"fewshot_config": {"sampler": "balanced"}}, "sampler"),
        ({"filter_list": [{"name": "a", "filter": [{"function": "take_first"}]}]}, "generate_until"),
        (
            {"output_type": "generate_until", "filter_list": [{"name": "a", "filter": [{"function": "lowercase"}]}]},
            "take_first",
        ),
        ({"output_type": "generate_until", "generation_kwargs": {"num_beams": 4}}, "num_beams"),
        ({"dataset_kwargs": {"data_files": {"test": "https://host/a.jsonl"}}}, "no local file"),
        ({"dataset_kwargs": {"data_files": {"test": "gone.jsonl"}}}, "there is no file"),
    ],
)
def test_what_is_not_obeyed_is_refused_by_name(tmp_path: Path, more: dict[str, Any], words: str) -> None:
    with pytest.raises(ShoalError, match=words):
        load_task(written(tmp_path, more))


def test_the_example_is_a_task() -> None:
    task = load_task(Path(__file__).resolve().parents[2] / "examples" / "evaluate" / "whales.yaml")
    asked = questions(task)
    assert len(asked) == 6
    assert asked[1].asks[asked[1].right[0]] == ("A ship is steered with its", " rudder")
    assert {one.cluster for one in asked} == {"animals", "ships"}


def test_a_program_in_a_task_file_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path)
    path.write_text(path.read_text() + "process_results: !function utils.f\n")
    with pytest.raises(SpecError, match="calls a program"):
        load_task(path)


@pytest.mark.parametrize(
    ("items", "words"),
    [
        ("", "no items"),
        ("[1, 2]", "no JSON object"),
        ('{"q": 1}\n{"q": ', "line 2"),
        ('{"q": NaN}', "line 1"),
        ("5", "no JSON object"),
    ],
)
def test_items_that_cannot_be_read_are_named(tmp_path: Path, items: str, words: str) -> None:
    with pytest.raises(DataError, match=words):
        load_task(written(tmp_path, items=items))


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "cannot be filled in"),
        ("{{ cycler.__init__.__globals__.os.system('true') }}", "cannot be filled in"),
        ("{{ nothing_like_it }}", "nothing_like_it"),
        ("{% for i in range(99999999999) %}a{% endfor %}", "cannot be filled in"),
        ("{{ 'a' * 99999999999 }}", "memory"),
        ("{% include '/etc/passwd' %}", "cannot be filled in"),
        ("{{ q", "cannot be filled in"),
    ],
)
def test_a_template_gets_nowhere(tmp_path: Path, template: str, words: str) -> None:
    with pytest.raises(DataError, match=words) as said:
        questions(load_task(written(tmp_path, {"doc_to_text": template})))
    assert "task quiz: item 0" in str(said.value) or "memory" in str(said.value)


def test_a_template_that_never_ends_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.evaluate.questions.CPU_S", 1)
    never = "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}"
    with pytest.raises(DataError, match="more than 1 s"):
        questions(load_task(written(tmp_path, {"doc_to_text": never})))


def test_examples_never_hold_their_own_question(tmp_path: Path) -> None:
    items = [{"q": f"question {n}", "options": ["a", "b"], "right": n % 2, "p": "x"} for n in range(12)]
    text = "".join(json.dumps(one) + "\n" for one in items)
    task = load_task(written(tmp_path, {"num_fewshot": 3, "fewshot_split": "test"}, text))
    whole = questions(task)
    for n, one in enumerate(whole):
        context = one.asks[0][0]
        assert context.count("question ") == 4
        assert context.endswith(f"question {n} is")
        assert context.count(f"question {n} is") == 1
    assert [one.digest for one in questions(task, 5)] == [one.digest for one in whole[:5]]
    with pytest.raises(DataError, match="12 items"):
        questions(load_task(written(tmp_path, {"num_fewshot": 12, "fewshot_split": "test"}, text)))


def test_a_chat_template_makes_one_message_of_question_and_examples(tmp_path: Path) -> None:
    task = load_task(written(tmp_path, {"description": "Be short."}))
    asked = questions(task, chat=lambda chats: [json.dumps(chat) for chat in chats])
    context, more = asked[0].asks[1]
    assert json.loads(context) == [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "two and two is"},
    ]
    assert more == "four"


def test_parquet_is_read_as_jsonl_is(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    lines = load_task(written(tmp_path))
    pq.write_table(pa.Table.from_pylist(ITEMS), tmp_path / "items.parquet")
    files = {"dataset_path": "parquet", "dataset_kwargs": {"data_files": {"test": "items.parquet"}}}
    assert questions(load_task(written(tmp_path, files))) == questions(lines)
    (tmp_path / "items.parquet").write_bytes(b"PAR1" + b"\0" * 40 + b"PAR1")
    with pytest.raises(DataError, match=r"items\.parquet cannot be read"):
        load_task(written(tmp_path, files))


def test_groups_do_not_depend_on_how_many_items_are_asked(tmp_path: Path) -> None:
    assert grouped(list(range(7)), 3)[:2] == grouped(list(range(9)), 3)[:2]  # type: ignore[arg-type]  # any list will do
    assert Asking().group > 0


def test_bounds_of_a_perplexity_are_around_it() -> None:
    found = together("byte_perplexity", [(-10.0, 5.0), (-8.0, 6.0), (-9.0, 4.0)], None)
    assert found.low < found.mean < found.high
    assert found.mean == pytest.approx(2.718281828 ** (27 / 15))
