"""`shoal data look` prints what the trainer's feed hands out, and no text in it can act on a terminal."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from shoal.cli.data import look
from shoal.cli.main import main
from shoal.data.feed import Feed
from shoal.data.order import Order
from shoal.data.sources import open_sources
from shoal.data.windows import NO_TARGET, PADDING, Windows
from shoal.spec.resolve import load

PAIRS = [
    {"prompt": "2+2=", "text": "4"},
    {"prompt": "say \x1b[31m", "text": "red \u202e\x07\\ end"},
    {"prompt": "Name a whale: ", "text": "Moby Dick, of whom Melville wrote a book."},
    *({"prompt": f"{n}+{n}=", "text": f"{2 * n}"} for n in range(30)),
]
RUN = """\
name: pairs
seed: 3
model: {preset: tiny}
data: {train: data, seq_len: 24, skip: [1]}
train: {steps: 4, batch: 4}
mesh: {dp_replicate: 2, dp_shard: 1, micro_batch: 1}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("look")
    (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in PAIRS))
    (folder / "run.yaml").write_text(RUN)
    made = ["data", "prepare", str(folder / "pairs.jsonl"), "--prompt-field", "prompt", "--out", str(folder / "data")]
    assert main(made) == 0
    return folder


def looked(capsys: pytest.CaptureFixture[str], *arguments: object) -> Any:
    capsys.readouterr()
    assert main(["data", "look", *map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_look_at_a_run_is_what_its_trainer_is_fed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = load(folder / "run.yaml").run
    windows = Windows.of(open_sources(run.data.train, run.data, folder), run.data)
    order = Order(windows.sizes, [1.0], run.seed)
    for rank in range(2):
        with Feed(windows, order, 4, rank, 2, 1) as feed:
            batches = feed.step(3)  # the third step reads batch 3, since batch 1 is left out
        for m, batch in enumerate(batches):
            seen = looked(capsys, folder / "run.yaml", "--step", 2, "--rank", rank, "--micro-batch", m)
            assert {k: seen[k] for k in ("step", "batch", "rank", "ranks", "micro_batch", "micro_batches")} == {
                "step": 2, "batch": 3, "rank": rank, "ranks": 2, "micro_batch": m, "micro_batches": 2
            }  # fmt: skip
            (one,) = seen["windows"]
            assert one["tokens"] == batch.tokens[0].tolist()
            assert [NO_TARGET if t is None else t for t in one["targets"]] == batch.targets[0].tolist()
            assert one["positions"] == batch.positions[0].tolist()
            assert [PADDING if d is None else d for d in one["documents"]] == batch.documents[0].tolist()
            assert one["window"] == order.at(3 * 4 + rank * 2 + m, 1)[1][0]


def test_what_is_learnt_of_a_pair_is_its_answer_and_its_end(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (seen,) = looked(capsys, folder / "data", "--seq-len", 24, "--packing", "chop")["windows"]
    assert "".join(seen["texts"][1:5]) == "2+2="
    assert seen["learnt"][:8] == [False] * 5 + [True, True, False]
    assert seen["tokens"][6] == seen["end_id"] == seen["start_id"] == seen["tokens"][7]
    assert seen["why_not"][:8] == ["starts its document", *["masked"] * 4, None, None, "starts its document"]
    assert main(["data", "look", str(folder / "data"), "--seq-len", "24", "--packing", "chop"]) == 0
    text = capsys.readouterr().out
    assert "start tokens (id 256 '<end>'): 2, inputs only; the first tokens of their texts: 0 of 2 learnt" in text
    assert "end tokens (id 256 '<end>'): 1 of 1 learnt" in text
    assert "        5        0        5       52  '4'              learnt" in text


def test_an_end_token_that_begins_a_window_is_not_taken_for_a_start(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (seen,) = looked(capsys, folder / "data", "--seq-len", 6, "--packing", "chop", "--window", 1)["windows"]
    assert seen["tokens"][:2] == [256, 256], "the end of the first pair, then the start of the next"
    assert seen["why_not"][:2] == ["begins the window", "starts its document"]


def test_a_window_without_a_start_says_so(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "look", str(folder / "data"), "--seq-len", "4", "--packing", "chop", "--window", "0"]) == 0
    assert "start tokens (id 256 '<end>'): 1, inputs only" in capsys.readouterr().out
    assert main(["data", "look", str(folder / "data"), "--seq-len", "3", "--packing", "chop", "--window", "1"]) == 0
    assert "start tokens (id 256): none here" in capsys.readouterr().out


@pytest.mark.parametrize("colour", [False, True])
def test_text_of_others_cannot_speak_to_the_terminal(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, colour: bool
) -> None:
    monkeypatch.setattr(look, "in_colour", lambda: colour)
    assert main(["data", "look", str(folder / "data"), "--seq-len", "24", "--windows", "9", "--all"]) == 0
    text = capsys.readouterr().out
    own = (look._GREEN, look._YELLOW, look._GREY, look._BOLD, look._PLAIN)
    assert (look._GREEN in text) == colour
    for sequence in own:
        text = text.replace(sequence, "")
    assert all(c.isprintable() or c == "\n" for c in text)
    assert r"'\x1b'" in text
    assert look.quoted("a\u202e\x07\\\ud800b") == r"'a\u202e\x07\\\ud800b'"


def test_colour_is_for_a_terminal_whose_user_wants_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert not look.in_colour()  # captured: no terminal
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert look.in_colour()
    monkeypatch.setenv("NO_COLOR", "1")
    assert not look.in_colour()


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (["nowhere"], 78, "there is no folder nowhere"),
        (["nowhere.yaml"], 2, "nowhere.yaml"),
        (["data", "--step", "1"], 2, "--step is for a run file, and data is taken for a data set"),
        (["data", "train.batch=2"], 2, "train.batch=2 is for a run file"),
        (["data", "--seq-len", "9999", "--packing", "chop"], 78, "lower data.seq_len"),
        (["data", "--window", "9999", "--seq-len", "24"], 2, "there is no window 9999: there are"),
        (["data", "--windows", "0"], 2, "--windows, --ranks and --seq-len are 1 or more"),
        (["run.yaml", "--seq-len", "8"], 2, "of a run file say data.seq_len=8"),
        (["run.yaml", "--packing", "chop"], 2, "of a run file say data.packing=chop"),
        (["run.yaml", "--step", "-1"], 2, "there is no step -1"),
        (["run.yaml", "--rank", "2"], 2, "there is no rank 2 of 2"),
        (["run.yaml", "--ranks", "3"], 2, "cannot be shared equally by 3"),
        (["run.yaml", "--micro-batch", "2"], 2, "there is no micro-batch 2"),
        (["run.yaml", "--window", "1"], 2, "there are 1 windows in this micro-batch"),
        (["run.yaml", "data.train=nowhere"], 78, "nowhere"),
    ],
)
def test_a_wrong_question_is_one_sentence(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    code: int,
    sentence: str,
) -> None:
    monkeypatch.chdir(folder)
    assert main(["data", "look", *arguments]) == code
    said = capsys.readouterr().err
    assert said.startswith("shoal: ")
    assert sentence in said
    assert said.count("\n") == 1
