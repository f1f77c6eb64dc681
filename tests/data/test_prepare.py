"""What comes out of `shoal data prepare`: the documents that went in, the same bytes for any number of workers."""

from __future__ import annotations

import gzip
import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest
import zstandard
from tokenizers import Tokenizer

from shoal.cli.main import main
from shoal.data import tokenizer as tokenizer_module
from shoal.data.prepare import readers_bytes, units
from shoal.data.prepare.data_set import Options, prepare
from shoal.data.prepare.units import Reading
from shoal.data.shards import TokenShards
from shoal.errors import DataError, UsageError
from tests.data.preparing import files_of, make_texts, read_texts, shoal, small_bpe, write_jsonl

QUIET = Options(quiet=True, workers=1)


def options(**changes: object) -> Options:
    reading = {k: changes.pop(k) for k in list(changes) if k in Reading.__dataclass_fields__}
    return Options(**{"quiet": True, "workers": 1, **changes}, reading=Reading(**reading))  # type: ignore[arg-type]


@pytest.fixture
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(units, "MIN_UNIT_BYTES", 3000)


def test_every_document_comes_back_in_order(tmp_path: Path, small_units: None) -> None:
    texts = make_texts(200)
    corpus = write_jsonl(tmp_path / "a.jsonl", texts)
    (tmp_path / "tokenizer.json").write_text(small_bpe().to_str())
    for tokenizer in ("byte", str(tmp_path / "tokenizer.json")):
        out = tmp_path / tokenizer.replace("/", "_")
        done = prepare([str(corpus)], out, options(tokenizer=tokenizer))
        assert read_texts(out) == texts
        assert (done.documents, len(done.sets["all"][1].shards)) == (200, done.work.units)
        assert done.work.units > 5
        TokenShards.open(out).verify()


def test_any_number_of_workers_writes_the_same_bytes(tmp_path: Path, small_units: None) -> None:
    (tmp_path / "in").mkdir()
    for i in range(3):
        write_jsonl(tmp_path / "in" / f"{i}.jsonl", make_texts(80, seed=i))
    (tmp_path / "in" / "b.txt").write_text("\n\n\n".join(make_texts(80, seed=9)))
    with gzip.open(tmp_path / "in" / "c.txt.gz", "wt") as f:
        f.write("\n\n\n".join(make_texts(80, seed=10)))
    results = []
    for workers in (1, 2, 3):
        out = tmp_path / f"out{workers}"
        done = prepare([str(tmp_path / "in")], out, options(workers=workers, separator="\n\n\n", eval_fraction=0.2))
        assert done.work.workers == workers
        results.append(files_of(out))
    assert results[0] == results[1] == results[2]
    assert len(results[0]) > 20


@pytest.mark.parametrize("separator", ["\n", "\n\n\n", "<|doc|>", "aba"])
def test_cutting_a_file_into_units_loses_and_doubles_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, separator: str
) -> None:
    texts = [re.sub(r"\s+", " ", t).replace("aba", "") for t in make_texts(150)]
    # Separators in a row, and one that begins inside another: these are where a cut could go wrong.
    corpus = tmp_path / "a.txt"
    corpus.write_text(separator.join(t + (separator if i % 7 == 0 else "") for i, t in enumerate(texts)) + "\n\n\n\n")
    want = [part.strip("\r\n") for part in corpus.read_text().split(separator)]
    monkeypatch.setattr(units, "MIN_UNIT_BYTES", 200)
    done = prepare([str(corpus)], tmp_path / "out", options(separator=separator))
    assert done.work.units > 20
    assert read_texts(tmp_path / "out") == [t for t in want if t.strip()]


def test_packed_files_give_the_same_documents_as_plain_ones(tmp_path: Path, small_units: None) -> None:
    texts = make_texts(120)
    plain = write_jsonl(tmp_path / "a.jsonl", texts)
    half = plain.stat().st_size // 2
    data = plain.read_bytes()
    # Several members or frames in one file, as parallel packers and `cat` make them.
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(data[:half]) + gzip.compress(data[half:]) + b"\0" * 512)
    pack = zstandard.ZstdCompressor().compress
    (tmp_path / "c.jsonl.zst").write_bytes(pack(data[:half]) + pack(data[half:]))
    for name in ("a.jsonl", "b.jsonl.gz", "c.jsonl.zst"):
        prepare([str(tmp_path / name)], tmp_path / f"out-{name}", QUIET)
        assert read_texts(tmp_path / f"out-{name}") == texts


def test_a_file_of_text_is_one_document_and_lines_or_separators_cut_it(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\n\r\n\r\ntwo\r\n")
    cases: list[tuple[str | None, list[str]]] = [
        (None, ["one\r\n\r\n\r\ntwo\r\n"]),
        ("\n", ["one", "two"]),
        ("two", ["one"]),
    ]
    for i, (separator, want) in enumerate(cases):
        prepare([str(tmp_path / "a.txt")], tmp_path / str(i), options(separator=separator))
        assert read_texts(tmp_path / str(i)) == want


def test_a_text_too_long_for_one_document_is_cut_at_line_ends_packed_or_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (readers_bytes, units):
        monkeypatch.setattr(module, "MAX_DOCUMENT_BYTES", 1000)
        monkeypatch.setattr(module, "CUT_SEARCH_BYTES", 400)
    text = "\n".join(make_texts(40)) + "\n" + "word " * 500 + "海" * 1500 + "\n"
    (tmp_path / "a.txt").write_text(text)
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(text.encode()))
    for name in ("a.txt", "b.txt.gz"):
        prepare([str(tmp_path / name)], tmp_path / f"out-{name}", QUIET)
    documents = read_texts(tmp_path / "out-a.txt")
    assert documents == read_texts(tmp_path / "out-b.txt.gz")
    assert "".join(documents) == text
    assert max(len(d.encode()) for d in documents) <= 1000
    assert documents[0].endswith("\n")


def test_cutting_long_documents_for_the_tokenizer_changes_no_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer_module, "PIECE_CHARS", 100)
    text = " ".join(make_texts(60))
    (tmp_path / "a.txt").write_text(text)
    (tmp_path / "tokenizer.json").write_text(small_bpe("llama3").to_str())
    prepare([str(tmp_path / "a.txt")], tmp_path / "out", options(tokenizer=str(tmp_path)))
    shards = TokenShards.open(tmp_path / "out")
    whole = Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode(text, add_special_tokens=False).ids
    assert shards.read(0, shards.tokens)[0].tolist() == [0, *whole, 0]


def test_parquet_and_datasets_give_their_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    import pyarrow as pa
    import pyarrow.parquet as pq

    monkeypatch.setattr(units, "MIN_UNIT_BYTES", 2000)
    texts = make_texts(90)
    table = pa.table({"id": list(range(90)), "body": texts})
    (tmp_path / "files").mkdir()
    pq.write_table(table.slice(0, 60), tmp_path / "files" / "a.parquet", row_group_size=20)
    pq.write_table(table.slice(60), tmp_path / "files" / "b.parquet")
    datasets.disable_progress_bars()
    saved = datasets.Dataset(table)
    saved.save_to_disk(tmp_path / "one")
    both = datasets.DatasetDict({"train": saved.select(range(5)), "test": saved.select(range(89, -1, -1))})
    both.save_to_disk(tmp_path / "both")
    # The last is how a dataset of the hub is read: streamed, shard by shard.
    cases = [
        ("files", "auto", "train", texts),
        ("one", "auto", "train", texts),
        ("both", "auto", "test", texts[::-1]),
        ("files", "hf", "train", texts),
    ]
    for i, (name, format, split, want) in enumerate(cases):
        done = prepare(
            [str(tmp_path / name)], tmp_path / f"out{i}", options(format=format, split=split, text_field="body")
        )
        assert read_texts(tmp_path / f"out{i}") == want, name
        assert done.work.units >= 2, name


def test_held_out_documents_are_chosen_by_their_content_alone(tmp_path: Path, small_units: None) -> None:
    texts = make_texts(400)
    texts += texts[:50]  # a document that comes twice must not be on both sides
    one = write_jsonl(tmp_path / "a.jsonl", texts)
    two = [write_jsonl(tmp_path / "x.jsonl", texts[300:]), write_jsonl(tmp_path / "y.jsonl", texts[:300])]
    prepare([str(one)], tmp_path / "one", options(eval_fraction=0.1))
    prepare([str(p) for p in two], tmp_path / "two", options(eval_fraction=0.1))
    train, held_out = read_texts(tmp_path / "one" / "train"), read_texts(tmp_path / "one" / "eval")
    assert sorted(train + held_out) == sorted(texts)
    assert not set(train) & set(held_out)
    assert 15 < len(held_out) < 90
    assert sorted(held_out) == sorted(read_texts(tmp_path / "two" / "eval"))


@pytest.mark.parametrize("fraction", [1e-9, 0.5, 1 - 1e-9])
def test_a_small_corpus_still_has_both_sides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fraction: float) -> None:
    monkeypatch.setattr(units, "MIN_UNIT_BYTES", 10)  # each document in a unit of its own
    corpus = write_jsonl(tmp_path / "a.jsonl", ["call me", "Ishmael", "some years ago"])
    prepare([str(corpus)], tmp_path / "out", options(eval_fraction=fraction))
    train, held_out = read_texts(tmp_path / "out" / "train"), read_texts(tmp_path / "out" / "eval")
    assert sorted(train + held_out) == ["Ishmael", "call me", "some years ago"]
    assert train
    assert held_out


def test_a_single_document_cannot_be_split(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("call me Ishmael")
    with pytest.raises(DataError, match=r"only one document, which cannot be split .* --separator or --per-line"):
        prepare([str(tmp_path / "a.txt")], tmp_path / "out", options(eval_fraction=0.5))


def test_prompts_are_context_and_no_training_target(tmp_path: Path) -> None:
    rows = [{"prompt": "2+2=", "text": "4"}, {"prompt": "", "text": "ab"}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    prepare([str(tmp_path / "a.jsonl")], tmp_path / "out", options(prompt_field="prompt"))
    shards = TokenShards.open(tmp_path / "out")
    tokens, ends, mask = shards.read(0, shards.tokens)
    assert mask is not None
    assert tokens.tolist() == [256, *b"2+2=4", 256, 256, *b"ab", 256]
    assert (ends.tolist(), mask.tolist()) == ([7, 11], [0, 0, 0, 0, 0, 1, 1, 0, 1, 1, 1])


def test_shards_hold_no_more_than_asked_unless_a_document_does(tmp_path: Path) -> None:
    texts = ["x" * n for n in (10, 30, 5, 5, 5, 100, 1, 1)]
    corpus = write_jsonl(tmp_path / "a.jsonl", texts)
    done = prepare([str(corpus)], tmp_path / "out", options(shard_tokens=40))
    assert [s.tokens for s in done.sets["all"][1].shards] == [12, 39, 14, 102, 6]
    assert read_texts(tmp_path / "out") == texts


def test_a_folder_is_read_in_order_and_what_is_no_text_is_passed_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("b.txt", "a/z.md", "a/b.rst", "README.md", ".hidden.txt", "c.png", "a/.git/x.txt"):
        path = tmp_path / "in" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    assert main(["data", "prepare", str(tmp_path / "in"), "--out", str(tmp_path / "in" / "out")]) == 0
    assert read_texts(tmp_path / "in" / "out") == ["a/b.rst", "a/z.md", "b.txt"]
    said = capsys.readouterr().err
    assert "passed over" in said
    assert "c.png" in said
    assert main(["data", "prepare", str(tmp_path / "in" / "c.png"), "--out", str(tmp_path / "out2")]) == 0
    assert read_texts(tmp_path / "out2") == ["c.png"]  # a file that is named is taken


def test_a_finished_data_set_is_not_made_again_and_not_replaced_unasked(tmp_path: Path) -> None:
    corpus = write_jsonl(tmp_path / "a.jsonl", make_texts(5))
    prepare([str(corpus)], tmp_path / "out", QUIET)
    before = files_of(tmp_path / "out")
    assert prepare([str(corpus)], tmp_path / "out", options(workers=2)).already
    (tmp_path / "out" / "shard-00000.docs").unlink()
    with pytest.raises(DataError, match=r"shard-00000.docs is missing"):
        prepare([str(corpus)], tmp_path / "out", QUIET)
    (tmp_path / "out" / "shard-00000.docs").write_bytes(before["shard-00000.docs"])
    with pytest.raises(DataError, match=r"made from other input or with other options.*--overwrite"):
        prepare([str(corpus)], tmp_path / "out", options(eval_fraction=0.5))
    assert files_of(tmp_path / "out") == before
    prepare([str(corpus)], tmp_path / "out", options(eval_fraction=0.5, overwrite=True))
    assert set(files_of(tmp_path / "out")) >= {"train/index.json", "eval/index.json"}
    assert "index.json" not in files_of(tmp_path / "out")


def test_the_index_says_where_the_tokens_came_from(tmp_path: Path) -> None:
    corpus = write_jsonl(tmp_path / "a.jsonl", make_texts(5))
    done = prepare([str(corpus)], tmp_path / "out", QUIET)
    source = done.sets["all"][1].source
    assert source["inputs"] == [{"path": str(corpus), "size_bytes": corpus.stat().st_size}]
    assert source["options"]["tokenizer"] == "byte"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"eval_fraction": 1.0}, "--eval-fraction is a share between 0 and 1"),
        ({"eval_fraction": -0.1}, "--eval-fraction is a share between 0 and 1"),
        ({"shard_tokens": 0}, "--shard-tokens 0"),
        ({"workers": 0}, "--workers 0"),
        ({"separator": ""}, "--separator is empty"),
    ],
)
def test_options_that_make_no_sense_are_refused(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        prepare(["nowhere"], tmp_path / "out", options(**changes))


def test_the_summary_is_readable_by_people_and_by_programs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    corpus = write_jsonl(tmp_path / "a.jsonl", make_texts(50))
    arguments = ["data", "prepare", str(corpus), "--out", str(tmp_path / "out"), "--eval-fraction", "0.2"]
    assert main([*arguments, "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["documents"] == 50 == sum(s["documents"] for s in summary["sets"].values())
    assert summary["work"]["peak_rss_bytes"] > 1e7
    assert main(arguments) == 0
    assert "already prepared" in capsys.readouterr().out


def test_info_describes_verifies_and_samples(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    corpus = write_jsonl(tmp_path / "a.jsonl", make_texts(50))
    prepare([str(corpus)], tmp_path / "out", options(eval_fraction=0.2))
    assert main(["data", "info", str(tmp_path / "out"), "--verify", "--sample", "2"]) == 0
    said = capsys.readouterr().out
    assert "out/train" in said
    assert "out/eval" in said
    assert "every checksum is right" in said
    assert main(["data", "info", str(tmp_path / "out" / "train"), "--sample", "3", "--json"]) == 0
    (described,) = json.loads(capsys.readouterr().out)
    assert len(described["samples"]) == 3
    texts = read_texts(tmp_path / "out" / "train")
    assert all(any(text.startswith(sample.rstrip("\ufffd")) for text in texts) for sample in described["samples"])

    broken = bytearray((tmp_path / "out" / "eval" / "shard-00000.tokens").read_bytes())
    broken[3] ^= 1
    (tmp_path / "out" / "eval" / "shard-00000.tokens").write_bytes(broken)
    assert main(["data", "info", str(tmp_path / "out"), "--verify"]) == 78
    assert "shard-00000.tokens" in capsys.readouterr().err
    assert main(["data", "info", str(tmp_path / "nowhere")]) == 78
    assert "there is no folder" in capsys.readouterr().err


def test_a_terminal_sees_a_bar_and_a_log_sees_lines(tmp_path: Path) -> None:
    corpus = write_jsonl(tmp_path / "a.jsonl", make_texts(3000))
    master, slave = pty.openpty()
    arguments = ("data", "prepare", corpus, "--workers", 2, "--out")
    with shoal(*arguments, tmp_path / "out", unit_bytes=8000, stderr=slave) as p:
        os.close(slave)
        seen = b""
        while True:
            try:
                block = os.read(master, 4096)
            except OSError:  # the terminal is closed when the process is gone
                break
            if not block:
                break
            seen += block
        assert p.wait() == 0
    os.close(master)
    text = seen.decode()
    assert re.search(r"prepare  █*░+ +\d+%  [\d.]+ MB/s  [\d.]+[kM]? tokens/s  .* left", text), text
    assert text.endswith("\r\x1b[K")  # and nothing of it stays
    with shoal(*arguments, tmp_path / "out2") as p:
        out, err = p.communicate()
    assert "\r" not in err
    assert "tokens/s" in out


@pytest.mark.slow
def test_memory_does_not_grow_with_the_input(tmp_path: Path) -> None:
    peaks = []
    for megabytes in (1, 24):
        text = "\n".join(make_texts(200)) + "\n"
        (tmp_path / "a.txt").write_text(text * (megabytes * 1_000_000 // len(text.encode())))
        arguments = ("data", "prepare", tmp_path / "a.txt", "--per-line", "--workers", 1, "--json")
        with shoal(*arguments, "--out", tmp_path / f"{megabytes}") as p:
            peaks.append(json.loads(p.communicate()[0])["work"]["peak_rss_bytes"] / 1e6)
    assert peaks[1] < peaks[0] + 30


def test_no_torch_is_imported_to_prepare(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    write_jsonl(tmp_path / "in" / "a.jsonl", make_texts(5))
    code = (
        "import sys; from shoal.cli.main import main; "
        "codes = [main(['data', *verb.split()]) for verb in "
        "('prepare in --out one', 'info one --sample 1', 'prepare hf:in --out two')]; "
        "import shoal.data.prepare.workers, shoal.data.prepare.tokenizer_train; "
        "sys.exit('torch was imported' if 'torch' in sys.modules else max(codes))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert read_texts(tmp_path / "two") == read_texts(tmp_path / "one")
