"""The GPU suite's own bookkeeping: what fails is told by its last words, what hangs is ended, the rest goes on."""

from __future__ import annotations

import json
import os
import stat
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.gpu import suite
from tests.gpu.crew import Crew, Failed, Task
from tests.gpu.mps import mps
from tests.gpu.suite import PARTS, Part, chosen, files_of, main, run_part
from tests.gpu.table import Row, summary, table
from tests.patience import until

HOLDS = "def test_holds(record_property):\n    record_property('told', 'loss 1e-6')\n"
BROKEN = """
import pytest
from tests.gpu.crew import Failed

def test_fails():
    raise Failed("mesh: rank 1 KeyError: 'the cause' [exception, exit code 75]\\n--- a log\\nof many lines")

def test_is_skipped():
    pytest.skip("torch 2.11 has no zbv")
"""
HANGS = """
import subprocess, sys, time

def test_before():
    pass

def test_hangs():
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", {mark!r}], process_group=0)
    time.sleep(600)

def test_after():
    pass
"""


class When(float):
    """A limit that is over as soon as something has happened, however slow this machine is."""

    def __new__(cls, happened: Callable[[], bool]) -> When:
        self = super().__new__(cls, 0.0)
        self.happened = happened
        return self

    def __gt__(self, elapsed_s: object) -> bool:
        return not self.happened()

    def __lt__(self, elapsed_s: object) -> bool:
        return self.happened()


def part(folder: Path, **files: str) -> Part:
    for name, text in files.items():
        (folder / f"test_{name}.py").write_text(textwrap.dedent(text))
    return Part("any", "tests of a test", tuple(str(folder / f"test_{name}.py") for name in files), 60)


def outcomes(rows: list[Row]) -> dict[str, tuple[str, str]]:
    return {row.test.rpartition("::test_")[2]: (row.outcome, row.words) for row in rows}


def test_a_failing_test_is_told_by_the_exception_of_the_worker(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    alone(part(tmp_path, good=HOLDS, bad=BROKEN), monkeypatch)
    assert main(["--device", "cpu", "--out", str(tmp_path / "out")]) == 1
    (told,) = json.loads((tmp_path / "out" / "suite.json").read_text())["parts"]
    rows = [Row(**row) for row in told["rows"]]
    words = "mesh: rank 1 KeyError: 'the cause' [exception, exit code 75]"
    assert outcomes(rows) == {
        "holds": ("passed", ""),
        "fails": ("failed", words),
        "is_skipped": ("skipped", "torch 2.11 has no zbv"),
    }
    said = capsys.readouterr().out
    assert all(row.line() in said for row in rows), "each was said as it came"
    assert "holds: loss 1e-6" in said
    for text in (said, (tmp_path / "out" / "table.txt").read_text()):
        assert "2 of 3 hold, 1 failed" in text
        assert text.count(words) == 2, "in its place, and at the end"


def alone(only: Part, monkeypatch: pytest.MonkeyPatch) -> None:
    """The suite has this part."""
    monkeypatch.setattr(suite, "chosen", lambda names: [only])
    monkeypatch.setattr(suite, "machine", lambda device: "a machine")


def test_a_part_that_hangs_is_ended_with_all_it_started_and_its_tests_are_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suite, "GRACE_S", 2.0)
    hanging = part(tmp_path, hangs=HANGS.format(mark=str(tmp_path)))
    limit_s = When(lambda: _lives(str(tmp_path)))
    told = run_part(hanging, "cpu", limit_s, tmp_path / "logs", lambda row: None)
    assert outcomes(told.rows) == {
        "before": ("passed", ""),
        "hangs": ("failed", "it was in it when the part was ended after 0 s"),
        "after": ("failed", "not reached: the part was ended after 0 s"),
    }
    until(lambda: not _lives(str(tmp_path)))


def _lives(mark: str) -> bool:
    """A process that was given this word."""
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = file.read_bytes().split(b"\0")
        except OSError:
            continue
        if mark.encode() in words:
            return True
    return False


def test_a_part_that_cannot_begin_is_told(tmp_path: Path) -> None:
    told = run_part(part(tmp_path, broken="import there_is_none"), "cpu", 60, tmp_path / "logs", lambda row: None)
    assert [row.outcome for row in told.rows] == ["failed"]
    assert "there_is_none" in told.rows[0].words


def test_parts_are_chosen_by_name_and_every_file_belongs_to_one() -> None:
    assert [p.name for p in chosen("drills, matrix")] == ["matrix", "drills"]
    assert chosen("") == list(PARTS)
    with pytest.raises(SystemExit, match="no part 'drill': did you mean drills"):
        chosen("drill")
    here = {str(file) for file in (Path(__file__).parent / "gpu").glob("test_*.py")}
    assert {file for p in PARTS for file in files_of(p)} == here


def test_what_comes_after_the_time_for_all_is_told_as_not_begun(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    alone(part(tmp_path, good=HOLDS), monkeypatch)
    assert main(["--minutes", "0", "--device", "cpu", "--out", str(tmp_path / "out")]) == 1
    assert "not begun: 0 minutes were over" in capsys.readouterr().out


def test_the_table_says_what_failed_why_and_what_times_mean() -> None:
    rows = [
        Row("a", "x.py::test_it_holds[tp 2]", "passed", 1.0, "loss 1e-6", ""),
        Row("a", "y", "failed", 2.0, "", "E"),
    ]
    parts = [
        suite.Told("a", "meshes", "there is no daemon here", False, 9.0, 3.0, rows),
        suite.Told("b", "timed", "no", True, 9.0),
    ]
    text = table("one GPU", parts, 60.0)
    assert "pass     1.0 s  it holds [tp 2]: loss 1e-6" in text
    assert "without MPS: there is no daemon here (what is right, nothing of speed): 1 passed, 1 failed" in text
    assert "(its times mean something): nothing" in text
    assert summary(parts, 60.0).endswith("1 of 2 hold, 1 failed, in 1.0 minutes.\n  a: FAIL     2.0 s  y: E\n")


def command(code: str) -> tuple[list[str], dict[str, str]]:
    return [sys.executable, "-c", textwrap.dedent(code)], {}


@pytest.fixture
def crew(tmp_path: Path) -> Crew:
    crew = Crew(tmp_path / "logs", room=4)
    yield crew
    crew.close()


def test_a_crew_names_the_process_that_began_it_and_ends_its_peers(crew: Crew) -> None:
    lost = "import sys; sys.exit('RuntimeError: [gloo] Connection closed by peer')"
    waits = "import time; time.sleep(600)"
    crew.add(Task("pair", [command(lost), command("raise KeyError('the cause')"), command(waits)], ranks=3))
    crew.add(Task("other", [command("print(7)")]))
    with pytest.raises(Failed, match=r"^pair: rank 1 KeyError: 'the cause' \[exception, exit code 1\]"):
        crew.done("pair")
    assert crew.done("other") == "7\n", "the others go on"


def test_a_crew_ends_what_outlives_its_limit_and_says_where_it_stood(crew: Crew, tmp_path: Path) -> None:
    ready, file = tmp_path / "ready", tmp_path / "stuck.py"
    stuck = f"""
        import faulthandler, pathlib, signal, time
        faulthandler.register(signal.SIGUSR1, all_threads=True)
        def waits_for_ever():
            pathlib.Path({str(ready)!r}).touch()
            time.sleep(600)
        waits_for_ever()
    """
    file.write_text(textwrap.dedent(stuck))
    limit_s = When(ready.exists)
    crew.add(Task("stuck", [([sys.executable, str(file)], {})], limit_s=limit_s, stacks=True))
    with pytest.raises(Failed, match=r"^stuck: ended after 0 s, rank 0 in .*/stuck.py:\d waits_for_ever"):
        crew.done("stuck")


def test_a_crew_fills_its_room_and_no_more(tmp_path: Path) -> None:
    crew = Crew(tmp_path / "logs", room=4, gpus=2)
    code = f"""
        import os, pathlib, sys, time
        here = pathlib.Path({str(tmp_path)!r})
        (here / f"in-{{sys.argv[1]}}").touch()
        print(len(list(here.glob("in-*"))), os.environ["CUDA_VISIBLE_DEVICES"])
        while not (here / "go").exists():
            time.sleep(0.02)
        (here / f"in-{{sys.argv[1]}}").unlink()
    """
    for name, ranks in (("a", 3), ("b", 2), ("c", 1)):
        run, env = command(code)
        crew.add(Task(name, [([*run, name], env)], ranks))
    until(lambda: {p.name for p in tmp_path.glob("in-*")} == {"in-a", "in-c"})
    time.sleep(0.3)
    assert not (tmp_path / "in-b").exists(), "c fits beside a, b does not"
    (tmp_path / "go").touch()
    assert [crew.done(name).split()[1] for name in "abc"] == ["0,1", "1,0", "0"]
    crew.close()


def test_without_mps_it_says_why_and_with_it_the_daemon_is_told_to_quit(tmp_path: Path) -> None:
    with mps("there-is-no-such-control") as none:
        assert none.env == {}
        assert none.why_not == "there is no there-is-no-such-control here"
    control = tmp_path / "control"
    control.write_text(f'#!/bin/sh\necho "$@ $CUDA_MPS_PIPE_DIRECTORY" >> {tmp_path}/asked\ncat >> {tmp_path}/asked\n')
    control.chmod(control.stat().st_mode | stat.S_IEXEC)
    with mps(str(control), client="") as daemon:
        pipe = daemon.env["CUDA_MPS_PIPE_DIRECTORY"]
        assert os.path.isdir(pipe)
    assert (tmp_path / "asked").read_text() == f"-d {pipe}\n {pipe}\nquit\n"
    assert not os.path.exists(pipe)
    with mps(str(control), client="raise SystemExit('CUDA error 805')") as refused:
        assert refused.env == {}
        assert refused.why_not.endswith("CUDA error 805")
