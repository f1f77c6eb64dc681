"""Work in a child: its answer, or one clause about the limit that it went beyond."""

from __future__ import annotations

import os
import signal
import time

import pytest

from shoal.generate.limited import Allowance, Refused, limited

SMALL = Allowance(cpu_s=1, memory_bytes=64 << 20, answer_bytes=1000)


def test_the_answer_comes_whole() -> None:
    assert limited(lambda: b"x" * 1000, SMALL) == b"x" * 1000
    assert limited(lambda: b"", SMALL) == b""


def test_what_the_work_refuses_is_told() -> None:
    def work() -> bytes:
        raise Refused("it is odd")

    with pytest.raises(Refused, match=r"^it is odd$"):
        limited(work, SMALL)


def endless() -> bytes:
    while True:
        pass


def hungry() -> bytes:
    return bytes(bytearray(1 << 30))


def crash() -> bytes:
    os.kill(os.getpid(), signal.SIGSEGV)
    return b""


@pytest.mark.parametrize(
    ("work", "why"),
    [
        (endless, "more than 1 s"),
        (hungry, "more than 64 MiB of memory"),
        (lambda: b"x" * 2000, "more than 1,000 bytes"),
        (crash, "breaks down"),
        (lambda: 1 / 0, "breaks down"),
    ],
)
def test_a_limit_is_named(work: object, why: str) -> None:
    with pytest.raises(Refused, match=why):
        limited(work, SMALL)  # type: ignore[arg-type]


def test_what_never_answers_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Allowance, "wall_s", 0.2)
    with pytest.raises(Refused, match="more than 0 s"):
        limited(lambda: time.sleep(600) or b"", SMALL)  # type: ignore[func-returns-value]


def test_no_child_and_no_file_is_left_behind() -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        limited(lambda: b"a", SMALL)
    assert len(os.listdir("/proc/self/fd")) == before
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)
