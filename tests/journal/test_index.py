"""The index beside a journal: later readers read what is new, and nothing that happens to it changes an answer."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from shoal.errors import SetupError
from shoal.journal import index, reading
from shoal.journal.index import blocks_of, extend, index_file
from shoal.journal.journal import Odd, lines, read, records
from shoal.journal.keep import Keeper
from shoal.journal.reading import EVERY, Told
from shoal.observe.history import history
from shoal.observe.time_ledger import ledger
from tests.journal.journals import make_run
from tests.patience import limit

STEPS = 20_000
BLOCK = 100_000  # bytes


def step(number: int, t: float) -> str:
    laps = {"data_s": 0.01, "compute_s": 0.4}
    fields = {"attempt": 0, "step": number, "begin": t - 0.5, "tokens": 64, "loss": 3.0 - number / STEPS, "time": laps}
    return json.dumps({"v": 1, "kind": "step", "t": t, **fields}) + "\n"


def text(steps: int) -> str:
    parts = [json.dumps({"v": 1, "kind": "open", "t": 100.0, "session": 0}) + "\n"]
    for i in range(1, steps + 1):
        parts.append(step(i, 100.0 + i))
        if i % 500 == 0:
            parts.append(json.dumps({"kind": "eval", "t": 100.2 + i, "step": i, "attempt": 0, "loss": 2.0}) + "\n")
    return "".join(parts)


@pytest.fixture(scope="module")
def long_text() -> str:
    return text(STEPS)


@pytest.fixture
def short(tmp_path: Path) -> Path:
    """600 steps in blocks of 5,000 bytes."""
    path = tmp_path / "journal.jsonl"
    path.write_text(text(600))
    answer(path)
    assert index_file(path).stat().st_size > 20_000
    return path


def answer(path: Path, block_bytes: int = 5_000) -> dict[str, Any]:
    known = reading.told(path, block_bytes)
    return {
        "steps": known.column("step").tolist(),
        "t": known.column("t").tolist(),
        "laps": known.column("time.data_s").tolist(),
        "others": known.others(EVERY),
        "odd": (known.odd.count, known.odd.first_byte),
        "end": known.end,
    }


def plain(path: Path) -> dict[str, Any]:
    odd, end, steps, others = Odd(), 0, [], []
    for record, after in read(path, odd=odd):
        end = after
        if record["kind"] == "step":
            steps.append(record)
        else:
            others.append((len(steps), record))
    return {
        "steps": [r["step"] for r in steps],
        "t": [r["t"] for r in steps],
        "laps": [r["time"]["data_s"] for r in steps],
        "others": others,
        "odd": (odd.count, odd.first_byte),
        "end": end,
    }


@pytest.fixture
def looked_at(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Where each line begins that is read to build a block."""
    seen: list[int] = []

    def counting(*args: Any) -> Any:
        for found in lines(*args):
            seen.append(found[1])
            yield found

    monkeypatch.setattr(index, "lines", counting)
    return seen


def test_the_second_look_reads_what_is_new_and_no_more(tmp_path: Path, long_text: str, looked_at: list[int]) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_text(long_text)
    first = ledger(reading.told(path, BLOCK))
    assert len(looked_at) == long_text.count("\n")
    looked_at.clear()
    assert ledger(reading.told(path, BLOCK)) == first
    a_block = BLOCK // len(step(STEPS, 100.0)) + 1
    assert len(looked_at) <= a_block
    with open(path, "a") as f:
        f.writelines(step(STEPS + i, 100.0 + STEPS + i) for i in range(1, 1001))
    looked_at.clear()
    assert reading.told(path, BLOCK).rows == STEPS + 1000
    assert len(looked_at) <= a_block + 1000
    assert min(looked_at) > len(long_text) - BLOCK


def test_memory_does_not_grow_with_the_records(tmp_path: Path, long_text: str) -> None:
    """As dicts 20,000 steps take 30 MB. What a reader holds is a few columns of 8 bytes a step."""
    path = tmp_path / "journal.jsonl"
    path.write_text(long_text)
    ledger(reading.told(path, BLOCK))
    tracemalloc.start()
    try:
        found = reading.told(path, BLOCK)
        ledger(found)
        by_ledger = tracemalloc.get_traced_memory()[1]
        tracemalloc.reset_peak()
        history(found)
        by_history = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert by_ledger < 200 * STEPS
    assert by_history < 200 * STEPS


def test_memory_does_not_grow_where_there_is_no_index_yet(tmp_path: Path) -> None:
    peaks = []
    for steps in (500, 3000):
        path = tmp_path / f"{steps}.jsonl"
        path.write_text(text(steps))
        tracemalloc.start()
        try:
            reading.told(path, 10_000)
            peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
    assert peaks[1] - peaks[0] < 100 * 2500, "bytes a step; a dict of it takes 1,500"


def test_an_index_that_is_torn_anywhere_is_mended(short: Path) -> None:
    right, whole = plain(short), index_file(short).read_bytes()
    for end in range(0, len(whole), 997):
        index_file(short).write_bytes(whole[:end])
        assert answer(short) == right, end
        assert index_file(short).stat().st_size >= len(whole) - 10, "and is whole again"


def test_a_bit_that_flips_in_the_index_changes_nothing(short: Path) -> None:
    right, whole = plain(short), index_file(short).read_bytes()
    for place in range(0, len(whole), 613):
        broken = bytearray(whole)
        broken[place] ^= 0x40
        index_file(short).write_bytes(broken)
        assert answer(short) == right, place


@pytest.mark.parametrize("change", ["shorter", "other", "same size", "emptied", "grown and changed"])
def test_a_journal_that_was_changed_is_read_anew(short: Path, change: str) -> None:
    before = short.read_text()
    if change == "shorter":
        short.write_text(before[: len(before) // 2])
    elif change == "other":
        short.write_text(text(900).replace('"attempt": 0', '"attempt": 1'))
    elif change == "same size":  # in place, and its time says so
        place = before.index('"data_s": 0.01', len(before) // 2)
        short.write_text(before[:place] + '"data_s": 0.02' + before[place + 14 :])
        os.utime(short, ns=(1, 1))
    elif change == "emptied":
        short.write_text("")
    else:
        short.write_text(before.replace('"step": 300,', '"step": 30000,') + step(601, 701.0))
    assert answer(short) == plain(short)
    assert answer(short) == plain(short)


def test_an_index_of_another_version_or_something_else_in_its_place_is_no_hindrance(short: Path) -> None:
    right, place = plain(short), index_file(short)
    place.write_bytes(place.read_bytes().replace(b"index 2\n", b"index 9\n", 1))
    assert answer(short) == right
    assert place.read_bytes().startswith(index.MAGIC)
    place.unlink()
    for put in (place.mkdir, lambda: os.mkfifo(place), lambda: place.symlink_to(short)):
        put()
        assert answer(short) == right
        place.rmdir() if place.is_dir() else place.unlink()
    assert short.read_text() == text(600)


def test_where_nothing_can_be_written_the_answer_is_the_same(short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = plain(short)
    index_file(short).unlink()
    with monkeypatch.context() as patch:
        patch.setattr(index, "_locked", _refuse)
        assert answer(short) == right
        patch.setattr(index.tempfile, "TemporaryFile", _refuse)
        assert answer(short) == right
        assert extend(short, 5_000) == short.stat().st_size
        patch.setattr(index.os, "pwrite", _refuse)
        assert answer(short) == right
    assert not index_file(short).exists()


def _refuse(*args: Any, **more: Any) -> Any:
    raise PermissionError(13, "no")


def test_a_disk_that_fills_up_leaves_what_fits(short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = plain(short)
    index_file(short).unlink()
    room = [20_000]

    def write(fd: int, data: bytes, at: int, to: Any = os.pwrite) -> int:
        room[0] -= len(data)
        if room[0] < 0:
            return int(to(fd, data[:100], at))
        return int(to(fd, data, at))

    with monkeypatch.context() as patch:
        patch.setattr(index.os, "pwrite", write)
        assert answer(short) == right
    held = index_file(short).stat().st_size
    assert 0 < held < 20_000
    assert answer(short) == right
    assert index_file(short).stat().st_size > held


def test_a_reader_does_not_wait_for_another_one(short: Path) -> None:
    right = plain(short)
    os.truncate(index_file(short), 5_000)
    with open(index_file(short), "rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert answer(short) == right
        assert index_file(short).stat().st_size == 5_000
    assert answer(short) == right
    assert index_file(short).stat().st_size > 20_000


def test_readers_at_the_same_time_while_the_journal_grows(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_text(text(50))
    code = (
        "import sys; from pathlib import Path; from shoal.journal.reading import told\n"
        "for _ in range(10): known = told(Path(sys.argv[1]), 3000); s = known.column('step'); t = known.column('t')\n"
        "sys.exit(0 if s.tolist() == list(range(1, len(s) + 1)) and (t == 100 + s).all() else 1)"
    )
    readers = [subprocess.Popen([sys.executable, "-c", code, str(path)]) for _ in range(3)]
    at = 50
    with open(path, "a") as f:
        while any(reader.poll() is None for reader in readers) and at < 1_500:
            at += 1
            f.write(step(at, 100.0 + at))
            f.flush()
    assert [reader.wait(limit(60)) for reader in readers] == [0, 0, 0]
    assert answer(path) == plain(path)


def test_what_is_no_record_is_counted_with_an_index_as_without(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    odd = [
        "[1, 2]\n",
        '{"kind": 3}\n',
        "\n",
        "\xff\xfe\n",
        '{"kind": "step", "t": 1, "step": -1}\n',
        "x" * 9_000 + "\n",
    ]
    parts = text(300).splitlines(keepends=True)
    for i, line in enumerate(odd * 5):
        parts.insert(7 + 9 * i, line)
    path.write_text("".join(parts) + '{"kind": "step", "t": 1', encoding="latin-1")  # torn
    assert plain(path)["odd"][0] == 25
    for _ in range(2):
        assert answer(path, 3_000) == plain(path)
    with open(path, "a") as f:
        f.write("\n" + step(301, 401.0))
    assert answer(path, 3_000) == plain(path)


def test_a_newer_record_stops_every_reader(short: Path) -> None:
    with open(short, "a") as f:
        f.write('{"v": 2, "kind": "step", "t": 800.0, "step": 601}\n')
    for _ in range(2):
        with pytest.raises(SetupError, match="newer Shoal"):
            answer(short)


def test_a_record_that_is_gone_from_its_place_is_said_and_the_next_look_is_right(short: Path) -> None:
    """Changed in place and then appended to: neither size nor time tell."""
    short.write_text(short.read_text().replace('"kind": "eval"', '"kind": "evil"', 1) + step(601, 701.0))
    with pytest.raises(SetupError, match=r"was changed after journal\.index was made of it; try once more"):
        answer(short)
    assert answer(short) == plain(short)


def test_a_short_journal_has_no_index(tmp_path: Path) -> None:
    path = make_run(tmp_path).open().start().steps(200).close().run_dir.journal_file
    assert reading.told(path).rows == 200
    Keeper(path).look()
    assert not index_file(path).exists()


def test_the_keeper_does_each_block_once(tmp_path: Path, looked_at: list[int]) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_text("")
    keeper = Keeper(path, 2_000)
    with open(path, "a") as f:
        for i in range(1, 401):
            f.write(step(i, 100.0 + i))
            f.flush()
            keeper.look()
    assert len(blocks_of(path, 1 << 40)) > 20
    assert len(looked_at) < 3 * 400, "not all of it again and again"
    looked_at.clear()
    assert reading.told(path, 2_000).rows == 400
    assert len(looked_at) < 20
    keeper.look()
    path.unlink()
    keeper.look()  # nobody's trouble


def test_a_list_of_records_gives_the_same_view(short: Path) -> None:
    written = records(short)
    listed, indexed = Told.of(written), reading.told(short, 5_000)
    assert listed.others() == indexed.others(EVERY)
    for name in ("step", "t", "begin", "tokens", "loss", "attempt", "epoch", "time.compute_s"):
        assert listed.column(name, 17, 555).tolist() == pytest.approx(
            indexed.column(name, 17, 555).tolist(), nan_ok=True
        )
    assert listed.newest("eval") == indexed.newest("eval") == [r for r in written if r["kind"] == "eval"][-1]
