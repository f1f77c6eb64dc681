"""What `data prepare` may take of memory is a function of its settings, whatever its input claims."""

from __future__ import annotations

import gzip
import json
import random
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import zstandard

from shoal.cli.main import main
from shoal.data.broken import Broken
from shoal.data.prepare import data_set
from shoal.data.prepare.memory_limit import FORMULA, peak_bytes, process_bytes
from shoal.data.prepare.parquet_pages import MOST_ROWS, Page, Pages, rows_at_once
from shoal.data.prepare.readers_bytes import Growth, records, unpacked
from shoal.data.prepare.units import Reading
from shoal.values import BadValue, look_at_count
from tests.data import bombs
from tests.data.bombs import MIB
from tests.data.preparing import make_texts, read_texts, write_jsonl

NEWLINES = bombs.zstd_of(b"\n", 512 * MIB)


class Bomb(NamedTuple):
    name: str
    make: Callable[[Path], object]
    sentence: str
    reason: str
    options: str = ""


BOMBS = [
    Bomb("newlines.jsonl.zst", bombs.of(NEWLINES), " holds more than 200 times its size, as no text does; if that is "
         "meant, allow it with --max-growth 20000", "grows too much"),
    Bomb("spaces.txt.zst", bombs.of(bombs.zstd_of(b" ", 512 * MIB)), " holds more than 200 times", "grows too much"),
    Bomb("line.jsonl.zst", bombs.of(bombs.zstd_of(b"x", 512 * MIB)), ":1 is longer than 16 MiB; cut it, or allow it "
         "with --max-document-mb", "record too long", "--max-growth 1000000"),
    Bomb("line.jsonl.gz", bombs.of(gzip.compress(b"x" * (70 * MIB), 1)), " holds more than 200", "grows too much"),
    Bomb("window.jsonl.zst", bombs.of(bombs.zstd_of(b"\n", MIB, window_log=31)), " asks for a zstandard window of "
         "2,048 MiB, where at most 128 are taken; allow it with --buffer-mb 2048", "broken file"),
    Bomb("lists.jsonl", bombs.nested_values("[]"), ":1 cannot be read (it holds more than 1,048,576 values)",
         "record too long"),
    Bomb("objects.jsonl", bombs.nested_values("{}"), ":1 cannot be read (it holds more than 1,048,576 values)",
         "record too long"),
    Bomb("deep.parquet", bombs.deep_schema, " makes the process that reads it crash (SIGSEGV): it is damaged",
         "crashes its reader"),
    Bomb("claims.parquet", bombs.many_row_groups, " is no Parquet file that can be read (", "broken file"),
    Bomb("groups.parquet", bombs.empty_row_groups, " is no Parquet file that can be read (", "broken file"),
    Bomb("entry.parquet", bombs.one_entry, " row 0 is longer than 16 MiB in the field 'text'", "record too long"),
    Bomb("entries.parquet", lambda path: bombs.one_entry(path, 8 * MIB), " holds more than 200 times its size, as no "
         "text does (row group 0, from row 7 on)", "grows too much"),
    Bomb("prefix.parquet", bombs.same_prefix, " holds more than 200 times its size", "grows too much"),
    Bomb("page.parquet", bombs.large_page, " has a page that takes 20 MiB to unpack, where at most 8 are taken (row "
         "group 0, from row 0 on); write it with smaller pages, or allow it with --buffer-mb 11",
         "takes too much memory", "--buffer-mb 4"),
    Bomb("promise.parquet", bombs.page_that_claims, " has a page that takes 2,048 MiB", "takes too much memory"),
]  # fmt: skip


@pytest.mark.parametrize("bomb", BOMBS, ids=lambda bomb: bomb.name)
def test_a_bomb_is_refused_in_one_sentence_that_names_it(
    bomb: Bomb, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / bomb.name
    bomb.make(path)
    code = main(["data", "prepare", str(path), "--out", str(tmp_path / "out"), *bomb.options.split()])
    err = capsys.readouterr().err
    assert f"shoal: {path}{bomb.sentence}" in err
    assert code == 78
    assert len(err.splitlines()) == 1
    assert not list((tmp_path / "out").glob("shard-*"))
    assert not (tmp_path / "out" / "index.json").exists()


# In a process of its own, whose children are the command and its workers: the largest of all of them is what counts.
# The limit keeps a reader without bounds from taking this machine down with it.
LARGEST = """
import resource, subprocess, sys
resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30))
done = subprocess.run([sys.executable, "-m", "shoal", "data", "prepare", *sys.argv[1:]])
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024)
sys.exit(done.returncode)
"""


@pytest.mark.slow
def test_no_process_takes_more_than_the_formula_says(tmp_path: Path) -> None:
    """Everything that grows is allowed to here, so that every reader is held by its own bound."""
    made = {bomb.name: bomb for bomb in BOMBS if bomb.name not in ("prefix.parquet", "page.parquet", "entries.parquet")}
    for name, bomb in made.items():
        bomb.make(tmp_path / name)
    bombs.one_entry(tmp_path / "entry.parquet", rows=100)
    # The largest document there may be, with a character in each part of it that makes Python take 4 bytes for all.
    wide = ("\U0001f40b" + "whale " * 20_000) * 120
    write_jsonl(tmp_path / "wide.jsonl", [wide])
    write_jsonl(tmp_path / "z.jsonl", ["the rest"])
    inputs = [str(tmp_path / name) for name in [*made, "wide.jsonl", "z.jsonl"]]
    options = ["--skip-bad", "--max-growth", "10000000", "--json", "--out", str(tmp_path / "out")]
    done = subprocess.run([sys.executable, "-c", LARGEST, *inputs, *options], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    summary, largest = done.stdout.rsplit("}", 1)
    assert int(largest) < process_bytes(Reading())
    skipped = json.loads(summary + "}")["skipped"]
    assert {reason: entry["count"] for reason, entry in skipped.items()} == {
        "broken file": 3,
        "crashes its reader": 1,
        "record too long": 104,
        "takes too much memory": 1,
    }
    assert read_texts(tmp_path / "out") == [wide, "the rest"]


def test_the_formula_is_a_few_hundred_megabytes_and_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert process_bytes(Reading()) < 900 * MIB
    assert process_bytes(Reading(max_document_mb=64)) - process_bytes(Reading()) == 20 * 48 * MIB
    assert process_bytes(Reading(buffer_mb=256)) - process_bytes(Reading()) == 2 * 128 * MIB
    with pytest.raises(SystemExit):
        main(["data", "prepare", "--help"])
    assert FORMULA in " ".join(capsys.readouterr().out.split())
    write_jsonl(tmp_path / "a.jsonl", ["whale"])
    assert main(["data", "prepare", str(tmp_path / "a.jsonl"), "--out", str(tmp_path / "out"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["work"]["bound_bytes"] == peak_bytes(Reading(), 0, 1, 1)


def test_a_process_that_is_held_gets_no_more() -> None:
    ask = (
        "from shoal.data.prepare.memory_limit import hold_to; hold_to(600 << 20)\n"
        "try: bytearray(1 << 30)\nexcept MemoryError: print('none')"
    )
    assert subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True).stdout == "none\n"


def swap_after_planning(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    """The file is good when it is looked at, and crashes its reader when it is read."""
    planned = data_set.plan_units

    def plan_then_swap(*arguments: object) -> object:
        found = planned(*arguments)  # type: ignore[arg-type]
        bombs.deep_schema(path)
        return found

    monkeypatch.setattr(data_set, "plan_units", plan_then_swap)


def test_a_worker_that_crashes_is_one_sentence_that_names_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    for name in ("a", "b", "c"):
        pq.write_table(pa.table({"text": [f"text {name}"]}), tmp_path / f"{name}.parquet")
    swap_after_planning(monkeypatch, tmp_path / "b.parquet")
    arguments = ["data", "prepare", str(tmp_path / "*.parquet"), "--json", "--out"]
    assert main([*arguments, str(tmp_path / "out")]) == 78
    err = capsys.readouterr().err
    assert f"{tmp_path}/b.parquet makes the process that reads it crash (SIGSEGV)" in err
    assert len(err.splitlines()) == 1
    pq.write_table(pa.table({"text": ["text b"]}), tmp_path / "b.parquet")
    assert main([*arguments, str(tmp_path / "skipping"), "--skip-bad"]) == 0
    skipped = json.loads(capsys.readouterr().out)["skipped"]
    assert skipped == {"crashes its reader": {"count": 1, "first": f"{tmp_path}/b.parquet"}}
    assert read_texts(tmp_path / "skipping") == ["text a", "text c"]


def blocks_of(data: bytes, packing: str, block: int = MIB) -> list[bytes]:
    blocks = (data[i : i + block] for i in range(0, len(data), block))
    return list(unpacked(blocks, packing, Growth(len(data), len(data), 1 << 20), 128 * MIB))


def test_a_gzip_of_many_members_takes_time_in_proportion(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes are counted and not seconds: zlib copies what follows a member, so that a block of many members was copied
    once for each of them."""
    given, made = 0, zlib.decompressobj

    class Counting:
        def __init__(self, wbits: int) -> None:
            self.stream = made(wbits=wbits)

        def decompress(self, data: bytes, most: int) -> bytes:
            nonlocal given
            given += len(data)
            return self.stream.decompress(data, most)

        def __getattr__(self, name: str) -> object:
            return getattr(self.stream, name)

    data = gzip.compress(b"") * 20_000 + gzip.compress(b"end")
    monkeypatch.setattr(zlib, "decompressobj", Counting)
    assert blocks_of(data, "gz") == [b"end"]
    assert len(data) <= given < 300 * len(data)  # 204 times; it was 10,000 times


def test_what_is_unpacked_is_what_was_packed_however_it_is_cut() -> None:
    rng = random.Random(3)
    text = " ".join(make_texts(900)).encode()
    frames: dict[str, bytes] = {"gz": b"", "zst": b""}
    for begin in range(0, len(text), 30_000):
        part = text[begin : begin + 30_000]
        frames["gz"] += gzip.compress(part) + b"\0" * rng.choice([0, 512])
        size, check = bool(begin % 60_000), begin % 90_000 == 0
        frames["zst"] += zstandard.ZstdCompressor(write_content_size=size, write_checksum=check).compress(part)
        frames["zst"] += b"\x51\x2a\x4d\x18" + (5).to_bytes(4, "little") + b"notes"  # a frame to be skipped
    for packing, data in frames.items():
        for block in (11, 4096, MIB):
            assert b"".join(blocks_of(data, packing, block)) == text
        for cut in (*rng.sample(range(5, len(data) - 20), 20), len(data) - 14):
            with pytest.raises(Broken, match="truncated"):
                blocks_of(data[:cut].rstrip(b"\0") if packing == "gz" else data[:cut], packing)
    assert b"".join(blocks_of(NEWLINES, "zst")[:9]).strip(b"\n") == b""
    assert max(map(len, blocks_of(bombs.zstd_of(b"\n", 64 * MIB), "zst"))) <= 2 * MIB


def test_single_bytes_are_joined_before_they_are_kept() -> None:
    tiny = b"".join(zlib.compress(b"x", wbits=31) for _ in range(5000))
    assert blocks_of(tiny, "gz") == [b"x" * 5000]


@pytest.mark.parametrize("separator", [b"\n", b"--"])
def test_blank_lines_are_counted_and_passed_over(separator: bytes) -> None:
    rng = random.Random(5)
    for _ in range(300):
        text = b"".join(rng.choices([b"\n", b" ", b"a", b"--", b"\n\n\n"], k=60))
        cuts = sorted(rng.choices(range(len(text)), k=6))
        blocks = [text[i:j] for i, j in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        whole = text.split(separator)
        begins = [sum(len(r) + len(separator) for r in whole[:i]) for i in range(len(whole))]
        want = [(n, at, r) for n, (at, r) in enumerate(zip(begins, whole, strict=True), start=1) if r.strip()]
        got = [(n, at, r) for n, at, r in records(iter(blocks), separator, 1000) if r is None or r.strip()]
        assert got == want


def test_rows_at_once_go_by_what_they_may_hold() -> None:
    def once(*pages: Page, dictionary: int = 0) -> int:
        return rows_at_once([Pages(list(pages), dictionary)], 16 * MIB)

    assert once(Page(1000, 100, MIB, False)) == MOST_ROWS
    assert once(*[Page(1000, 100, MIB, False)] * 50) == MOST_ROWS  # two pages at most hold 512 rows
    assert once(*[Page(1, 100, MIB, False)] * 50) == 16
    assert once(Page(1000, 100, 500, True), dictionary=MIB) == 16
    assert once(Page(1000, 100, 500, True), dictionary=64 * MIB) == 1
    assert once(Page(1000, 100, 4 * MIB, True)) == 4
    assert once(*[Page(100, 10, 1000, False)] * 9, *[Page(2, 9, 8 * MIB, False)] * 3, Page(100, 9, 9, False)) == 2


def test_raising_a_limit_loses_no_finished_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_jsonl(tmp_path / "a.jsonl", ["whale"])
    arguments = ["data", "prepare", str(tmp_path / "a.jsonl"), "--out", str(tmp_path / "out")]
    assert main(arguments) == 0
    assert main([*arguments, "--max-document-mb", "64", "--buffer-mb", "512", "--max-growth", "7"]) == 0
    assert "already prepared" in capsys.readouterr().out


def test_values_of_a_line_are_counted_outside_of_its_texts() -> None:
    row = {"a": ["x,[{", "\\", 'q"[', 5], "b": {"c": ","}}
    data = json.dumps(row).encode()
    look_at_count(data, 3 + 3 + 1)  # two objects and a list, their commas
    with pytest.raises(BadValue, match="more than 6 values"):
        look_at_count(data, 6)
    look_at_count(json.dumps("," * 1000).encode(), 5)
