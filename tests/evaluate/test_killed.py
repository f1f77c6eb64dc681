"""Killed at any place and started again, an evaluation leaves the same bytes."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest
import torch

from shoal.errors import DataError
from shoal.evaluate.answers import Answer, Answers, Head
from shoal.evaluate.ask import Asking, evaluated
from shoal.evaluate.model import Local
from shoal.evaluate.task_file import load_task
from shoal.generate.opened import Wanted, of_folder
from tests.evaluate import tiny
from tests.forked import fork

HEAD = Head("t", "a" * 64, "m", "b" * 64, "plain", 2)


def started(at: Path, out: Path) -> int:
    """A process that asks everything that is not answered yet."""

    def ask() -> int:
        torch.set_num_threads(1)
        model = Local(of_folder(at / "plain", Wanted("cpu", special=True)), batch=4)
        for name in ("choice_few_shot", "write", "rolling"):
            evaluated(load_task(at / "tasks" / f"{name}.yaml"), model, out, Asking(limit=12, group=3))
        return 0

    return fork(ask)


def ended(pid: int) -> int:
    """Its exit code; of one that was killed, the signal below 0."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def files_in(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.jsonl"))}


def test_killed_ten_times_it_leaves_the_same_bytes(tmp_path: Path) -> None:
    tiny.write_model(tmp_path / "plain", False)
    tiny.write_tasks(tmp_path / "tasks")
    assert ended(started(tmp_path, tmp_path / "whole")) == 0
    whole = files_in(tmp_path / "whole")
    assert len(whole) == 3
    size, draw = sum(map(len, whole.values())), random.Random(5)
    killed = 0
    for n in range(10):
        pid = started(tmp_path, tmp_path / "killed")
        # At another place each time: as soon as so many bytes are there.
        until = size * (n + draw.random()) / 10
        while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            if sum(map(len, files_in(tmp_path / "killed").values())) >= until:
                os.kill(pid, signal.SIGKILL)
                break
            time.sleep(0.001)
        killed += ended(pid) == -signal.SIGKILL
        last = max((tmp_path / "killed").glob("*.jsonl"), key=lambda path: path.stat().st_mtime_ns, default=None)
        if n % 2 and last is not None:  # and what a power cut tears off
            last.write_bytes(last.read_bytes()[: -draw.randint(1, 30)])
    assert killed >= 5
    assert ended(started(tmp_path, tmp_path / "killed")) == 0
    assert files_in(tmp_path / "killed") == whole


def test_a_torn_line_is_cut_away_and_its_question_asked_again(tmp_path: Path) -> None:
    rows = [Answer("0" * 63 + str(n), n, ((-1.5, True),)) for n in range(3)]
    with Answers(tmp_path, HEAD) as answers:
        answers.add(rows)
        path = answers.path
    whole = path.read_bytes()
    for cut in range(len(whole) - len(whole.splitlines()[-1]), len(whole)):
        path.write_bytes(whole[:cut])
        with Answers(tmp_path, HEAD) as answers:
            assert len(answers.done) == 2
            answers.add(rows)
        assert path.read_bytes() == whole


def test_a_file_of_other_weights_is_not_taken_for_these(tmp_path: Path) -> None:
    with Answers(tmp_path, HEAD) as answers:
        answers.add([Answer("0" * 64, 0, ((-1.0, False),))])
        path = answers.path
    other = Head("t", "a" * 64, "m", "c" * 64, "plain", 2)
    with Answers(tmp_path, other) as answers:
        assert not answers.done
        assert answers.path != path
    answers.path.unlink()
    path.rename(answers.path)
    with pytest.raises(DataError, match="model_digest"):
        Answers(tmp_path, other)


def test_two_evaluations_of_the_same_do_not_write_one_file(tmp_path: Path) -> None:
    with Answers(tmp_path, HEAD), pytest.raises(DataError, match="another evaluation"):
        Answers(tmp_path, HEAD)


def test_a_line_that_says_something_else_is_refused(tmp_path: Path) -> None:
    with Answers(tmp_path, HEAD) as answers:
        path = answers.path
    begin = path.read_bytes()
    for line in (
        b"{}",
        b"[]",
        b'{"question": 3, "number": 0, "text": "a"}',
        b'{"question": "x", "number": 0}',
        b"\xff",
    ):
        path.write_bytes(begin + line + b"\n")
        with pytest.raises(DataError, match="line 2 is damaged"):
            Answers(tmp_path, HEAD)
