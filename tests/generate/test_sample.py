"""`shoal sample` of a folder: many prompts, forms, files, and why each answer ended."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from shoal.cli.main import main
from shoal.readable import harmless
from tests.generate.folders import folder

Captured = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(folder(tmp_path_factory.mktemp("model") / "small", context=64))


def sample(model: str, *words: str) -> int:
    return main(["sample", model, "--device", "cpu", *words])


def told(capsys: Captured) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_each_answer_says_why_it_ended(model: str, capsys: Captured) -> None:
    assert sample(model, "--prompt", "ab", "--max-tokens", "3", "--temperature", "0") == 0
    assert "shoal: the answer ended after 3 tokens, the most that were asked for" in capsys.readouterr().err
    assert sample(model, "--max-tokens", "500", "--seed", "3", "--repetition-penalty", "1.5", "--json") == 0
    (answer,) = told(capsys)
    assert answer["finish"] in ("context", "stop")
    assert len(answer["prompt_tokens"]) + len(answer["tokens"]) <= 64


def test_a_stop_text_ends_an_answer_and_is_no_part_of_it(model: str, capsys: Captured) -> None:
    words = ["--prompt", "ab", "--temperature", "0", "--max-tokens", "12", "--json"]
    assert sample(model, *words) == 0
    (free,) = told(capsys)
    stop = free["text"][3:5]
    assert sample(model, *words, "--stop", stop) == 0
    (answer,) = told(capsys)
    assert answer["text"] == free["text"][: free["text"].index(stop)]
    assert (answer["finish"], answer["stopped_by"]) == ("stop", stop)


def test_many_prompts_many_answers_in_their_order(model: str, tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "one"}\n\n{"prompt": "two", "id": 4}\n')
    out = tmp_path / "out.jsonl"
    words = ["--prompt", "zero", "--prompts", str(tmp_path / "p.jsonl"), "--n", "2", "--max-tokens", "5", "--seed", "7"]
    assert sample(model, *words, "--out", str(out), "--logprobs", "2") == 0
    assert capsys.readouterr().out == ""
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["prompt"] for line in lines] == ["zero", "zero", "one", "one", "two", "two"]
    assert all(len(line["logprobs"]) == len(line["tokens"]) for line in lines)
    assert all(len(top) == 2 and top[0][1] >= top[1][1] for line in lines for top in line["top_logprobs"])
    assert lines[0]["tokens"] != lines[1]["tokens"]
    assert sample(model, "--prompt", "two", "--seed", "8", "--max-tokens", "5", "--json") == 0
    assert told(capsys)[0]["tokens"] == lines[5]["tokens"], "an answer depends on what is asked beside it"
    assert sorted(os.listdir(tmp_path)) == ["out.jsonl", "p.jsonl"]
    assert sample(model, *words) == 0
    shown = capsys.readouterr()
    assert shown.out.index("--- prompt 1, answer 2 ---") < shown.out.index("--- prompt 3, answer 1 ---")
    assert shown.err.count("ended") == 6


def test_an_answer_in_a_form_is_printed_alone(model: str, tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "s.json").write_text('{"type": "array", "items": {"enum": ["a", null]}, "minItems": 1, "maxItems": 3}')
    assert sample(model, "--schema", str(tmp_path / "s.json")) == 0
    shown = capsys.readouterr()
    assert set(json.loads(shown.out)) <= {"a", None}
    assert "ended as its form is complete." in shown.err
    assert sample(model, "--regex", "x{40}", "--max-tokens", "5") == 0
    shown = capsys.readouterr()
    assert shown.out == "xxxxx\n"
    assert "it is no whole document of the form" in shown.err
    (tmp_path / "g.ebnf").write_text('root ::= "yes" | "no"')
    assert sample(model, "--grammar", str(tmp_path / "g.ebnf"), "--json") == 0
    (answer,) = told(capsys)
    assert (answer["text"] in ("yes", "no"), answer["valid"], answer["finish"]) == (True, True, "stop")


def test_exact_answers_are_those_of_any_batch(model: str, capsys: Captured) -> None:
    words = ["--prompt", "abc", "--max-tokens", "4", "--temperature", "0", "--logprobs", "--exact", "--json"]
    assert sample(model, *words) == 0
    (alone,) = told(capsys)
    assert sample(model, *words, "--prompt", "another one", "--prompt", "x") == 0
    beside = told(capsys)[0]
    assert (beside["tokens"], beside["logprobs"]) == (alone["tokens"], alone["logprobs"])


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--n", "0"], 2, "--n is 0"),
        (["--logprobs", "3"], 2, "give one of them"),
        (["--schema", "/nowhere.json"], 78, "--schema /nowhere.json cannot be read (No such file"),
        (["--schema", "/dev/zero"], 78, "is a device"),
        (["--regex", "a", "--any-json"], 2, "an answer has one form"),
        (["--regex", "("], 2, "no regular expression"),
        (["--regex", "(?=a)"], 2, "looks ahead"),
        (["--prompts", "/nowhere.txt"], 78, "/nowhere.txt cannot be read"),
        (["--top-p", "2"], 2, "--top-p is 2.0"),
        (["--stop", ""], 2, "--stop is empty"),
        (["--step", "4"], 2, "is a folder of one model"),
        (["--out", "/nowhere/out.jsonl"], 78, "cannot be written"),
    ],
)
def test_wrong_usage_is_one_sentence(words: list[str], code: int, said: str, model: str, capsys: Captured) -> None:
    assert sample(model, *words, "--max-tokens", "2") == code
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_a_grammar_that_is_none_is_refused_in_a_sentence(model: str, tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "g").write_text("root ::= (")
    assert sample(model, "--grammar", str(tmp_path / "g")) == 2
    error = capsys.readouterr().err
    assert error.startswith("shoal: no answer can be held to the grammar: ")
    assert ".cc" not in error
    assert error.count("\n") == 1


def test_what_a_terminal_would_obey_is_spelled_out() -> None:
    assert (
        harmless("\x1b[31mred\x07 \x9b2J é\t日\n\u202eabc\r") == r"\x1b[31mred\x07 \x9b2J é" + "\t日\n" + r"\u202eabc\r"
    )


def test_a_terminal_gets_no_escape_sequence_of_a_model(model: str, capsys: Captured) -> None:
    """The form makes the model say one; what is no terminal gets it as it is."""
    form = ["--regex", "\x1b\\[31mred"]
    assert sample(model, *form) == 0
    assert capsys.readouterr().out == "\x1b[31mred\n"
    words = [sys.executable, "-m", "shoal", "sample", model, "--device", "cpu", *form]
    ours, theirs = pty.openpty()
    process = subprocess.Popen(words, stdout=theirs, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL)
    os.close(theirs)
    seen = b""
    with suppress(OSError):  # the other side is closed
        while part := os.read(ours, 4096):
            seen += part
    os.close(ours)
    assert process.wait() == 0
    assert seen == b"\\x1b[31mred\r\n"
