"""Task files and their items, kept answers, and what an endpoint says."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import yaml

from tests.fuzz.json_values import mutated
from tests.fuzz.raw_bytes import damaged
from tests.fuzz.reader import Finding, Folder, Target, reader
from tests.fuzz.samples import lines_of, texts_of

ITEMS: list[Any] = [
    {"text": "one fish", "options": ["two", "red"], "right": 1, "passage": "a"},
    {"text": "blue é", "options": ["fish", "old"], "right": 0, "passage": "b"},
    {"text": "new", "options": ["a", "b"], "right": 1, "passage": "a"},
]
CHOICE: dict[str, Any] = {
    "task": "quiz",
    "dataset_path": "json",
    "dataset_kwargs": {"data_files": {"test": "items.jsonl"}},
    "output_type": "multiple_choice",
    "test_split": "test",
    "fewshot_split": "test",
    "num_fewshot": 1,
    "doc_to_text": "{{text}}:",
    "doc_to_choice": "{{options}}",
    "doc_to_target": "right",
    "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    "metadata": {"version": 1.0, "cluster": "passage"},
}
WRITE: dict[str, Any] = {
    **{key: value for key, value in CHOICE.items() if key not in ("doc_to_choice", "metric_list")},
    "output_type": "generate_until",
    "doc_to_target": "{{options[right]}}",
    "generation_kwargs": {"until": ["\n"], "max_gen_toks": 4, "do_sample": False, "temperature": 0.0},
    "filter_list": [
        {"name": "f", "filter": [{"function": "regex", "regex_pattern": "([a-z]+)"}, {"function": "take_first"}]}
    ],
    "metric_list": [{"metric": "exact_match", "ignore_case": True, "regexes_to_ignore": ["x"]}],
}
ROLLING: dict[str, Any] = {
    **{key: CHOICE[key] for key in ("task", "dataset_path", "dataset_kwargs", "test_split")},
    "output_type": "loglikelihood_rolling",
    "doc_to_target": "{{text}}",
}


@reader(
    "task-files",
    *("evaluate.task_file", "evaluate.items", "evaluate.questions", "evaluate.templates", "evaluate.filters"),
    quick=150,
    share=30,
)
def task_files(folder: Path) -> Target:
    """A changed file is another task, or none: and a task has questions and figures, or says why not."""
    from shoal.errors import DataError, SpecError
    from shoal.evaluate import filters, items, metrics, questions
    from shoal.evaluate.answers import Answer
    from shoal.evaluate.ask import figures
    from shoal.evaluate.task_file import load_task
    from shoal.generate.limited import Refused

    def limited(work: Callable[[], bytes], limits: object) -> bytes:
        try:
            return work()
        except RecursionError:
            raise Refused("it is nested too deeply") from None

    for module in (filters, items, metrics, questions):
        module.limited = limited  # type: ignore[attr-defined]  # a child costs more than a case

    def generate(rng: Random) -> Folder:
        keys = rng.choice((CHOICE, WRITE, ROLLING))
        rows = (
            lines_of(ITEMS)(rng) if rng.random() < 0.5 else b"".join(json.dumps(one).encode() + b"\n" for one in ITEMS)
        )
        if rng.random() < 0.7:
            keys = mutated(rng, keys)
        try:
            said = yaml.safe_dump(keys, allow_unicode=True).encode(errors="replace")
        except (yaml.YAMLError, RecursionError):
            said = b"{}"
        return Folder({"t.yaml": damaged(rng, said) if rng.random() < 0.2 else said, "items.jsonl": rows})

    def read(case: Folder) -> None:
        case.write(folder)
        task = load_task(folder / "t.yaml")
        asked = questions.questions(task, 5)
        if any(not one.asks for one in asked):
            raise Finding("a question that asks nothing")
        if task.kind == "generate_until":
            said = [Answer(one.digest, one.number, (), "a fish x") for one in asked]
        else:
            said = [
                Answer(one.digest, one.number, tuple((-1.0 - n, n == 0) for n in range(len(one.asks)))) for one in asked
            ]
        figures(task, asked, said, "m", "plain")

    return Target(generate, read, (DataError, SpecError))


@reader("answers", "evaluate.answers", quick=300, share=60)
def answers(folder: Path) -> Target:
    """A damaged line is named; the answers that are taken are of the right types."""
    from shoal.errors import DataError
    from shoal.evaluate.answers import Answers, Head

    head = Head("t", "a" * 64, "m", "b" * 64, "plain", 2)
    first = {"task": "t", "task_digest": "a" * 64, "model": "m", "model_digest": "b" * 64, "asked": "plain", "group": 2}
    rows = [{"question": f"{n:064x}", "number": n, "scores": [[-1.5, True], [-0.25, False]]} for n in range(2)]
    written = {"question": "c" * 64, "number": 2, "text": "a\nfish"}

    def read(data: bytes) -> None:
        (folder / head.file_name).write_bytes(data)
        with Answers(folder, head) as found:
            for one in found.done.values():
                if not all(type(score) is float and type(likeliest) is bool for score, likeliest in one.scores):
                    raise Finding("a score that is none")

    return Target(lines_of([{**first, "format": 1}, *rows, written]), read, (DataError,))


@reader("endpoint", "evaluate.endpoint", quick=300, share=60)
def endpoint(folder: Path) -> Target:
    """Whatever comes back: scores of the right number, or one sentence that names the endpoint."""
    from shoal.errors import DataError
    from shoal.evaluate.endpoint import Endpoint

    top = {"a": -0.5, "b": -1.5}
    choice = {
        "index": 0,
        "text": "a fish",
        "logprobs": {"token_logprobs": [None, -1.0, -0.5, -2.0], "top_logprobs": [None, top, top, top]},
    }
    good = {"id": "x", "choices": [choice, {**choice, "index": 1}]}
    asked = Endpoint("http://host", "m")

    def read(data: bytes) -> None:
        object.__setattr__(asked, "_post", lambda body: (200, data))
        found = list(asked._scored([([1, 2], [3]), ([1, 2], [4])]))
        if len(found) != 2 or not all(score <= 1e-5 for score, _ in found):
            raise Finding("scores that are none")

    return Target(texts_of(good), read, (DataError,))
