"""`shoal ps` over all schedulers: one question each, the journal where it knows better, and nobody hides the others."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from tests.journal.journals import RUN, Story, make_run

from shoal.cli.main import main
from shoal.errors import SetupError
from shoal.journal.journal import Record
from shoal.journal.rundir import RunDir
from shoal.launch import watch
from shoal.launch.backend import State
from shoal.launch.job import RUN_FILE, Job, remember
from shoal.launch.why import answer
from shoal.observe.status import Status
from shoal.spec import dump
from shoal.spec.run import Run


class Scheduler:
    """Knows jobs by their ids and counts how often it is asked."""

    name = "slurm"

    def __init__(self, says: Mapping[str, State] | None = None, away: str | None = None) -> None:
        self.says, self.away, self.asked = says or {}, away, 0

    def states(self, jobs: Sequence[Job]) -> Mapping[str, State]:
        self.asked += 1
        if self.away:
            raise SetupError(self.away)
        return {job.id: self.says[job.id] for job in jobs if job.id in self.says}


def launched(folder: Path, name: str, backend: str = "slurm", job: str = "7", at: float | None = None) -> Job:
    made = Job(name, backend, job, time.time() if at is None else at, 2, 8, str(folder), "ab" * 32, {"cluster": "c"})
    remember(made, RunDir.of(name, folder))
    return made


def of(monkeypatch: pytest.MonkeyPatch, **schedulers: Scheduler) -> None:
    monkeypatch.setattr(watch, "backend_of", lambda job: schedulers[job.backend])


def rows(folder: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, dict[str, object]]:
    capsys.readouterr()
    assert main(["ps", "--json", "--workspace", str(folder)]) == 0
    return {row["name"]: row for row in json.loads(capsys.readouterr().out)}


def test_a_thousand_jobs_are_one_question_to_each_scheduler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    says = {str(n): State("waiting", "no node is free") for n in range(1000)}
    slurm, ray = Scheduler(says), Scheduler(says)
    of(monkeypatch, slurm=slurm, ray=ray)
    for n in range(1000):
        launched(tmp_path, f"run-{n:03}", "ray" if n % 2 else "slurm", str(n))
    began = time.process_time()
    found = rows(tmp_path, capsys)
    assert len(found) == 1000
    assert (slurm.asked, ray.asked) == (1, 1)
    assert time.process_time() - began < 2.0
    assert main(["ps", "--workspace", str(tmp_path)]) == 0
    assert "slurm 998" in capsys.readouterr().out


def test_a_scheduler_that_is_away_hides_nobody_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    of(monkeypatch, slurm=Scheduler(away="squeue is not there; install it."), ray=Scheduler({"8": State("done", "ok")}))
    launched(tmp_path, "lost")
    launched(tmp_path, "other", "ray", "8")
    make_run(tmp_path, "plain").open().start().steps(3).close("done", 0, "done")
    RunDir.of("torn", tmp_path).path.mkdir(parents=True)
    (RunDir.of("torn", tmp_path).path / "job.json").write_text("{")
    found = rows(tmp_path, capsys)
    assert found["lost"]["status"] == "unknown"
    assert found["lost"]["why"] == "slurm cannot be asked: squeue is not there; install it"
    assert found["other"]["status"] == found["plain"]["status"] == "finished"
    assert "cannot be read" in str(found["torn"]["why"])


NOW = 1_700_000_100.0


def story(folder: Path, submitted: float) -> tuple[Story, Job]:
    return make_run(folder, "demo"), launched(folder, "demo", at=submitted)


@pytest.mark.parametrize(
    ("phase", "journal", "status", "why"),
    [
        ("waiting", "", "waiting", "they say"),
        ("running", "", "running", "they say"),
        ("running", "trains", "running", "training"),
        ("running", "old", "starting", "they say"),  # the journal tells of the start before this one
        ("failed", "old", "failed", "they say"),
        ("failed", "failed", "failed", "the data is gone"),
        ("failed", "trains", "failed", "they say"),  # nobody was left to write down how it ended
        ("gone", "finished", "finished", "all done"),
        ("gone", "", "dead", "they say"),
        ("gone", "stopped", "stopped", "it was told to stop"),  # the scheduler forgets with the job who ended it
        ("unknown", "finished", "finished", "all done"),
        ("unknown", "failed", "unknown", "they say"),
    ],
)
def test_whoever_knows_better_says_how_it_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, phase: str, journal: str, status: str, why: str
) -> None:
    monkeypatch.chdir(tmp_path)
    of(monkeypatch, slurm=Scheduler({"7": State(phase, "they say")}))  # type: ignore[arg-type]
    run, job = story(tmp_path, submitted=NOW if journal == "old" else 1_600_000_000.0)
    if journal == "stopped":
        journal, job = "", replace(job, stopped=NOW)
    if journal:
        run.open().start().steps(4)
        run.run_dir.pid_file.touch()  # a lock that nobody holds, as seen from here
    if journal in ("failed", "old"):
        run.close("failed", 78, "the data is gone")
    elif journal == "finished":
        run.close("done", 0, "all done")
    seen = watch.look([job], tmp_path)["demo"].status
    assert seen.status == status
    assert seen.why.startswith(why)


def test_one_run_in_three_sentences(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SHOAL_WORKSPACE", raising=False)
    slurm = Scheduler({"7": State("waiting", "it is 3rd in the queue gpu, which has no free node")})
    of(monkeypatch, slurm=slurm)
    run, _ = story(tmp_path, submitted=NOW + 1e6)
    priced = Run.model_validate({**RUN.model_dump(mode="json"), "plan": {"price": 2.0}})
    (run.run_dir.path / RUN_FILE).write_text(dump(priced))
    run.step_s = 8.98
    run.open().start().steps(400)  # an hour and a bit
    run.failure().close("failed", 75, "gave up")
    assert main(["ps", "demo"]) == 0
    now, died, cost = capsys.readouterr().out.splitlines()
    assert now.startswith("now        waiting on slurm 7 at step 400 of 200: it is 3rd in the queue gpu")
    assert now.endswith("(docs/runbooks/pending.md)")
    assert "rank 1: killed" in died
    assert died.endswith("(docs/runbooks/killed.md)")
    assert "2 node-hours, 16 GPU-hours, about $31.96" in cost
    assert "(plan.price); goodput" in cost

    slurm.says = {"7": State("failed", "out of memory on node-3", restarts=5, exit_code=75)}
    assert main(["ps", "demo"]) == 0
    assert "slurm says: out of memory on node-3 (docs/runbooks/crash-looping.md)" in capsys.readouterr().out
    assert main(["ps", "demo", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["cost"]["usd"] == pytest.approx(32, rel=0.02)
    assert said["on"] == "slurm"


def test_a_run_that_only_waits_has_cost_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    of(monkeypatch, slurm=Scheduler({"7": State("waiting", "the queue is full")}))
    launched(tmp_path, "demo")
    assert main(["ps", "demo", "--workspace", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "now        waiting on slurm 7: the queue is full (docs/runbooks/pending.md)",
        "last end   it has not died so far",
        "cost       nothing yet: it has not started",
    ]


def test_who_is_slow_is_told_of_a_run_that_runs_and_by_which_clock() -> None:
    running = Status("a", "running", 9, 100, 2.0, 1e3, 0.0, time.time(), "step 9")
    slow = {
        "kind": "straggler",
        "t": 3.0,
        "rank": 5,
        "phase": "compute",
        "own_s": 0.31,
        "usual_s": 0.18,
        "by": "device",
    }
    attempt: Record = {"kind": "attempt", "t": 1.0, "attempt": 0, "world": 8, "pids": []}
    told = str(answer(running, None, [attempt, slow], None))
    assert "rank 5 is slow in compute: 310 ms a step, the others 180 ms (forward pass, by the device's clock)" in told
    for others in ([slow, attempt], [attempt]):  # what was slow before a restart may be well now
        assert answer(running, None, others, None).slow is None
    assert answer(replace(running, status="done"), None, [attempt, slow], None).slow is None
