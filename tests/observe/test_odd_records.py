"""A journal is a file that anybody can write to: what is no record is passed over, counted, and hides nothing."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path
from typing import Any

import pytest

from shoal.cli.main import main
from shoal.errors import SetupError
from shoal.guard.history import History
from shoal.journal.journal import Odd, records
from shoal.journal.rundir import RunDir, find_run, runs_in
from shoal.launch.price import Stated
from shoal.launch.why import answer
from shoal.observe.follow import Follower
from shoal.observe.prometheus import gauges, text
from shoal.observe.report import as_json, as_text, report
from shoal.observe.status import status_of, statuses
from shoal.track.events import Reader
from tests.journal.journals import Story, make_run
from tests.observe.islands import Fleet

NO_RECORDS = [
    *(b"null", b"12", b"[1]", b'"text"', b"{}", b"true", b"{", b"\xff\xfe", b"[" * 100_000, b'{"kind":"step"}'),
    *(
        b'{"v":1,"kind":7,"t":1.0}',
        b'{"v":1,"kind":"step","t":"now","step":1}',
        b'{"v":"1","kind":"step","t":1,"step":1}',
    ),
    *(b'{"v":1,"kind":"step","t":1e300,"step":1}', b'{"v":1,"kind":"step","t":NaN,"step":1}'),
    *(
        b'{"v":1,"kind":"step","t":1.0}',
        b'{"v":1,"kind":"step","t":1.0,"step":"7"}',
        b'{"v":1,"kind":"step","t":1,"step":-1}',
    ),
    b'{"v":1,"kind":"step","t":1.0,"step":' + b"9" * 400 + b"}",
    *(b'{"v":1,"kind":"epoch","t":1.0}', b'{"v":1,"kind":"warning","t":1.0,"text":[]}'),
]
BAD: list[Any] = [None, [], {}, "x", -1, 0, 1e308, 10**30, True, float("nan"), [None], {"a": []}]


def told_by_all(run_dir: RunDir) -> None:
    """Everything that is derived from a journal."""
    status = status_of(run_dir)
    found = report(run_dir, pictures=False)
    as_text(found)
    json.dumps(as_json(found))
    str(answer(status, None, records(run_dir.journal_file), Stated(2.0)))
    History.of(run_dir)
    Follower(run_dir, 200, stream=io.StringIO()).poll()
    text(run_dir.name, gauges(run_dir))
    reader = Reader(run_dir.journal_file)
    while reader.batch(1000):
        pass


def every_kind(workspace: Path) -> list[dict[str, Any]]:
    """A run with one record of each kind that readers reckon with, and all their fields."""
    story: Story = make_run(workspace)
    story.open().start(peak_flops=1e12).steps(4).eval().checkpoint(1.0).failure().start(2).steps(3)
    t, who = story.t, {"attempt": 1, "rank": 0}
    more = [
        {"kind": "open", "session": 1, "began": t - 1, "resumed": True},
        {"kind": "decision", "key": "train.precision", "value": "fp32", "why": "usual"},
        {"kind": "skip", "attempt": 1, "step": 4, "begin": t, "batch": 3, "loss": "nan", "why": "x"},
        {"kind": "rewind", "attempt": 1, "step": 3, "to": 2, "begin": t, "batches": [3, 4], "why": "spike"},
        {"kind": "router", "step": 1, "attempt": 1, "first_layer": 0, "imbalance": [1.5, 2.0], "imbalance_mean": 1.2,
         "experts": 8, "dead_share": 0.0, "imbalance_max": 2.0, "ep": 2, "ep_imbalance_max": 1.5},
        {"kind": "traffic", "attempt": 1, "step": 3, "world": 2, "rows": [{"axis": "tp", "op": "all_reduce", "group": 2,
         "calls": 4, "bytes": 100, "most_calls": 2, "most_bytes": 50}]},
        {"kind": "checkpoint_failed", "attempt": 1, "step": 3, "begin": t, "error": "full"},
        {"kind": "uploaded", "attempt": 1, "step": 3, "bytes": 5, "seconds": 1.0, "where": "s3://b"},
        {"kind": "hang", **who, "step": 3, "phase": "forward", "seconds": 9.0, "evidence": "x", "stack": ["a"],
         "others": [], "stacks": None, "action": "restart"},
        {"kind": "straggler", **who, "phase": "data", "own_s": 0.4, "usual_s": 0.1, "step_s": 0.5, "steps": 9},
        {"kind": "silent-corruption", **who, "step": 3, "begin": t, "batch": 2, "ranks": [0, 1], "results": []},
        {"kind": "warning", "text": "odd"},
        {"kind": "stopping", "signal": "SIGTERM"},
        {"kind": "finished", "attempt": 1, "step": 3, "digest": "ab"},
        {"kind": "ended", "island": 0, "agent": 5, "exit_code": 0},
        {"kind": "leaving", "island": 0, "signal": "SIGTERM"},
        {"kind": "step", "attempt": 1, "step": 4, "begin": t, "tokens": 5, "loss": 1.0, "expert_imbalance": 1.5,
         "expert_dead": 0.1, "grad_norm": 1.0, "lr": 0.1, "time": {"data_s": 0.1}},
        {"kind": "close", "session": 1, "status": "failed", "exit_code": 75, "reason": "lost"},
        {"kind": "exit", "session": 1},
    ]  # fmt: skip
    fleet = (
        Fleet().open().take(2).failure(1, at=1006.0).begin_epoch({"1": "lost"}).take(2).begin_epoch({}, (1,)).take(1)
    )
    return story.records + [{"v": 1, "t": t, **one} for one in more] + fleet.records


def write(run_dir: RunDir, told: list[dict[str, Any]]) -> None:
    run_dir.journal_file.write_text("".join(json.dumps(r) + "\n" for r in told))


def test_every_record_that_shoal_writes_is_one(tmp_path: Path) -> None:
    told, odd = every_kind(tmp_path), Odd()
    run_dir = RunDir.of("demo", tmp_path)
    write(run_dir, told)
    assert len(records(run_dir.journal_file, odd)) == len(told), odd
    told_by_all(run_dir)


@pytest.mark.parametrize("value", [*BAD, "absent"], ids=repr)
def test_no_view_breaks_on_a_field_of_the_wrong_type(tmp_path: Path, value: Any) -> None:
    """The n-th field of every second record is missing or wrong, for every n."""
    told = every_kind(tmp_path)
    run_dir = RunDir.of("demo", tmp_path)
    for n in range(max(map(len, told))):
        for odd_ones in (0, 1):
            changed = [dict(r) for r in told]
            for record in changed[odd_ones::2]:
                if name := next(iter(list(record)[n : n + 1]), None):
                    record.pop(name) if value == "absent" else record.update({name: value})
            write(run_dir, changed)
            told_by_all(run_dir)


def test_what_is_no_record_is_counted_and_said_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    story = make_run(tmp_path).open().start().steps(3).close()
    path = story.run_dir.journal_file
    whole, good = path.read_bytes(), records(path)
    path.write_bytes(b"".join(line + b"\n" for line in NO_RECORDS) + whole)
    odd = Odd()
    assert records(path, odd) == good
    assert (odd.count, odd.first_byte) == (len(NO_RECORDS), 0)
    for words in (["ps", "demo"], ["report", "demo", "--no-png"]):
        assert main([*words, "--workspace", str(tmp_path)]) == 0
        out, err = capsys.readouterr()
        assert (out + err).count(f"{len(NO_RECORDS)} lines are no records (the first at byte 0)") == 1
        assert "defect" not in out + err


def test_a_line_that_does_not_end_is_not_read_into_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.journal.journal.MOST_LINE_BYTES", 300)
    path = tmp_path / "journal.jsonl"
    good = b'{"v":1,"kind":"warning","t":1.0,"text":"after"}\n'
    path.write_bytes(b"x" * 1000 + b"\n" + good)
    odd = Odd()
    assert [r["text"] for r in records(path, odd)] == ["after"]
    assert odd.count == 1


def test_one_damaged_run_hides_no_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a", "b", "c", "d"):
        make_run(tmp_path, name).open().start().steps(2).close()
    journal = RunDir.of("a", tmp_path).journal_file
    for at in range(0, len(journal.read_bytes()), 7):  # one bit at a time
        before = journal.read_bytes()
        journal.write_bytes(before[:at] + bytes([before[at] ^ 8]) + before[at + 1 :])
        assert {"b", "c", "d"} <= {s.name for s in statuses(tmp_path)}
        journal.write_bytes(before)
    RunDir.of("b", tmp_path).spec_file.write_bytes(b"\xff: [\n")
    RunDir.of("c", tmp_path).journal_file.unlink()
    os.mkfifo(RunDir.of("c", tmp_path).journal_file)
    pid_file = RunDir.of("d", tmp_path).pid_file
    os.mkfifo(pid_file)
    assert [run.name for run in runs_in(tmp_path)] == ["a", "b", "d"]
    assert main(["ps", "--workspace", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert all(f"\n{name} " in out for name in ("a", "b", "c", "d"))
    assert "damaged: journal.jsonl: is a FIFO, where a file should be" in out
    with pytest.raises(SetupError, match=r"run 'c' is damaged: .*journal\.jsonl is a FIFO"):
        find_run("c", tmp_path)
    with pytest.raises(SetupError, match="a FIFO, where a file should be"):
        records(RunDir.of("c", tmp_path).journal_file)
