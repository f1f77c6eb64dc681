"""`shoal logs`: every rank's lines in one stream, and following goes on over a restart."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from shoal.cli.main import main
from shoal.observe import logs as logs_module
from tests.journal.journals import Story, make_run
from tests.patience import limit


def log(story: Story, attempt: int, rank: int, text: str, island: int | None = None) -> None:
    base = story.run_dir.logs if island is None else story.run_dir.logs / f"island-{island:03d}"
    folder = base / f"attempt-{attempt:03d}"
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / f"rank-{rank:05d}.log", "a") as f:
        f.write(text)


def logs(story: Story, capsys: pytest.CaptureFixture[str], *options: str) -> list[str]:
    assert main(["logs", "demo", *options, "--workspace", str(story.run_dir.workspace)]) == 0
    return capsys.readouterr().out.splitlines()


def test_ranks_are_merged_by_time_where_lines_have_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    story = make_run(tmp_path).open()
    log(story, 0, 0, "2026-11-15 10:00:01,500 one\n  its second line\n2026-11-15 10:00:03 three\n")
    log(story, 0, 1, "2026-11-15T10:00:02.000 two\nhalf a line")
    assert logs(story, capsys) == [
        "[0] 2026-11-15 10:00:01,500 one",
        "[0]   its second line",
        "[1] 2026-11-15T10:00:02.000 two",
        "[1] half a line",
        "[0] 2026-11-15 10:00:03 three",
    ]
    assert logs(story, capsys, "-n", "2")[0] == "[1] half a line"
    assert logs(story, capsys, "--rank", "1") == ["[1] 2026-11-15T10:00:02.000 two", "[1] half a line"]


def test_the_newest_attempt_is_meant_unless_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    story = make_run(tmp_path).open()
    for attempt in (0, 1, 10):
        log(story, attempt, 0, f"attempt {attempt}\n")
    assert logs(story, capsys) == ["[0] attempt 10"]
    assert logs(story, capsys, "--attempt", "1") == ["[0] attempt 1"]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--attempt", "7"], "run 'demo' has no attempt 7; it has 0 to 0."),
        (["--rank", "7"], "attempt 0 of run 'demo' has no rank 7; it has 0 to 1."),
        (["-n", "many"], "argument -n/--lines: invalid int value: 'many'; see `shoal logs --help`."),
    ],
)
def test_what_is_not_there_is_refused_with_what_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], sentence: str
) -> None:
    story = make_run(tmp_path).open()
    log(story, 0, 0, "a\n")
    log(story, 0, 1, "b\n")
    assert main(["logs", "demo", *options, "--workspace", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"shoal: {sentence}\n"


def test_following_goes_on_over_a_restart_and_ends_with_the_run(tmp_path: Path) -> None:
    story = make_run(tmp_path).open().start()
    log(story, 0, 0, "old 1\nold 2\nold 3\n")
    command = [sys.executable, "-m", "shoal", "logs", "demo", "-f", "-n", "2", "--workspace", str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"})
    killer = threading.Timer(60, process.kill)
    killer.start()
    out = process.stdout
    assert out is not None

    def next_line() -> str:
        return out.readline().rstrip("\n")

    assert [next_line(), next_line()] == ["[0] old 2", "[0] old 3"]
    log(story, 0, 0, "new, but not ")
    log(story, 0, 1, "a rank that spoke late\n")
    assert next_line() == "[1] a rank that spoke late"
    log(story, 0, 0, "whole\n")
    assert next_line() == "[0] new, but not whole"
    log(story, 0, 0, "last words without an end")
    log(story, 1, 0, "again\n")
    assert [next_line(), next_line()] == ["--- attempt 1 ---", "[0] again"]
    story.close()
    assert sorted([next_line(), next_line()]) == ["[0] last words without an end", "done: 0 steps are done"]
    assert process.wait(limit(30)) == 0
    killer.cancel()
    out.close()


def test_following_tells_how_the_run_goes_though_its_workers_are_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs_module, "POLL_EVERY_S", 0.01)
    story = make_run(tmp_path).open().start(peak_flops=1e11).steps(40).eval()
    log(story, 0, 0, "hello\n")
    lines = logs_module.follow(story.run_dir, None, None, 20)
    alone = logs_module.follow(story.run_dir, 0, None, 20)  # one rank: its log and nothing else
    assert [next(lines), next(alone)] == ["[0] hello", "[0] hello"]
    grow = threading.Timer(0.3, lambda: story.steps(60).eval().checkpoint())
    grow.start()
    told = [next(lines) for _ in range(3)]
    grow.join()
    # The first step at once and no other for ten seconds; what was before is not told again.
    assert told[0].startswith("step 41/200  loss ")
    assert "MFU 12" in told[0]
    assert [line.split("  ")[0] for line in told[1:]] == [
        f"step 60: evaluation loss {story.records[-2]['loss']:.4f}",
        "step 60: checkpoint saved (11.4 MiB in 0.4 s; training waited 400 ms)",
    ]
    story.failure()
    assert next(lines).startswith("failure: rank 1: killed")
    story.close("failed", 75, "gave up")
    rest = list(lines)
    assert rest[0].startswith("step 60/200")
    assert rest[1:] == ["failed: gave up"]
    assert list(alone) == []


def test_a_reader_that_leaves_is_no_error(tmp_path: Path) -> None:
    story = make_run(tmp_path).open()
    log(story, 0, 0, "line\n" * 200_000)
    command = f"{sys.executable} -m shoal logs demo --workspace {tmp_path} | head -1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=limit(60))
    assert done.stdout.splitlines() == ["[0] line", "0"]
    assert "Traceback" not in done.stderr


def test_islands_have_logs_of_their_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    story = make_run(tmp_path).open()
    log(story, 0, 0, "2026-11-15 10:00:02 zero\n", island=0)
    log(story, 0, 0, "2026-11-15 10:00:01 dead\n", island=1)
    log(story, 1, 0, "2026-11-15 10:00:03 again\n", island=1)
    assert logs(story, capsys) == ["[0.0] 2026-11-15 10:00:02 zero", "[1.0] 2026-11-15 10:00:03 again"]
    assert logs(story, capsys, "--island", "1", "--attempt", "0") == ["[1.0] 2026-11-15 10:00:01 dead"]
    assert main(["logs", "demo", "--island", "5", "--workspace", str(story.run_dir.workspace)]) == 2
    assert "has no island 5; it has 0 to 1." in capsys.readouterr().err


def test_a_line_without_an_end_is_shown_in_pieces_and_never_held_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a power cut a log may be gigabytes of zeros."""
    story = make_run(tmp_path).open()
    log(story, 0, 0, "first é\n" + "\0海" * 40 + "\nlast\n")
    monkeypatch.setattr(logs_module, "MOST_LINE_CHARS", 9)
    monkeypatch.setattr(logs_module, "BLOCK_BYTES", 7)  # within characters
    path = story.run_dir.logs / "attempt-000" / "rank-00000.log"
    for lines in (logs(story, capsys), list(logs_module.Reader("0", path, 0).new_lines(flush=True))):
        assert (lines[0], lines[-1]) == ("[0] first é", "[0] last")
        assert max(map(len, lines)) <= 9 + len("[0] ")
        assert "".join(line.removeprefix("[0] ") for line in lines[1:-1]) == "\0海" * 40
