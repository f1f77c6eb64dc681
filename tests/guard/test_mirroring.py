"""The tracking mirror beside a run: started when tracking is on, waited for a little, never in the way."""

from __future__ import annotations

import signal
import sys

import pytest
from tests.guard.fake import FakeRun, alive, until

from shoal.guard import supervise as supervising
from shoal.journal.journal import records
from shoal.journal.tail import is_closed
from shoal.observe.time_ledger import ledger

# Follows the journal until it is closed, then takes so long, or until it is let go, and leaves as told.
FOLLOWS = """
import sys, time, pathlib, os
run = pathlib.Path(sys.argv[1]); (run / "mirror.pid").write_text(str(os.getpid()))
while '"kind":"close"' not in (run / "journal.jsonl").read_text(): time.sleep(0.02)
late = time.monotonic() + float(sys.argv[2])
while time.monotonic() < late and not (run / "go").exists(): time.sleep(0.02)
(run / "mirrored").touch(); sys.exit(int(sys.argv[3]))
"""


def tracked(fake: FakeRun) -> None:
    fake.plan(world=1, track={"mlflow": True})


def mirror(fake: FakeRun, late_s: float = 0.0, code: int = 0) -> list[str]:
    return [sys.executable, "-c", FOLLOWS, str(fake.run_dir.path), str(late_s), str(code)]


def assert_left_to_itself(fake: FakeRun) -> None:
    """It has not ended, and it does what is left to do."""
    assert not (fake.run_dir.path / "mirrored").exists()
    assert alive(int((fake.run_dir.path / "mirror.pid").read_text()))
    (fake.run_dir.path / "go").touch()
    until(lambda: (fake.run_dir.path / "mirrored").exists())


def test_the_mirror_is_waited_for_once_the_journal_is_closed(fake: FakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    tracked(fake)
    assert fake.supervise(mirror_command=mirror(fake, late_s=0.5)) == 0
    assert (fake.run_dir.path / "mirrored").exists()
    assert "tracking is behind" not in capsys.readouterr().err
    (close,), (left,) = fake.records("close"), fake.records("exit")
    assert left["t"] - close["t"] >= 0.5
    told = records(fake.run_dir.journal_file)
    assert ledger(told).total_us == round((left["t"] - told[0]["t"]) * 1e6), "the wait is a part of the run's time"
    assert is_closed(fake.run_dir.journal_file)


def test_a_slow_mirror_is_left_to_itself_and_said_once(
    fake: FakeRun, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervising, "MIRROR_WAIT_S", 0.3)
    tracked(fake)
    assert fake.supervise(mirror_command=mirror(fake, late_s=60)) == 0
    assert capsys.readouterr().err.count("tracking is behind; `shoal track sync demo ") == 1
    assert_left_to_itself(fake)


@pytest.mark.parametrize("command", [["sh", "-c", "exit 3"], ["/nowhere/mirror"]])
def test_a_mirror_that_fails_costs_the_run_nothing(
    fake: FakeRun, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    tracked(fake)
    assert fake.supervise(mirror_command=command) == 0
    assert "tracking is behind" in capsys.readouterr().err


def test_without_tracking_no_mirror_is_started(fake: FakeRun) -> None:
    fake.plan(world=1)
    assert fake.supervise(mirror_command=["touch", str(fake.run_dir.path / "started")]) == 0
    assert not (fake.run_dir.path / "started").exists()


def test_ctrl_c_does_not_reach_the_mirror_and_cuts_the_wait_for_it_short(fake: FakeRun) -> None:
    tracked(fake)
    process = fake.start(mirror_command=mirror(fake, late_s=60))
    until(lambda: fake.records("close"))
    process.send_signal(signal.SIGINT)
    assert process.wait(supervising.MIRROR_WAIT_S / 2) == 0
    assert_left_to_itself(fake)
