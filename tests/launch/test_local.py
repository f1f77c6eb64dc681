"""This machine as a scheduler: real processes that outlive their sender, with agents that only pretend."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.guard.fake import alive, until
from tests.launch.stand_in import ended, make_request, pretend

from shoal.errors import UsageError
from shoal.launch.job import Job
from shoal.launch.local import Local
from shoal.launch.request import Request

Send = Callable[..., Job]


@pytest.fixture
def send(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Send]:
    sent: list[Job] = []

    def submit(does: str = "wait", **launch: object) -> Job:
        pretend(monkeypatch, does)
        sent.append(Local().submit(make_request(tmp_path, **launch)))
        return sent[-1]

    yield submit
    for job in sent:
        Local().stop(job, now=True)
        ended(job)


def test_how_a_job_ended_is_known_later_though_nobody_waited_for_it(send: Send) -> None:
    job = send("0")
    assert ended(job) == "done"
    for code, phase in ((78, "failed"), (75, "failed"), (143, "stopped")):
        job = send(str(code))
        assert ended(job) == phase
        state = Local().states([job])[job.id]
        assert state.exit_code == code
        assert phase == "stopped" or state.why == f"exit code {code}: the data is gone"


def test_several_nodes_are_several_agents_that_know_each_other_and_stop_together(send: Send) -> None:
    job = send(nodes=3, env={"A": "1 'two'"})
    lines = until(lambda: (said := list(Local().logs(job, False, None))) and len(said) == 3 and said)
    heads = {line.split(" at ")[1].split(" for ")[0] for line in lines}
    assert [line.split(" at ")[0] for line in lines] == [f"[{n}] node {n} of 3" for n in range(3)]
    assert len(heads) == 1
    assert heads.pop().startswith("127.0.0.1:")
    assert all("A=1 'two', B=, token 64" in line for line in lines)
    Local().stop(job, now=False)
    assert ended(job) == "stopped"
    assert sorted(line for line in Local().logs(job, True, None) if "told" in line) == [f"[{n}] told" for n in range(3)]


def test_now_is_now(send: Send) -> None:
    job = send()
    until(lambda: list(Local().logs(job, False, None)))
    Local().stop(job, now=True)
    assert ended(job) in ("stopped", "failed")


@pytest.mark.parametrize("now", [False, True])
def test_whenever_it_is_told_it_hears_it(send: Send, now: bool) -> None:
    for i in range(6):
        job = send(setup=["sleep 0.1"] if i % 2 else [])
        time.sleep(0.02 * i)
        Local().stop(job, now)
        assert ended(job) in ("stopped", "gone", "failed" if now else "stopped")


def test_a_number_that_another_process_has_by_now_is_not_taken_for_the_job(send: Send) -> None:
    job = send()
    pid = int(job.id.split("-")[0])
    other = replace(job, id=f"{pid}-1")
    assert Local().states([job, other])[other.id].phase == "gone"
    Local().stop(other, now=True)
    assert Local().states([job])[job.id].phase == "running"
    after_a_reboot = replace(job, where={**job.where, "boot": "another"})
    assert Local().states([after_a_reboot])[job.id].phase == "gone"
    elsewhere = replace(job, where={**job.where, "host": "elsewhere"})
    assert Local().states([elsewhere])[job.id].phase == "unknown"


def test_a_job_that_was_killed_is_gone_and_says_so(send: Send) -> None:
    job = send()
    pid = int(job.id.split("-")[0])
    agent = int(until(lambda: Path(f"/proc/{pid}/task/{pid}/children").read_text().split())[0])
    os.kill(pid, signal.SIGKILL)
    assert ended(job) == "gone"
    assert "went away without a word" in Local().states([job])[job.id].why
    os.kill(agent, signal.SIGKILL)
    until(lambda: not alive(agent))


def test_what_is_rendered_is_what_runs_and_no_secret_is_in_it(
    send: Send, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINE", "hunter2")
    (tmp_path / "key").write_text("swordfish\n")
    asked = {"secrets": {"A": "env:MINE", "B": f"file:{tmp_path}/key"}, "setup": ["echo first", "C=3"]}
    job = send("0", **asked)
    assert ended(job) == "done"
    request = make_request(tmp_path, **asked)
    text = Local().render(request)[0].text
    assert text == (tmp_path / ".shoal/local/demo/job.sh").read_text()
    assert "hunter2" not in text
    assert "swordfish" not in text
    assert request.token not in text
    said = list(Local().logs(job, False, None))
    assert said[0] == "[0] first"
    assert "A=hunter2, B=swordfish, token 64" in said[1]


def test_code_travels_and_the_agents_start_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, workspace = tmp_path / "my code", tmp_path / "work space"
    code.mkdir()
    workspace.mkdir()
    (code / "mine.py").write_text("print('it is mine')\n")
    monkeypatch.setattr(
        Request, "agent", lambda self, there: [sys.executable, "-c", "import mine, os; os.stat('mine.py')"]
    )
    job = Local().submit(make_request(workspace, code=str(code), nodes=2))
    assert ended(job) == "done"
    assert sorted(Local().logs(job, False, None)) == ["[0] it is mine", "[1] it is mine"]


def test_what_this_machine_cannot_do_is_said_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="only Kubernetes can look up"):
        Local().render(make_request(tmp_path, secrets={"A": "kubernetes:name/key"}))
    with pytest.raises(UsageError, match="is not set in this shell"):
        Local().submit(make_request(tmp_path, secrets={"A": "env:NOT_SET_ANYWHERE"}))
    assert not (tmp_path / ".shoal/local").exists()


def test_setup_that_fails_is_the_end_of_the_job(send: Send) -> None:
    job = send(setup=["echo no such module", "false"])
    assert ended(job) == "failed"
    assert Local().states([job])[job.id].why == "exit code 1: no such module"
