"""`shoal data tokenizer`: what it learns, where it writes it, and that others can read it."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from tokenizers import Tokenizer, pre_tokenizers

from shoal.cli.main import main
from shoal.data.prepare.tokenizer_train import Lesson, train_tokenizer
from shoal.data.tokenizer import load_tokenizer
from shoal.errors import UsageError
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
    assert tokenizer.eos_id not in tokenizer.encode("<|endoftext|>")
    assert load_tokenizer(tmp_path / "t", special=True).encode("<|endoftext|>") == [tokenizer.eos_id]


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("learned")
    numbers = " ".join(str(n) for n in range(900, 1100)) * 3
    train_tokenizer(
        Lesson([str(write_jsonl(folder / "a.jsonl", [*make_texts(300), numbers]))], 600, quiet=True), folder
    )
    return folder


def test_every_byte_has_a_token_and_any_text_comes_back(learned: Path) -> None:
    tokenizer, library = load_tokenizer(learned), Tokenizer.from_file(str(learned / "tokenizer.json"))
    assert set(pre_tokenizers.ByteLevel.alphabet()) <= set(library.get_vocab())
    assert len(pre_tokenizers.ByteLevel.alphabet()) == 256
    every = "".join(chr(c) for c in (*range(0xD800), *range(0xE000, 0x11_0000, 97)))
    assert tokenizer.decode(tokenizer.encode(every)) == every


def test_every_digit_is_a_token_of_its_own(learned: Path) -> None:
    tokenizer = load_tokenizer(learned)
    digit = {d: tokenizer.encode(d) for d in "0123456789"}
    assert all(len(ids) == 1 for ids in digit.values())
    number = [i for d in "1000" for i in digit[d]]
    assert tokenizer.encode("1000") == number
    assert tokenizer.encode("the 1000")[-4:] == number
    vocabulary = Tokenizer.from_file(str(learned / "tokenizer.json")).get_vocab()
    assert [t for t in vocabulary if set(t) & set("0123456789") and len(t) > 1 and "reserved" not in t] == []


def test_reserved_tokens_have_names_and_ids_and_no_text_becomes_one(learned: Path, tmp_path: Path) -> None:
    library = Tokenizer.from_file(str(learned / "tokenizer.json"))
    reserved = [library.token_to_id(f"<|reserved_{i}|>") for i in range(16)]
    assert reserved == list(range(1, 17))
    assert library.token_to_id("<|reserved_16|>") is None
    assert not set(reserved) & set(load_tokenizer(learned).encode("<|reserved_3|>"))
    assert load_tokenizer(learned, special=True).encode("<|reserved_3|>") == [reserved[3]]
    with pytest.raises(UsageError, match=r"more than 273 \(the bytes, <\|endoftext\|> and 16 reserved tokens\)"):
        train_tokenizer(Lesson([str(learned / "a.jsonl")], 273, quiet=True), tmp_path)
    train_tokenizer(Lesson([str(learned / "a.jsonl")], 258, reserved=0, quiet=True), tmp_path)
    assert load_tokenizer(tmp_path).vocab_size == 258


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
        assert theirs(text)["input_ids"] == [ours.start_id, *ours.encode(text)]


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
    corpus = write_jsonl(tmp_path / "a.jsonl", make_texts(2000))
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
