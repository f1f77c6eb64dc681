"""The live line: on a terminal one line that updates itself, elsewhere plain lines, and hardly any cost."""

from __future__ import annotations

import io
import os
import pty
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shoal.observe import console as console_module
from shoal.observe.console import Console
from shoal.observe.follow import Follower
from shoal.observe.status import status_of
from tests.journal.journals import crash_and_finish, make_run


def fastest_s(call: Callable[[], object], times: int = 500, repetitions: int = 10) -> float:
    """Seconds a call, of the best of several rounds: what the code costs, not what the neighbours cost."""
    rounds = []
    for _ in range(repetitions):
        began = time.perf_counter()
        for _ in range(times):
            call()
        rounds.append((time.perf_counter() - began) / times)
    return min(rounds)


def test_the_line_has_everything_and_names_the_convention(tmp_path: Path) -> None:
    story = make_run(tmp_path).open().start(peak_flops=1e11).steps(40)
    console = Console(200, io.StringIO())
    for record in story.records:
        if record["kind"] == "start":
            console.start(record)
        elif record["kind"] == "step":
            console.step(record)
    line = console.line()
    assert line.startswith("step 40/200  loss 4.6")
    assert line.endswith("  4.1k tok/s  MFU 12.3% (causal)  ETA 1m20s  wait 4.0%  lr 1.0e-03")


def test_the_rate_is_that_of_the_last_steps_without_compilation_evaluation_and_saves(tmp_path: Path) -> None:
    """Three first steps of 20 s, an evaluation and a save between the others: none of it is in the rate or the ETA."""
    story = make_run(tmp_path).open().start(peak_flops=1e11)
    story.step_s = 20.0
    story.steps(3)
    story.step_s = 0.5
    story.steps(8).eval(30.0).checkpoint(30.0).steps(20)
    follower = Follower(story.run_dir, 200, io.StringIO())
    follower.poll()
    line = follower.console.line()
    assert "  4.1k tok/s  MFU 12.3% (causal)  ETA 1m30s" in line
    assert status_of(story.run_dir).tokens_per_s == pytest.approx(4096)


def test_the_first_steps_alone_say_as_much_as_the_newest_of_them(tmp_path: Path) -> None:
    story = make_run(tmp_path).open().start()
    story.step_s = 20.0
    story.steps(1)
    story.step_s = 0.5
    story.steps(2)
    assert status_of(story.run_dir).tokens_per_s == pytest.approx(4096)


def test_eighty_columns_hold_a_long_run_up_to_its_eta_and_nothing_is_cut_in_the_middle() -> None:
    console = Console(100_000, io.StringIO())
    console.start({"peak_flops": 1e15, "world": 1})
    flops = 3.667e9 * 123_000
    step = {
        "step": 12345,
        "flops": flops,
        "loss": 2.7253,
        "lr": 1.61e-4,
        "tokens": 123_000,
        "begin": 0.0,
        "t": 1.0,
        "time": {},
    }
    console.step(step)
    wanted = "step 12345/100000  loss 2.7253  123k tok/s  MFU 45.1% (causal)  ETA 24h20m"
    assert console.line(79) == wanted
    assert console.line(len(wanted) + len("  wait 0.0%")) == wanted + "  wait 0.0%"
    assert console.line() == wanted + "  wait 0.0%  lr 1.6e-04"
    console.start({"peak_flops": None})
    console.step(step)
    assert console.line(79) == wanted.replace("  MFU 45.1% (causal)", "") + "  wait 0.0%  lr 1.6e-04"
    assert console.line(7) == "step 12"


def test_without_a_known_peak_mfu_is_left_out(tmp_path: Path) -> None:
    story = make_run(tmp_path).open().start().steps(3)
    console = Console(None, io.StringIO())
    console.step(story.records[-1])
    assert "MFU" not in console.line()
    assert "ETA" not in console.line()


def test_away_from_a_terminal_a_plain_line_comes_now_and_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    story = make_run(tmp_path).open().start().steps(100)
    out = io.StringIO()
    console = Console(200, out)
    steps = [r for r in story.records if r["kind"] == "step"]
    for record in steps:
        console.step(record)
    console.say("something happened")
    console.close()
    lines = out.getvalue().splitlines()
    assert [line.split()[1] for line in lines] == ["1/200", "happened", "100/200"]
    assert "\x1b" not in out.getvalue()
    monkeypatch.setattr(console_module, "PLAIN_EVERY_S", 0.0)
    out.truncate(0)
    for record in steps:
        console.step(record)
    assert len(out.getvalue().splitlines()) == 100


def read_all(master: int) -> Iterator[bytes]:
    while True:
        try:
            yield os.read(master, 10_000)
        except OSError:  # how a pseudo-terminal says that its other end was closed
            return


def test_on_a_terminal_the_line_updates_itself_and_messages_go_above_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr(console_module, "REDRAW_EVERY_S", 0.0)
    story = make_run(tmp_path).open().start().steps(3)
    master, slave = pty.openpty()
    with os.fdopen(slave, "w") as terminal:
        console = Console(200, terminal)
        for record in story.records[-3:]:
            console.step(record)
        console.say("checkpoint saved")
        console.close()
    seen = b"".join(read_all(master)).decode()
    os.close(master)
    assert seen.count("\n") == 2  # the message, and the end of the last line
    screen = [line.split("\r\x1b[2K")[-1] for line in seen.replace("\r\n", "\n").split("\n")]
    assert screen[0] == "checkpoint saved"
    assert screen[1].startswith("step 3/200")
    assert len(screen[1]) < 60


def test_a_step_costs_the_loop_next_to_nothing(tmp_path: Path) -> None:
    """It runs in the supervisor, yet on a small machine that shares the cores with the workers."""
    story = make_run(tmp_path).open().start().steps(2)
    console = Console(200, io.StringIO())
    console.step(story.records[-1])
    assert fastest_s(lambda: console.step(story.records[-1])) < 50e-6


def test_a_run_is_told_as_it_happens(tmp_path: Path) -> None:
    story = make_run(tmp_path)
    out = io.StringIO()
    follower = Follower(story.run_dir, 200, out)
    assert follower.poll() is False  # there is no journal yet
    story.open()
    story.write("decision", key="mesh.dp_shard", value=1, why="small enough to replicate (DDP)")
    story.start().steps(20).eval().checkpoint()
    assert follower.poll() is False
    story.write("warning", text="MLflow at http://x: connection refused")
    story.steps(25).failure().wait(1).start(at_step=20).steps(30)
    story.activity("checkpoint_failed", 0.1, error="the disk is full")
    story.write("stopping", signal="SIGINT")
    story.close("stopped", 143, "told to stop after step 30")
    story.write("exit", session=0)
    assert follower.poll() is True
    told = [line for line in out.getvalue().splitlines() if not line.startswith("step 1/")]
    assert told == [
        "training demo",
        "chose mesh.dp_shard = 1: small enough to replicate (DDP)",
        "attempt 0: 2 processes on cpu, 1M parameters in fp32, from the beginning",
        "step 20: evaluation loss 5.7283",
        "step 20: checkpoint saved (11.4 MiB in 0.4 s; training waited 400 ms)",
        "warning: MLflow at http://x: connection refused",
        "failure: rank 1: killed (ended by SIGKILL); restarting from step 100",
        "attempt 1: 2 processes on cpu, 1M parameters in fp32, from step 20",
        "step 30: checkpoint not saved: the disk is full",
        "told to stop (SIGINT): the state is saved first",
        told[-2],
        "stopped: told to stop after step 30",
    ]
    assert told[-2].startswith("step 30/200  loss")


def test_a_late_follower_tells_the_newest_session_or_only_what_comes(tmp_path: Path) -> None:
    story = crash_and_finish(make_run(tmp_path)).wait(100).open(resumed=True).start().steps(205)
    out, late = io.StringIO(), io.StringIO()
    Follower(story.run_dir, 200, out).poll()
    assert out.getvalue().splitlines()[0] == "resuming demo"
    follower = Follower(story.run_dir, 200, late, replay=False)
    follower.poll()
    assert late.getvalue() == ""
    story.eval()
    follower.poll()
    assert late.getvalue().startswith("step 205: evaluation loss")


def test_looking_when_nothing_happened_costs_nothing(tmp_path: Path) -> None:
    story = crash_and_finish(make_run(tmp_path))
    follower = Follower(story.run_dir, 200, io.StringIO())
    follower.poll()
    assert fastest_s(follower.poll) < 200e-6
