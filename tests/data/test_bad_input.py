"""Wrong input to `shoal data`: one sentence that names the place, and an exit code; or skipped and counted."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import zstandard

from shoal.cli.main import main
from shoal.data.prepare import readers_bytes, units
from tests.data.preparing import make_texts, read_texts, small_bpe, write_jsonl
from tests.patience import limit

LINES = "".join(json.dumps({"text": t}) + "\n" for t in make_texts(300)).encode()


@dataclass(frozen=True)
class Case:
    """One wrong input. `{in}` in `arguments` and `sentence` is the folder it is made in."""

    name: str
    make: Callable[[Path], object]
    arguments: str
    sentence: str
    reason: str | None = None
    """What --skip-bad counts it as; None: it cannot be skipped."""
    kept: int = 0
    """Documents that are left when it is skipped."""
    code: int = 78


def text(name: str, content: bytes | str) -> Callable[[Path], object]:
    def make(folder: Path) -> None:
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)

    return make


def parquet(column: str, values: list[object]) -> Callable[[Path], object]:
    def make(folder: Path) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        pq.write_table(pa.table({column: values}), folder / "a.parquet")

    return make


def cut_parquet(folder: Path) -> None:
    parquet("text", list(make_texts(500)))(folder)
    data = (folder / "a.parquet").read_bytes()
    (folder / "a.parquet").write_bytes(data[: len(data) // 2])


def spoiled_parquet(folder: Path) -> None:
    """Whole to look at, but a page in the middle is garbage."""
    parquet("text", list(make_texts(2000)))(folder)
    data = bytearray((folder / "a.parquet").read_bytes())
    data[100 : len(data) // 2] = os.urandom(len(data) // 2 - 100)
    (folder / "a.parquet").write_bytes(data)


def full_folder(folder: Path) -> None:
    text("a.txt", "hello")(folder)
    (folder / "out").mkdir()
    text("out/thesis.tex", "precious")(folder)


def link_to_nowhere(folder: Path) -> None:
    (folder / "a.txt").symlink_to(folder / "gone.txt")


GZ, ZST = gzip.compress(LINES), zstandard.ZstdCompressor().compress(LINES)
FILE = "prepare {in}/a.jsonl --out {in}/out"
TEXT = "prepare {in}/a.txt --out {in}/out"
GOOD = '{"text": "good"}\n'

CASES = [
    Case(
        "invalid UTF-8 in text", text("a.txt", b"one\ntwo\nthr\xffee\n"), TEXT + " --per-line",
        "{in}/a.txt:3 (byte 11) is not UTF-8 (invalid start byte); convert it, or leave", "invalid UTF-8", 2,
    ),
    Case(
        "invalid UTF-8 in JSONL", text("a.jsonl", GOOD.encode() + b'{"text": "\xc3"}\n'), FILE,
        "{in}/a.jsonl:2 (byte 27) is not UTF-8", "invalid UTF-8", 1,
    ),
    Case("UTF-16", text("a.txt", "whale".encode("utf-16")), TEXT, "it looks like UTF-16: `iconv", "invalid UTF-8"),
    Case(
        "half a surrogate pair", text("a.jsonl", '{"text": "\\ud800"}\n' + GOOD), FILE,
        "{in}/a.jsonl:1 has half a surrogate pair", "invalid UTF-8", 1,
    ),
    Case("empty file", text("a.txt", ""), TEXT, "{in}/a.txt is empty; remove it, or leave", "empty file"),
    Case("empty gzip", text("a.txt.gz", gzip.compress(b"")), "prepare {in}/a.txt.gz --out {in}/out",
         "{in}/a.txt.gz is empty", "empty file"),
    Case("truncated gzip", text("a.jsonl.gz", GZ[: len(GZ) // 2]), "prepare {in}/a.jsonl.gz --out {in}/out",
         "{in}/a.jsonl.gz is a truncated gzip file after", "broken file", 100),
    Case("gzip cut in its last bytes", text("a.jsonl.gz", GZ[:-5]), "prepare {in}/a.jsonl.gz --out {in}/out",
         "is a truncated gzip file after 300 readable records", "broken file", 300),
    Case("damaged gzip", text("a.jsonl.gz", b"no gzip at all"), "prepare {in}/a.jsonl.gz --out {in}/out",
         "{in}/a.jsonl.gz is a damaged gzip file (", "broken file"),
    Case("truncated zstandard", text("a.jsonl.zst", ZST[: len(ZST) // 2]), "prepare {in}/a.jsonl.zst --out {in}/out",
         "{in}/a.jsonl.zst is a truncated zstandard file", "broken file"),
    Case("damaged zstandard", text("a.jsonl.zst", b"no zstd at all"), "prepare {in}/a.jsonl.zst --out {in}/out",
         "{in}/a.jsonl.zst is a damaged zstandard file (", "broken file"),
    Case(
        "missing field", text("a.jsonl", GOOD + '{"body": "x", "id": 1}\n'), FILE,
        "{in}/a.jsonl:2 has no field 'text' (it has body, id); name the right one with --text-field",
        "missing field", 1,
    ),
    Case("missing prompt", text("a.jsonl", GOOD + '{"text": "x", "p": "y"}\n'), FILE + " --prompt-field p",
         "{in}/a.jsonl:1 has no field 'p' (it has text); name the right one with --prompt-field", "missing field", 1),
    Case("a number for text", text("a.jsonl", GOOD + '{"text": 7}\n'), FILE,
         "{in}/a.jsonl:2 has a number in the field 'text', where text is expected", "field is not text", 1),
    Case("null for text", text("a.jsonl", '{"text": null}\n' + GOOD), FILE,
         "{in}/a.jsonl:1 has null in the field 'text'", "field is not text", 1),
    Case("invalid JSON", text("a.jsonl", GOOD + "\n" + '{"text": "x"\n' + GOOD), FILE,
         "{in}/a.jsonl:3 is not valid JSON (Expecting ',' delimiter at column 13)", "invalid JSON", 2),
    Case("a JSON array", text("a.json", '[\n {"text": "x"}\n]\n'), "prepare {in}/a.json --out {in}/out",
         "{in}/a.json:1 is not valid JSON (Expecting value at column 2); write one object a line (`jq -c '.[]'`",
         "invalid JSON", 1),
    Case("a line that is no object", text("a.jsonl", "[1]\n" + GOOD), FILE,
         "{in}/a.jsonl:1 is a list and not a JSON object", "invalid JSON", 1),
    Case("JSON nested too deep", text("a.jsonl", "[" * 100_000 + "\n" + GOOD), FILE,
         "{in}/a.jsonl:1 is not valid JSON (maximum recursion depth exceeded", "invalid JSON", 1),
    Case("no Parquet", text("a.parquet", "hello"), "prepare {in}/a.parquet --out {in}/out",
         "{in}/a.parquet is no Parquet file that can be read (", "broken file"),
    Case("truncated Parquet", cut_parquet, "prepare {in}/a.parquet --out {in}/out",
         "{in}/a.parquet is no Parquet file that can be read (", "broken file"),
    Case("spoiled Parquet", spoiled_parquet, "prepare {in}/a.parquet --out {in}/out",
         "{in}/a.parquet row 0 cannot be read from row 0 on (", "broken file"),
    Case("Parquet without the column", parquet("body", ["x"]), "prepare {in}/a.parquet --out {in}/out",
         "{in}/a.parquet has no column 'text' (it has body); name the right one with --text-field", "missing field"),
    Case("null in Parquet", parquet("text", ["a", None, "b"]), "prepare {in}/a.parquet --out {in}/out",
         "{in}/a.parquet row 1 has null in the field 'text'", "field is not text", 2),
    Case("Parquet of numbers", parquet("text", [1, 2]), "prepare {in}/a.parquet --out {in}/out",
         "{in}/a.parquet row 0 has a number in the field 'text'", "field is not text"),
    Case("no such file", lambda f: None, TEXT, "there is no file or folder {in}/a.txt"),
    Case("no match", lambda f: None, "prepare {in}/*.txt --out {in}/out", "no file matches {in}/*.txt"),
    Case("a link to nowhere", link_to_nowhere, "prepare {in} --out {in}/out",
         "{in}/a.txt cannot be read: No such file"),
    Case("a named pipe", lambda f: os.mkfifo(f / "a.txt"), TEXT, "{in}/a.txt is no regular file"),
    Case("named twice", text("a.txt", "x"), "prepare {in}/a.txt {in} --out {in}/out", "{in}/a.txt is named twice"),
    Case("nothing but other files", text("a.png", "x"), "prepare {in} --out {in}/out",
         "there is no text in {in} (1 files have other endings"),
    Case("nothing but blanks", text("a.txt", " \n\n \n"), TEXT, "there are no documents in the input"),
    Case("output is a file", text("a.txt", "x"), "prepare {in}/a.txt --out {in}/a.txt",
         "{in}/a.txt is a file; give --out"),
    Case("output has something else in it", full_folder, TEXT,
         "the output folder {in}/out has something else in it (thesis.tex)"),
    Case("output on an object store", text("a.txt", "x"), "prepare {in}/a.txt --out s3://bucket/data",
         "--out s3://bucket/data is no folder of this machine", code=2),
    Case("no dataset after all", text("dataset_dict.json", "{}"), "prepare {in} --out {in}/out",
         "{in}/dataset_dict.json is not what `datasets` writes"),
    Case("no tokenizer", text("a.txt", "x"), TEXT + " --tokenizer {in}/none.json",
         "there is no tokenizer at {in}/none.json"),
    Case("broken tokenizer", lambda f: (text("a.txt", "x")(f), text("t.json",
         "{}")(f)), TEXT + " --tokenizer {in}/t.json",
         "{in}/t.json is no tokenizer that can be used (model: None where an object belongs)"),
    Case("no such split", lambda f: (f / "dataset_dict.json").write_text('{"splits": ["train", "test"]}'),
         "prepare {in} --out {in}/out --split valid", "has no split 'valid'; --split names one of train, test"),
    Case("unknown format", text("a.txt", "x"), TEXT + " --format csv", "there is no 'csv' for --format", code=2),
    Case("no output named", text("a.txt", "x"), "prepare {in}/a.txt",
         "--out is missing; see `shoal data prepare --help`", code=2),
    Case("a vocabulary too small", text("a.txt", "x"), "tokenizer {in}/a.txt --vocab-size 100 --out {in}/t",
         "--vocab-size 100 is no size for a byte-level BPE", code=2),
    Case("a vocabulary too large", text("a.txt", "x"), "tokenizer {in}/a.txt --vocab-size 9999999 --out {in}/t",
         "--vocab-size 9999999 is no size", code=2),
    Case("nothing to learn from", text("a.txt", " "), "tokenizer {in}/a.txt --vocab-size 300 --out {in}/t",
         "there are no documents in {in}/a.txt to learn from"),
    Case("info of an unfinished data set", lambda f: (f / "d" / ".prepare").mkdir(parents=True), "info {in}/d",
         "{in}/d is not finished; run the `shoal data prepare`"),
    Case("info of some folder", text("a.txt", "x"), "info {in}", "{in} is no data set: it has no index.json"),
]  # fmt: skip


def run(case: Case, folder: Path, capsys: pytest.CaptureFixture[str], *more: str) -> tuple[int, str, str]:
    arguments = [a.replace("{in}", str(folder)) for a in case.arguments.split()]
    code = main(["data", *arguments[:2], *more, *arguments[2:]])
    said = capsys.readouterr()
    return code, said.out, said.err


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_bad_input_is_refused_in_one_sentence_that_names_the_place(
    case: Case, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    case.make(tmp_path)
    code, _, err = run(case, tmp_path, capsys)
    assert case.sentence.replace("{in}", str(tmp_path)) in err
    assert code == case.code
    assert len(err.splitlines()) == 1
    assert err.startswith("shoal: ")
    assert not (tmp_path / "out" / "index.json").exists()


@pytest.mark.parametrize("case", [c for c in CASES if c.reason], ids=lambda case: case.name)
def test_bad_input_is_skipped_and_counted_when_asked(
    case: Case, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    case.make(tmp_path)
    (tmp_path / "extra").mkdir()
    prompt = {"p": "q"} if "--prompt-field" in case.arguments else {}
    (tmp_path / "extra" / "x.jsonl").write_text(json.dumps({"text": "the rest", **prompt}))
    more = [str(tmp_path / "extra" / "x.jsonl"), "--skip-bad", "--json"]
    code, out, err = run(case, tmp_path, capsys, *more)
    assert code == 0, err
    summary = json.loads(out)
    assert list(summary["skipped"]) == [case.reason]
    assert summary["skipped"][case.reason]["count"] >= 1
    assert str(tmp_path / "a.") in summary["skipped"][case.reason]["first"]
    assert summary["documents"] >= case.kept + 1
    assert read_texts(tmp_path / "out")[-1].endswith("the rest")
    index = json.loads((tmp_path / "out" / "index.json").read_bytes())
    assert index["source"]["skipped"] == summary["skipped"]


def test_the_line_is_right_in_the_middle_of_a_file_that_several_workers_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(units, "MIN_UNIT_BYTES", 2000)
    lines = LINES.decode().splitlines()
    lines[216] = '{"tex": "t"}'
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    for workers in ("1", "2"):
        code = main(
            ["data", "prepare", str(tmp_path / "a.jsonl"), "--out", str(tmp_path / "out"), "--workers", workers]
        )
        assert code == 78
        assert f"{tmp_path}/a.jsonl:217 has no field 'text'" in capsys.readouterr().err


def test_the_number_skipped_does_not_depend_on_the_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(units, "MIN_UNIT_BYTES", 2000)
    lines = LINES.decode().splitlines()
    for i in range(5, 300, 10):
        lines[i] = "{"
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    arguments = ["data", "prepare", str(tmp_path / "a.jsonl"), "--skip-bad", "--json"]
    for workers in ("1", "3"):
        assert main([*arguments, "--out", str(tmp_path / workers), "--workers", workers]) == 0
        summary = json.loads(capsys.readouterr().out)
        assert summary["skipped"] == {"invalid JSON": {"count": 30, "first": f"{tmp_path}/a.jsonl:6"}}
        assert summary["documents"] == 270


def test_a_record_too_long_for_memory_is_refused_or_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(readers_bytes, "BLOCK_BYTES", 300_000)
    write_jsonl(tmp_path / "a.jsonl", ["first", "x" * (1 << 20), "last"])
    arguments = ["data", "prepare", str(tmp_path / "a.jsonl"), "--out", str(tmp_path / "out")]
    assert main([*arguments, "--max-document-mb", "1"]) == 78
    assert f"{tmp_path}/a.jsonl:2 is longer than 1 MiB; cut it, or allow it with" in capsys.readouterr().err
    assert main([*arguments, "--max-document-mb", "1", "--skip-bad"]) == 0
    assert read_texts(tmp_path / "out") == ["first", "last"]
    assert main([*arguments, "--max-document-mb", "2", "--overwrite"]) == 0
    assert read_texts(tmp_path / "out") == ["first", "x" * (1 << 20), "last"]
    for option in ("--max-document-mb", "--buffer-mb", "--max-growth"):
        assert main([*arguments, option, "0"]) == 2
        assert f"{option} is 0; it is a whole number from 1 to" in capsys.readouterr().err


def test_a_file_that_shrinks_while_it_is_read_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from shoal.data.prepare import data_set

    corpus = write_jsonl(tmp_path / "a.jsonl", make_texts(50))
    planned = data_set.plan_units

    def plan_then_shrink(*arguments: object) -> object:
        found = planned(*arguments)  # type: ignore[arg-type]
        os.truncate(corpus, corpus.stat().st_size // 2)
        return found

    monkeypatch.setattr(data_set, "plan_units", plan_then_shrink)
    assert main(["data", "prepare", str(corpus), "--out", str(tmp_path / "out")]) == 78
    assert f"{corpus} became shorter while it was read" in capsys.readouterr().err


def test_without_a_network_a_dataset_of_the_hub_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("datasets")
    from huggingface_hub import constants

    # A port where nobody listens, on this very machine: the same wherever the test runs.
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert main(["data", "prepare", "hf:org/name", "--out", str(tmp_path / "out")]) == 78
    err = capsys.readouterr().err
    assert "the Hugging Face hub cannot be reached to read org/name" in err
    assert "hf download --repo-type dataset org/name" in err
    assert len(err.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_a_dataset_that_the_hub_does_not_have_is_one_sentence(tmp_path: Path) -> None:
    pytest.importorskip("datasets")

    class NotThere(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), NotThere) as hub:
        threading.Thread(target=hub.serve_forever, daemon=True).start()
        # The hub's client reads its settings when it is imported, so it gets a process of its own.
        settings = {"HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}", "HF_HUB_OFFLINE": "0"}
        command = [sys.executable, "-m", "shoal", "data", "prepare", "hf:org/name", "--out", str(tmp_path / "out")]
        done = subprocess.run(
            command, env={**os.environ, **settings}, capture_output=True, text=True, timeout=limit(120)
        )
        hub.shutdown()
    assert done.returncode == 78
    assert "the Hugging Face hub refuses the dataset org/name (404" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_tokenizer_without_an_end_of_text_is_refused_until_one_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "t.json").write_text(small_bpe().to_str().replace("<|endoftext|>", "[END]"))
    (tmp_path / "a.txt").write_text("a whale")
    arguments = ["data", "prepare", str(tmp_path / "a.txt"), "--tokenizer", str(tmp_path / "t.json"), "--out"]
    assert main([*arguments, str(tmp_path / "out")]) == 78
    assert "name the token that ends a document with --eos" in capsys.readouterr().err
    assert main([*arguments, str(tmp_path / "out"), "--eos", "[END]"]) == 0
    assert read_texts(tmp_path / "out") == ["a whale"]
