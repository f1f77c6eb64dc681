"""`shoal data tokenizer`: what it learns, where it writes it, and that others can read it."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from shoal.cli.main import main
from shoal.data.tokenizer import load_tokenizer
from shoal.data.tokenizer_train import Lesson, train_tokenizer
from tests.data.preparing import make_texts, shoal, write_jsonl
from tests.patience import limit

TEXT = Path(__file__).parents[2] / "examples" / "text"


def test_a_tokenizer_learned_from_real_text_has_the_size_asked_for_and_loses_nothing(tmp_path: Path) -> None:
    trained = train_tokenizer(Lesson([str(TEXT / "moby-dick.txt")], 1500, quiet=True), tmp_path / "t")
    tokenizer = load_tokenizer(tmp_path / "t")
    assert trained["vocab_size"] == tokenizer.vocab_size == 1500
    assert trained["bytes_per_token"] > 2.5
    for text in ("Call me Ishmael.", " 海は広い\n\n🐳\t", "<not special>", *make_texts(5)):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("<|endoftext|>") == [tokenizer.eos_id]


def test_the_same_text_gives_the_same_tokenizer(tmp_path: Path) -> None:
    corpus = write_jsonl(tmp_path / "a.jsonl", make_texts(300))
    for out in ("one.json", "two.json"):
        train_tokenizer(Lesson([str(corpus)], 400, quiet=True), tmp_path / out)
    assert (tmp_path / "one.json").read_bytes() == (tmp_path / "two.json").read_bytes()


def test_transformers_opens_it(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    corpus = write_jsonl(tmp_path / "a.jsonl", make_texts(100))
    train_tokenizer(Lesson([str(corpus)], 400, quiet=True), tmp_path / "t")
    theirs, ours = transformers.AutoTokenizer.from_pretrained(tmp_path / "t"), load_tokenizer(tmp_path / "t")
    assert theirs.eos_token_id == ours.eos_id
    for text in make_texts(5, seed=3):
        assert theirs(text)["input_ids"] == ours.encode(text)


def test_little_text_gives_a_small_vocabulary_and_says_so(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text("a whale is a whale")
    out = tmp_path / "deep" / "t.json"
    arguments = ["data", "tokenizer", str(tmp_path / "a.txt"), "--vocab-size", "8192", "--out", str(out)]
    assert main([*arguments, "--json"]) == 0
    said = capfd.readouterr()
    learned = json.loads(said.out)["vocab_size"]
    assert learned == Tokenizer.from_file(str(out)).get_vocab_size() < 300
    assert f"gives only {learned} tokens where 8,192 were asked for" in said.err
    assert not (tmp_path / "deep" / "tokenizer_config.json").exists()  # a file was asked for, and only that is written


def test_a_sample_is_enough_when_the_text_is_large(tmp_path: Path) -> None:
    corpus = write_jsonl(tmp_path / "a.jsonl", make_texts(4000))
    everything = train_tokenizer(Lesson([str(corpus)], 300, quiet=True), tmp_path / "t.json")["text_bytes"]
    sample = Lesson([str(corpus)], 300, max_mb=everything / 4 / 1e6, quiet=True)
    some = train_tokenizer(sample, tmp_path / "t.json")["text_bytes"]
    assert 0.1 < some / everything < 0.4


def test_bad_text_is_skipped_when_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a whale"}\n{"txt": ""}\n')
    arguments = ["data", "tokenizer", str(tmp_path / "a.jsonl"), "--vocab-size", "300", "--out", str(tmp_path / "t")]
    assert main(arguments) == 78
    assert f"{tmp_path}/a.jsonl:2 has no field 'text'" in capsys.readouterr().err
    assert not (tmp_path / "t").exists()
    assert main([*arguments, "--skip-bad"]) == 0
    assert "skipped 1: missing field" in capsys.readouterr().out


def test_it_can_be_stopped_while_it_merges(tmp_path: Path) -> None:
    with shoal("data", "tokenizer", TEXT, "--vocab-size", 60_000, "--out", tmp_path / "t") as p:
        assert p.stderr is not None
        while "now merging" not in p.stderr.readline():
            assert p.poll() is None
        p.send_signal(signal.SIGTERM)
        assert p.wait(timeout=limit(30)) == 143
        assert p.stderr.read() == "shoal: stopped by SIGTERM: nothing was written.\n"
    assert not (tmp_path / "t").exists()
