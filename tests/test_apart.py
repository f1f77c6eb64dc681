"""Files of tests in processes of their own: what happens there is told here, and nothing of one reaches another."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.guard.fake import alive, until
from tests.patience import Stopwatch, limit

pytestmark = pytest.mark.skipif(os.path.exists("/dev/nvidiactl"), reason="with a GPU all is one process")

ROOT = Path(__file__).parents[1]
FIRST = """
import os, signal, threading, time, warnings
import pytest

@pytest.mark.parametrize("n", [1, 2])
def test_passes(n): warnings.warn(f"mind {n}")

def test_fails(): assert 1 + 1 == 3, "an odd sum"

def test_dies():
    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
    os.kill(os.getpid(), signal.SIGKILL)

def test_comes_after(): assert threading.active_count() == 1
"""
SECOND = """
import os, pathlib, sys, time
import pytest

@pytest.mark.alone
def test_alone(): assert pathlib.Path("met").exists()

def test_skipped(): pytest.skip("no such thing")

def test_meets():
    pathlib.Path("met").touch()
    assert "test_first" in sys.modules, "imported once, for all"
"""
ENDLESS = """
import os, pathlib, time
import pytest

@pytest.fixture
def place():
    yield pathlib.Path(str(os.getpid()))
    pathlib.Path(f"cleared-{os.getpid()}").touch()

def test(place):
    place.touch()
    time.sleep(600)
"""


def start(folder: Path, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-c", str(ROOT / "pyproject.toml")]
    command += ["--rootdir", str(folder), "--apart", "2", *options, str(folder)]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_what_happens_in_another_process_is_told_as_if_it_had_happened_here(tmp_path: Path) -> None:
    (tmp_path / "test_first.py").write_text(FIRST)
    (tmp_path / "test_second.py").write_text(SECOND)
    with start(tmp_path, "-rs") as process:
        out, _ = process.communicate(timeout=limit(120))
    assert process.returncode == 1, out
    assert re.search(r"2 failed, 5 passed, 1 skipped, ", out)
    assert "AssertionError: an odd sum" in out
    assert "the process of test_first.py died in this test (SIGKILL)" in out
    assert "no such thing" in out
    assert out.count("UserWarning: mind 1") == out.count("UserWarning: mind 2") == 1


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_ended_from_outside_it_leaves_nobody(tmp_path: Path, how: signal.Signals) -> None:
    for name in ("test_a.py", "test_b.py"):
        (tmp_path / name).write_text(ENDLESS)
    with start(tmp_path) as process:
        pids = until(lambda: len(found := [int(p.name) for p in tmp_path.glob("[0-9]*")]) == 2 and found, 60)
        watch = Stopwatch()
        for pid in [*pids, process.pid] if how == signal.SIGINT else [process.pid]:  # Ctrl-C reaches all
            os.kill(pid, how)
        process.communicate(timeout=limit(60))
    until(lambda: not any(map(alive, pids)))
    assert len(list(tmp_path.glob("cleared-*"))) == (2 if how == signal.SIGINT else 0)
    assert watch.quiet_s() < 60
