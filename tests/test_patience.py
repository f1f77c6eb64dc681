"""Limits that count seconds of a quiet machine: as they say when it is quiet, longer when it is busy."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.patience import Stopwatch, limit, until

ROOT = Path(__file__).parents[1]
SLEEPS = "import time\nimport pytest\n@pytest.mark.timeout(1)\ndef test_sleeps(): time.sleep(3)\n"
QUIET, BUSY = "0", "1e9"


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Processes that want to run, per core."""
    load = [0.0]
    monkeypatch.setattr(os, "getloadavg", lambda: (load[0] * len(os.sched_getaffinity(0)), 0.0, 0.0))
    return load


def test_a_second_is_a_second_when_quiet_and_less_when_busy(load: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    watch = Stopwatch()
    now += 10
    assert watch.quiet_s() == pytest.approx(10)
    load[0] = 20.0
    now += 10
    assert watch.quiet_s() == pytest.approx(10.5)
    load[0] = 0.5
    now += 1
    assert watch.quiet_s() == pytest.approx(11.5)


def test_a_limit_grows_with_the_load(load: list[float]) -> None:
    assert limit(15) == 15
    load[0] = 20.0
    assert limit(15) == 300


def test_until_returns_the_fact_and_fails_when_it_does_not_come(load: list[float]) -> None:
    facts = iter([0, "", "here"])
    assert until(lambda: next(facts), every_s=0) == "here"
    with pytest.raises(AssertionError, match=r"did not happen within 0.05 s of a quiet machine"):
        until(lambda: False, 0.05, every_s=0.01)


@pytest.mark.parametrize(("load_on_it", "code"), [(QUIET, 1), (BUSY, 0)])
def test_pytests_own_timeout_ends_what_hangs_and_not_what_is_slow(tmp_path: Path, load_on_it: str, code: int) -> None:
    (tmp_path / "test_it.py").write_text(f"import os\nos.getloadavg = lambda: ({load_on_it}, 0, 0)\n{SLEEPS}")
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-c", str(ROOT / "pyproject.toml")]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, "--rootdir", str(tmp_path), str(tmp_path)],
        env=env,
        capture_output=True,
        text=True,
        timeout=limit(60),
    )
    assert done.returncode == code, done.stdout
    assert ("Timeout (>1.0s)" in done.stdout) is bool(code)
