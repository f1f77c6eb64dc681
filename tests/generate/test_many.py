"""`shoal generate`: each line of a file is answered once, whatever is killed meanwhile, and by the same words."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shoal.cli.main import main
from shoal.data.tokenizer import ByteTokenizer
from shoal.errors import DataError
from shoal.generate.many import kept, source
from shoal.generate.many.item import MOST_LINE_BYTES, item_of, seed_of
from shoal.generate.many.source import looked_at
from shoal.generate.request import Sampling
from shoal.model.decoder import Decoder
from shoal.model.hf import save_folder
from shoal.spec.model import Model
from shoal.spec.shape import shape_of
from shoal.values import BadValue
from tests.forked import fork
from tests.patience import until

Captured = pytest.CaptureFixture[str]
PROMPTS = 17


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = Model(vocab_size=257, dim=32, layers=2, heads=4, kv_heads=2, ffn_dim=48, max_seq_len=64, init_std=0.3)
    model = Decoder(shape_of(made))
    model.init_weights(3)
    folder = tmp_path_factory.mktemp("many") / "model"
    save_folder(folder, model.shape, model.state_dict(), ByteTokenizer())
    return folder


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """Some have words of their own, and one line is blank."""
    asked: list[dict[str, Any]] = [{"id": f"q{i}", "prompt": "x" * (i % 5) + chr(97 + i)} for i in range(PROMPTS - 2)]
    asked[3]["sampling"] = {"max_tokens": 2, "temperature": 0}
    asked.append({"id": 99, "tokens": [256, 65, 66], "sampling": {"stop": ["e"]}})
    lines = [json.dumps(one) for one in asked]
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join([*lines[:5], "", *lines[5:]]) + "\n")
    return file


def generate(file: Path, folder: Path, out: Path, *more: str) -> int:
    usual = ["--tokenizer", "byte", "--max-tokens", "9", "--batch", "3", "--workspace", str(file.parent)]
    return main(["generate", str(file), "--model", str(folder), "--out", str(out), *usual, *more])


def answers(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_each_line_is_answered_in_its_place(folder: Path, prompts: Path, tmp_path: Path, capsys: Captured) -> None:
    out = tmp_path / "answers.jsonl"
    assert generate(prompts, folder, out) == 0
    found = answers(out)
    assert [one["line"] for one in found] == [n for n in range(1, PROMPTS + 1) if n != 6]
    assert [one["id"] for one in found] == [*(f"q{i}" for i in range(PROMPTS - 2)), 99]
    assert len(found[3]["tokens"]) <= 2
    assert "seed" not in found[3]  # nothing was drawn
    assert {one["finish"] for one in found} <= {"length", "stop"}
    assert found[0]["seed"] == seed_of(0, 1)
    assert "16 answered" in capsys.readouterr().out
    assert sorted(p.name for p in tmp_path.iterdir()) == ["answers.jsonl", "answers.jsonl.begun.json", prompts.name]
    before = out.read_bytes()
    assert generate(prompts, folder, out) == 0
    assert "has all its answers already" in capsys.readouterr().out
    assert out.read_bytes() == before


def dies(moment: str) -> None:
    """This process, at that moment of its work."""

    def killed(*_: Any, **__: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)

    count, write, replace = [0], os.pwrite, os.replace

    def torn(fd: int, data: bytes, at: int) -> int:
        count[0] += 1
        if count[0] < 5:
            return write(fd, data, at)
        write(fd, data[: len(data) // 2], at)
        return int(killed())

    def renamed(source: Any, target: Any) -> None:
        if str(target).endswith("answers.jsonl"):
            if moment == "after the rename":
                replace(source, target)
            killed()
        replace(source, target)

    if moment == "in the fifth answer":
        kept.os.pwrite = torn  # type: ignore[assignment]  # of this process, which ends by it
    else:
        kept.os.replace = renamed  # type: ignore[assignment]


@pytest.mark.parametrize("moment", ["in the fifth answer", "before the rename", "after the rename"])
def test_killed_and_started_again_it_writes_the_same_bytes(
    moment: str, folder: Path, prompts: Path, tmp_path: Path
) -> None:
    undisturbed, out = tmp_path / "undisturbed.jsonl", tmp_path / "answers.jsonl"
    assert generate(prompts, folder, undisturbed) == 0

    def child() -> int:
        dies(moment)
        return generate(prompts, folder, out)

    _, status = os.waitpid(fork(child, tmp_path / "said"), 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL
    assert out.exists() == (moment == "after the rename")
    assert generate(prompts, folder, out) == 0
    assert out.read_bytes() == undisturbed.read_bytes()
    assert not out.with_name("answers.jsonl.under-way").exists()


def test_what_is_there_is_not_asked_again(folder: Path, prompts: Path, tmp_path: Path) -> None:
    """Lines that are whole stay as they are, whatever they say; after one that is none, nothing counts."""
    out = tmp_path / "answers.jsonl"
    assert generate(prompts, folder, out) == 0
    whole = out.read_bytes().splitlines(keepends=True)
    ours = b'{"line": 2, "text": "of before"}\n'
    out.rename(tmp_path / "old")
    out.with_name("answers.jsonl.under-way").write_bytes(whole[4] + ours + b"\0\0\0\n" + b'{"line": 1, "text": ""}\n')
    assert generate(prompts, folder, out) == 0
    found = out.read_bytes().splitlines(keepends=True)
    assert found == [whole[0], ours, *whole[2:]]


def test_parts_one_after_the_other_are_the_whole(folder: Path, prompts: Path, tmp_path: Path) -> None:
    whole = tmp_path / "whole.jsonl"
    assert generate(prompts, folder, whole) == 0
    for part in (2, 0, 1):
        assert generate(prompts, folder, tmp_path / "parts", "--part", str(part), "--of", "3") == 0
    parts = [(tmp_path / "parts" / f"part-{i:05d}.jsonl").read_bytes() for i in range(3)]
    assert b"".join(parts) == whole.read_bytes()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (["--seed", "1"], "seed is not what it was (0, now 1)"),
        (["--temperature", "0.1"], "temperature is not what it was (0.8, now 0.1)"),
        (["--start", "none"], "the tokenizer is another one"),
        (None, "the file of prompts is another one"),
    ],
)
def test_going_on_with_something_else_is_refused(
    change: list[str] | None, words: str, folder: Path, prompts: Path, tmp_path: Path, capsys: Captured
) -> None:
    out = tmp_path / "answers.jsonl"
    assert generate(prompts, folder, out) == 0
    if change is None:
        prompts.write_text(prompts.read_text().replace("q0", "q1"))
    assert generate(prompts, folder, out, *(change or [])) == 2
    said = capsys.readouterr().err
    assert words in said
    assert said.count("\n") == 1


def test_a_file_of_somebody_else_is_left_alone(folder: Path, prompts: Path, tmp_path: Path, capsys: Captured) -> None:
    out = tmp_path / "answers.jsonl"
    out.write_text("mine")
    assert generate(prompts, folder, out) == 2
    assert "is not by this verb" in capsys.readouterr().err
    assert generate(prompts, folder, prompts) == 2
    assert "--out is the file of prompts" in capsys.readouterr().err
    assert out.read_text() == "mine"


def test_a_bad_line_ends_the_work_before_it_begins_or_is_told_in_its_place(
    folder: Path, prompts: Path, tmp_path: Path, capsys: Captured
) -> None:
    out = tmp_path / "answers.jsonl"
    lines = prompts.read_text().splitlines()
    lines[7] = '{"id": 5, "prompt": 3}'
    prompts.write_text("\n".join(lines))
    assert generate(prompts, folder, out) == 78
    said = capsys.readouterr().err
    assert f"line 8 of {prompts} cannot be answered: prompt: 3 where a text" in said
    assert not out.with_name("answers.jsonl.begun.json").exists()
    lines[8] = json.dumps({"id": "long", "prompt": "x" * 100})  # only the model knows
    prompts.write_text("\n".join(lines))
    assert generate(prompts, folder, out, "--on-error", "skip") == 0
    errors = {one["line"]: one for one in answers(out) if "error" in one}
    assert errors.keys() == {8, 9}
    assert errors[9]["id"] == "long"
    assert "101 tokens, but the context is 64" in errors[9]["error"]
    assert "2 could not be answered" in capsys.readouterr().out


def test_text_has_a_prompt_a_line(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_bytes(b"\xef\xbb\xbfone\r\n\n{\n")
    out = tmp_path / "new" / "answers.jsonl"
    assert generate(file, folder, out, "--logprobs", "--json") == 0
    found = answers(out)
    assert [one["line"] for one in found] == [1, 3]
    assert all(len(one["logprobs"]) >= len(one["tokens"]) for one in found)
    assert item_of(b"\xef\xbb\xbfone\r\n", 1, False) == item_of(b"one\n", 1, False)


def test_messages_go_through_the_template_of_the_folder(folder: Path, tmp_path: Path, capsys: Captured) -> None:
    chat, tokens, out = tmp_path / "chat.jsonl", tmp_path / "tokens.jsonl", tmp_path / "out.jsonl"
    chat.write_text(json.dumps({"messages": [{"role": "user", "content": "why"}]}))
    tokens.write_text(json.dumps({"tokens": list(b"[user] why [answer]")}))
    assert generate(chat, folder, out) == 78
    assert "'messages' need a chat template, and model has none" in capsys.readouterr().err
    taught = tmp_path / "taught"
    shutil.copytree(folder, taught)
    template = "{% for m in messages %}[{{ m.role }}] {{ m.content }} {% endfor %}[answer]"
    (taught / "chat_template.jinja").write_text(template)
    found = []
    for file, target in ((chat, tmp_path / "a.jsonl"), (tokens, tmp_path / "b.jsonl")):
        assert generate(file, taught, target) == 0
        found.append(target.read_bytes())
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"[1]", "where a JSON object belongs"),
        (b'{"prompt": "a", "tokens": [1]}', "has 'prompt' and 'tokens'"),
        (b'{"text": "a"}', "has none"),
        (b'{"prompt": "a", "temperature": 0}', "'temperature' belongs in an object 'sampling'"),
        (b'{"prompt": "a", "sampling": {"temprature": 0}}', "'temprature' is none of"),
        (b'{"prompt": "a", "sampling": {"stop": [""]}}', "an empty text"),
        (b'{"prompt": "a", "sampling": {"top_p": 2}}', "top_p is 2"),
        (b'{"messages": []}', "messages: no message"),
        (b'{"messages": [{"content": "a"}]}', "message 1: role: None where a text"),
        (b'{"tokens": [-1]}', "a whole number"),
        (b'{"prompt": "\\ud800"}', "half a character"),
        (b"x" * (MOST_LINE_BYTES + 1), "more than 8 MiB"),
    ],
)
def test_what_a_line_may_not_be(line: bytes, words: str) -> None:
    def read() -> None:
        item = item_of(line, 2, True)
        assert item is not None
        item.sampled(Sampling(), 0)

    with pytest.raises(BadValue) as found:
        read()
    assert words in str(found.value)


def test_text_that_is_no_utf8_is_said(tmp_path: Path) -> None:
    with pytest.raises(BadValue, match="byte 2 of the line"):
        item_of(b"a\xff\n", 4, False)


@pytest.mark.parametrize("end", ["\n", ""])
@pytest.mark.parametrize("block", [1, 7, 1 << 20])
def test_lines_are_found_from_any_line_on(
    end: str, block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "BLOCK_BYTES", block)
    lines = ["", "a", "bb", "", "c" * 20, "d"]
    (tmp_path / "x.txt").write_text("\n".join(lines) + end)
    found = looked_at(tmp_path / "x.txt")
    assert found.lines == len(lines)
    for begin in range(len(lines) + 1):
        read = found.read(range(begin, len(lines)))
        assert [(n, line.decode().rstrip("\n")) for n, line in read] == list(enumerate(lines))[begin:]
    assert [n for i in range(4) for n in found.part(i, 4)] == list(range(len(lines)))


def test_an_empty_file_has_no_lines(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("")
    assert list(looked_at(tmp_path / "x.txt").read(range(0))) == []


def test_a_file_that_changes_meanwhile_is_told(tmp_path: Path) -> None:
    file = tmp_path / "x.txt"
    file.write_text("a\nb\n")
    found = looked_at(file)
    reading: Callable[[], Any] = found.read(range(2)).__next__
    reading()
    file.write_text("a\nb\nc\n")
    reading()
    with pytest.raises(DataError, match="was changed while it was worked through"):
        reading()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["x.parquet", "--out", "o"], "no file of lines"),
        (["x.jsonl.gz", "--out", "o"], "unpack it first (`gunzip`)"),
        (["gone.txt", "--out", "o"], "cannot be read"),
        (["x.txt", "--out", "o", "--part", "1"], "belong together"),
        (["x.txt", "--out", "o", "--part", "8", "--of", "8"], "are 0 to 7"),
        (["x.txt", "--out", "o", "--batch", "0"], "--batch is 0"),
        (["x.txt", "--out", "o", "--top-p", "2"], "--top-p is 2.0, but 1 is the most"),
        (["x.txt", "--out", "o", "--stop", ""], "--stop is empty"),
    ],
)
def test_mistakes_are_one_sentence(
    words: list[str], said: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["generate", *words, "--model", str(folder)]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


@pytest.mark.slow
def test_a_batch_whose_runner_is_killed_goes_on_line_by_line(folder: Path, prompts: Path, tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole.jsonl", tmp_path / "parts"
    usual = ["--tokenizer", "byte", "--max-tokens", "30", "--batch", "1"]
    assert main(["generate", str(prompts), "--model", str(folder), "--out", str(whole), *usual]) == 0
    words = ["generate", str(prompts), "--model", str(folder), "--out", str(parts), *usual]
    batch = [sys.executable, "-m", "shoal", "batch", "--name", "answers", "--workspace", str(tmp_path), "--units", "3"]
    command = ["--", sys.executable, "-m", "shoal", *words, "--part", "{index}", "--of", "{units}"]
    runner = subprocess.Popen([*batch, "--at-once", "2", *command])
    until(lambda: any(file.stat().st_size for file in parts.glob("*.under-way")), 60)
    runner.kill()
    runner.wait()
    assert not all((parts / f"part-{i:05d}.jsonl").exists() for i in range(3))
    assert main(["resume", "answers", "--workspace", str(tmp_path)]) == 0
    assert b"".join((parts / f"part-{i:05d}.jsonl").read_bytes() for i in range(3)) == whole.read_bytes()
