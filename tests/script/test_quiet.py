"""When nothing comes from a script any more: a clock that is counted, and what the kernel would say, made up."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.guard.echo import MOST_BEHIND, MOST_LINE, Echo
from shoal.guard.hang import LONG_S, Hang
from shoal.guard.quiet import GAPS, LEAST_S, Quiet
from shoal.guard.signs import Families, Kernel, Signs, Threads, descendants
from shoal.journal.beat import Beat
from shoal.journal.pulse_file import Sample

USER, WAITS = ("train.py:3 load", "train.py:9 <module>"), ("torch/distributed/c10d_logger.py:83 wrapper",)


class MadeUp(Kernel):
    def __init__(self) -> None:
        super().__init__()
        self.cpu_s, self.io_bytes, self.state = 0.0, 0, "S"

    def threads(self, rank: int, pid: int) -> Threads:
        return Threads(self.cpu_s, self.cpu_s)

    def signs(self, rank: int, pid: int) -> Signs:
        return Signs(self.state, self.io_bytes)


class Stacks:
    def __init__(self, *stacks: tuple[str, ...]) -> None:
        self._stacks = stacks

    def beat(self, rank: int) -> Beat | None:
        return None

    def sample(self, rank: int) -> Sample | None:
        return Sample(1e9, self._stacks[rank]) if self._stacks else None


class Group:
    """Two ranks, watched twice a second."""

    def __init__(self, folder: Path, patience: str, *stacks: tuple[str, ...]) -> None:
        self.kernel, self.log, self.now = MadeUp(), folder / "rank-0.log", 100.0
        self.log.touch()
        logs = {0: self.log, 1: folder / "rank-1.log"}
        self.quiet = Quiet({0: 10, 1: 11}, Stacks(*stacks), self.kernel, logs, patience)

    def wait(self, seconds: float) -> Hang | None:
        """The first that is told, if one is."""
        for _ in range(int(seconds * 2)):
            self.now += 0.5
            if (found := self.quiet.verdict(self.now)) is not None:
                return found
        return None

    def print(self) -> None:
        with open(self.log, "a") as log:
            log.write("step\n")


def test_nothing_for_as_long_as_the_run_file_says_is_a_hang(tmp_path: Path) -> None:
    group = Group(tmp_path, "20 s", WAITS, USER)
    found = group.wait(25)
    assert found is not None
    assert (found.rank, found.stack, found.works) == (1, USER, False)
    assert found.evidence.startswith(
        "no CPU time, no reading or writing and no log line for 20 s at train.py:3 load; it"
    )


def test_without_stacks_or_with_several_suspects_that_is_said(tmp_path: Path) -> None:
    for stacks, said in (
        ((), "nobody knows where its ranks are"),
        ((USER, USER), "several ranks are in no collective"),
    ):
        found = Group(tmp_path, "5 s", *stacks).wait(10)
        assert found is not None
        assert said in found.evidence


@pytest.mark.parametrize("sign", ["cpu", "io", "log", "stopped"])
def test_any_sign_of_life_is_one(tmp_path: Path, sign: str) -> None:
    group = Group(tmp_path, "20 s")
    for _ in range(10):
        assert group.wait(15) is None
        if sign == "cpu":
            group.kernel.cpu_s += 0.5
        elif sign == "io":
            group.kernel.io_bytes += 10_000
        elif sign == "log":
            group.print()
        else:  # which is told by another watch
            group.kernel.state = "T"
    group.kernel.state = "S"
    assert group.wait(25) is not None


def test_by_itself_it_goes_by_the_time_between_log_lines(tmp_path: Path) -> None:
    group = Group(tmp_path, "auto", USER, USER)
    assert group.wait(LEAST_S * 10) is None  # nobody knows how often it prints
    for _ in range(8):
        group.print()
        assert group.wait(30) is None
    found = group.wait(LONG_S)
    assert found is not None
    assert found.seconds == pytest.approx(GAPS * 30, abs=20)


def test_a_machine_that_stood_still_has_made_nobody_hang(tmp_path: Path) -> None:
    group = Group(tmp_path, "20 s")
    group.wait(3)
    group.now += 3600
    assert group.wait(10) is None


def test_a_process_is_seen_with_its_children(tmp_path: Path) -> None:
    import os
    import subprocess
    import sys

    child = subprocess.Popen([sys.executable, "-S", "-c", "print(1, flush=True)\nwhile True: pass"], stdout=-1)
    try:
        assert child.stdout is not None
        child.stdout.readline()
        assert child.pid in descendants(os.getpid())
        kernel = Families()
        before = kernel.threads(0, os.getpid())
        own = Kernel().threads(0, os.getpid())
        while (after := kernel.threads(0, os.getpid())).worked_s - before.worked_s < 0.3:
            pass
        assert after.worked_s >= own.worked_s
    finally:
        child.kill()
        child.wait()
    assert child.stdout is not None
    child.stdout.close()


def test_what_is_printed_is_shown_as_it_comes_and_never_too_much(tmp_path: Path) -> None:
    log = tmp_path / "log"
    echo = Echo(log)
    assert list(echo.lines()) == []
    log.write_bytes("one\nbar 1%\rbar 2%\r\nh\u00e9".encode()[:-1])
    assert list(echo.lines()) == ["one", "bar 2%"]
    with open(log, "ab") as file:
        file.write("\u00e9".encode()[1:])
    assert list(echo.lines(last=True)) == ["h\u00e9"]
    with open(log, "ab") as file:
        file.write(b"x" * (3 * MOST_BEHIND) + b"\nend\n")
    shown = list(echo.lines(last=True))
    assert shown[-1] == "end"
    assert shown[0].startswith("… 11.9 MiB more, in ")
    assert max(map(len, shown)) <= MOST_LINE
    assert sum(map(len, shown)) < MOST_BEHIND
