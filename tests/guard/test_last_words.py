"""A worker that ends by an exception is named by that exception, whatever it is: real processes, real logs."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.forked import fork
from tests.guard.fake import FakeRun

from shoal.errors import TRANSIENT, TransientError
from shoal.guard.classify import Failure, classify
from shoal.guard.workers import Death
from shoal.leaving import exit_code


class MuteError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text for you")


class OnFire(BaseException):
    """Neither an Exception nor called like one."""


def failure(log: Path, status: int) -> Failure:
    code = os.waitstatus_to_exitcode(status)
    exited, signalled = (None, -code) if code < 0 else (code, None)
    return classify(Death(0, 1, exited, signalled, told=False, t=time.time(), log=log))


def raised(e: BaseException) -> Callable[[], int]:
    def do() -> int:
        raise e

    return do


def chained() -> int:
    try:
        raise KeyError("the cause")
    except KeyError as e:
        raise OnFire("what it led to") from e


def deep() -> int:
    return 1 + deep()


# What it does, and the evidence that is reported of it.
KINDS: dict[str, tuple[Callable[[], int], str]] = {
    "without a text": (raised(StopIteration()), "StopIteration (test_last_words.py:"),
    "an iterator's end with a value": (raised(StopIteration(3)), "StopIteration: 3 (test_last_words.py:"),
    "an interrupt that no signal sent": (raised(KeyboardInterrupt()), "KeyboardInterrupt (test_last_words.py:"),
    "not called an error": (raised(OnFire("of its own kind")), "test_last_words.OnFire: of its own kind ("),
    "whose text fails": (raised(MuteError()), "test_last_words.MuteError: its text cannot be made ("),
    "an exit with a text": (raised(SystemExit("no such device")), "SystemExit: no such device ("),
    "an exit that looks like success": (raised(SystemExit(0)), "SystemExit: 0 ("),
    "a generator's end": (raised(GeneratorExit()), "GeneratorExit ("),
    "a long text": (raised(ValueError("x" * 1_000_000)), "ValueError: xxx"),
    "many lines": (raised(ValueError("first\n" + "more\n" * 500)), "ValueError: first ("),
    "a text that looks like a traceback": (
        raised(ValueError("worker said:\nTraceback (most recent call last):\n  File\nKeyError: 1\n" + "more\n" * 50)),
        "ValueError: worker said: (",
    ),
    "several at once": (raised(ExceptionGroup("both", [KeyError(1), ValueError(2)])), "ExceptionGroup: both"),
    "another's consequence": (chained, "test_last_words.OnFire: what it led to ("),
    "no end": (deep, "RecursionError: maximum recursion depth exceeded ("),
    "a known one": (raised(TransientError("the server is away.")), "the server is away."),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_report_names_the_exception(kind: str, tmp_path: Path) -> None:
    do, evidence = KINDS[kind]
    log = tmp_path / "rank.log"
    _, status = os.waitpid(fork(lambda: exit_code(do), log), 0)
    found = failure(log, status)
    assert found.cause == "exception", found
    assert found.evidence.replace("tests.guard.", "").startswith(evidence), found
    assert found.exit_code == TRANSIENT
    assert len(found.evidence) <= 400


def test_of_a_thread_as_well(tmp_path: Path) -> None:
    """The process may end any way after it: here by a library that gives up."""

    def do() -> int:
        threading.excepthook = threading.__excepthook__  # pytest has put its own there
        thread = threading.Thread(target=raised(OnFire("in a thread")))
        thread.start()
        thread.join()
        os._exit(1)

    log = tmp_path / "rank.log"
    _, status = os.waitpid(fork(lambda: exit_code(do), log), 0)
    found = failure(log, status)
    assert (found.cause, found.evidence) == ("exception", f"{__name__}.OnFire: in a thread")


PRINTED = {
    "torch puts the rank before it": (
        "[rank3]: Traceback (most recent call last):\n[rank3]:   File 'a.py', line 1, in f\n[rank3]:     f()\n"
        + "[rank3]:   File 'a.py', line 1, in f\n" * 30
        + "[rank3]: StopIteration\n",
        "StopIteration",
    ),
    "a group": (
        "  + Exception Group Traceback (most recent call last):\n  |   File 'a.py', line 1\n  | ExceptionGroup: two\n"
        "  +-+---------------- 1 ----------------\n    | Traceback (most recent call last):\n    |   File 'b.py'\n"
        "    | OnFire: inside\n    +------------------------------------\n",
        "OnFire: inside",
    ),
    "of a process of a data loader": (
        "Traceback (most recent call last):\n  File 'a.py', line 1\nRuntimeError: Caught OnFire in worker 0.\n"
        "Original Traceback (most recent call last):\n  File 'b.py', line 1\nOnFire: no such row\n",
        "OnFire: no such row",
    ),
}


@pytest.mark.parametrize("printed", PRINTED)
def test_what_others_print_of_an_exception_is_understood(printed: str, tmp_path: Path) -> None:
    text, evidence = PRINTED[printed]
    log = tmp_path / "rank.log"
    log.write_text("starting\n" + text + "a line that follows\n")
    assert failure(log, 1 << 8).evidence == evidence
    assert failure(log, 1 << 8).cause == "exception"


def test_a_worker_that_fails_before_there_is_a_journal_is_named_too(tmp_path: Path) -> None:
    """The real one: what it imports first is broken here."""
    (tmp_path / "torch.py").write_text("raise StopIteration\n")
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    with open(tmp_path / "rank.log", "wb") as log:
        command = [sys.executable, "-m", "shoal.train", "--worker", str(tmp_path / "runs/none")]
        code = subprocess.run(command, env=env, stdout=log, stderr=log).returncode
    found = failure(tmp_path / "rank.log", code << 8)
    assert (found.cause, found.evidence) == ("exception", "StopIteration (torch.py:1)")


def test_the_end_of_the_run_says_it(fake: FakeRun) -> None:
    fake.plan({"rank": 1, "step": 3, "do": "raise", "kind": "StopIteration", "text": ""}, guard={"restarts": 0})
    assert fake.supervise() == TRANSIENT
    (close,) = fake.records("close")
    assert "rank 1 failed (exception): StopIteration" in close["reason"]
    assert "without a word" not in close["reason"]
