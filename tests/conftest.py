"""What all tests share: one thread a process, ears for Ctrl-C, a corner of the memory (tmpfs) that is gone after them.

`make test` runs them with `--apart` (tests/apart.py).
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator
from typing import Any

import pytest

# Before torch comes: its threads do not survive a fork, and a forked rank would wait for them for ever.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A shell starts what it puts into the background (`make test &`) deaf to Ctrl-C, and all that the tests start with it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


TOOK = pytest.StashKey[dict[str, Any]]()  # name of a file: durations.Took


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--apart", type=int, metavar="N", help="each file in a process of its own, N at a time")
    parser.addoption("--record", action="store_true", help="how long each took, into tests/durations.json")


def pytest_runtestloop(session: pytest.Session) -> bool | None:
    at_once, option = session.config.getoption("--apart"), session.config.option
    if option.record and not at_once:
        raise pytest.UsageError("--record needs --apart: what a file takes is seen from outside its process")
    # With a GPU in one process, as ever: forked from one that has asked the driver for it, none can use it.
    if not at_once or option.collectonly or session.testsfailed or os.path.exists("/dev/nvidiactl"):
        return None
    from tests.apart import run_apart

    session.config.stash[TOOK] = run_apart(session, at_once)
    return True


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """What was used of the machine, and by what most."""
    if not (took := config.stash.get(TOOK, {})):
        return
    from tests import durations

    cpu_s, wall_s = sum(t.cpu_s for t in took.values()), sum(t.wall_s for t in took.values())
    most = sorted(took, key=lambda name: -took[name].cpu_s)[:5]
    terminalreporter.write_line(f"{cpu_s:.0f} s of CPU time in files that took {wall_s:.0f} s; most of it in")
    for name in most:
        terminalreporter.write_line(f"  {took[name].cpu_s:6.1f} s in {took[name].wall_s:6.1f} s  {name}")
    if config.getoption("--record"):
        durations.record(took, config.rootpath)


@pytest.hookimpl(optionalhook=True)  # pytest-timeout's
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> bool | None:
    """A test's time is that of a quiet machine (tests/patience.py): what is merely slow is not ended."""
    if settings.method != "signal" or threading.current_thread() is not threading.main_thread():
        return None
    from pytest_timeout import timeout_sigalrm

    from tests.patience import Stopwatch

    watch = Stopwatch()

    def look(*_: object) -> None:
        __tracebackhide__ = True
        if (left_s := settings.timeout - watch.quiet_s()) > 0.01:
            signal.setitimer(signal.ITIMER_REAL, left_s)
        else:
            timeout_sigalrm(item, settings)

    def cancel() -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)

    item.cancel_timeout = cancel  # type: ignore[attr-defined]  # where pytest-timeout looks for it
    signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, settings.timeout)
    return True


@pytest.fixture(scope="session", autouse=True)
def own_memory() -> Iterator[None]:
    """Runs leave snapshots in RAM for their next start; those of killed runs must not stay there after the tests."""
    folder = tempfile.mkdtemp(prefix="shoal-tests-", dir=os.environ.get("SHOAL_MEMORY") or "/dev/shm")
    before, os.environ["SHOAL_MEMORY"] = os.environ.get("SHOAL_MEMORY"), folder
    yield
    shutil.rmtree(folder, ignore_errors=True)
    if before is None:
        del os.environ["SHOAL_MEMORY"]
    else:
        os.environ["SHOAL_MEMORY"] = before


@pytest.fixture(scope="module")
def warm_starts() -> Iterator[None]:
    """What the tests of a file start of Shoal, and what that starts, has nothing to import (tests/warm.py)."""
    from tests.warm import Warm, possible

    with pytest.MonkeyPatch.context() as patch:
        if possible():
            from shoal.checkpoint import persister  # noqa: F401  # imported here once, not by each that is started
            from shoal.train import worker  # noqa: F401
            from tests.ranks import _warm

            _warm()
            patch.setattr("subprocess.Popen", Warm)
        yield


@pytest.fixture(scope="module")
def kept_ranks() -> Iterator[None]:
    """The ranks that the tests of a file run on stay from one to the next (tests/kept_ranks.py)."""
    from tests.kept_ranks import kept

    with kept():
        yield


@pytest.fixture
def fresh_ranks(kept_ranks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """But not in this test: it leaves something behind in its ranks, or asks what a process does first."""
    monkeypatch.setattr("tests.ranks.keeper", None)
