"""Real Slurm with four nodes: runs that are preempted, moved, stopped, wrong or wait, and how they end."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from scripts.clusters.slurm import Cluster, Missing, slurm
from tests.patience import Stopwatch
from tests.require import unavailable
from tests.train.tiny import digest_of, make_data, make_run, train_on

from shoal.cli.main import main
from shoal.errors import SpecError
from shoal.journal.journal import records
from shoal.journal.rundir import RunDir
from shoal.launch.backend import OVER, State
from shoal.launch.job import Job, remembered
from shoal.launch.send import request_of
from shoal.launch.slurm import notes
from shoal.launch.slurm.backend import Slurm
from shoal.launch.slurm.notes import Notes
from shoal.spec import Run, dump

pytestmark = [pytest.mark.cluster, pytest.mark.uses("slurm")]

STEPS = 160
SLOWLY = """\
import os, time
from shoal.journal.journal import Journal

plain = Journal.note

def note(self, kind, **fields):
    plain(self, kind, **fields)
    if kind == "step":
        time.sleep(float(open(os.environ["PACE"]).read()))

Journal.note = note
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    try:
        with pytest.MonkeyPatch.context() as patch, slurm(tmp_path_factory.mktemp("slurm")) as found:
            for name, value in found.environment.items():
                patch.setenv(name, value)
            yield found
    except Missing as e:
        unavailable("slurm", str(e))


@dataclass
class Place:
    """A workspace that all nodes see, data, and code that travels: it makes a step take as long as a test needs."""

    cluster: Cluster
    folder: Path
    backend: Slurm

    @property
    def workspace(self) -> Path:
        return self.folder / "workspace"

    def run(self, name: str, pace_s: float = 0.1, **changes: Any) -> Run:
        spec = {
            "name": name, "train.steps": STEPS, "checkpoint.every": 60, "guard.grace_s": 5, "launch.on": "slurm",
            "launch.nodes": 2, "launch.queue": "low", "launch.code": str(self.folder / "code"),
            "launch.env": {"PACE": str(self.folder / f"pace-{name}")},
        }  # fmt: skip
        self.pace(name, pace_s)
        return make_run(self.folder / "data", **spec | changes)

    def submit(self, name: str, pace_s: float = 0.1, **changes: Any) -> Job:
        return self.backend.submit(request_of(self.run(name, pace_s, **changes), self.workspace))

    def shoal(self, *arguments: str) -> None:
        """As a person would type it."""
        assert main([*arguments, "--workspace", str(self.workspace)]) == 0

    def pace(self, name: str, step_s: float) -> None:
        """How long a step of that run takes at least, from now on."""
        new = self.folder / "pace.new"
        new.write_text(str(step_s))
        new.rename(self.folder / f"pace-{name}")

    def state(self, job: Job) -> State:
        return self.backend.states([job])[job.id]

    def run_dir(self, job: Job) -> RunDir:
        return RunDir.of(job.run, self.workspace)

    def notes(self, job: Job) -> Notes:
        found = notes.read(notes.file_of(self.workspace, job.id))
        assert found is not None
        return found

    def log(self, job: Job) -> str:
        return "\n".join(self.backend.logs(job, follow=False, lines=None))

    def kinds(self, job: Job, kind: str) -> list[dict[str, Any]]:
        path = self.run_dir(job).journal_file
        return [r for r in records(path) if r["kind"] == kind] if path.exists() else []

    def until(self, job: Job, holds: Callable[[State], bool], timeout_s: float = 120) -> State:
        watch = Stopwatch()
        while not holds(state := self.state(job)):
            assert watch.quiet_s() < timeout_s, f"{state}\n{self.log(job)}"
            time.sleep(0.3)
        return state

    def hurry(self, job: Job) -> None:
        """Slurm itself lets a job that it has requeued wait for two minutes; one may shorten that."""
        if self.until(job, lambda state: state.restarts == 1 and "ending" not in state.why).phase == "waiting":
            self.cluster.ask("scontrol", "update", f"JobId={job.id}", "StartTime=now+3")

    def trains(self, job: Job, step: int, timeout_s: float = 120) -> None:
        """Until it has come so far."""
        watch = Stopwatch()
        while not any(r["step"] >= step for r in self.kinds(job, "step")):
            assert watch.quiet_s() < timeout_s, f"{self.state(job)}\n{self.log(job)}"
            time.sleep(0.1)

    def ends(self, job: Job, timeout_s: float = 120) -> State:
        return self.until(job, lambda state: state.phase in OVER, timeout_s)


@pytest.fixture(scope="module")
def place(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Place:
    folder = tmp_path_factory.mktemp("place")
    make_data(folder / "data")
    for name in ("workspace", "code"):
        (folder / name).mkdir()
    (folder / "code" / "sitecustomize.py").write_text(SLOWLY)
    return Place(cluster, folder, Slurm())


@pytest.fixture(autouse=True)
def nothing_left(place: Place) -> Iterator[None]:
    """A test that fails leaves the next one an empty queue."""
    yield
    place.cluster.ask("scancel", "--user=root", "--state=PENDING")
    place.cluster.ask("scancel", "--user=root")
    watch = Stopwatch()
    while place.cluster.ask("squeue", "-h") and watch.quiet_s() < 30:
        time.sleep(0.1)


@pytest.fixture(scope="module")
def local(place: Place) -> str:
    """The digest of the same run on two processes of this machine, with no launcher."""
    return digest_of(train_on(make_run(place.folder / "data", **{"train.steps": STEPS}), place.folder / "local", 2))


def test_two_nodes_end_as_one_machine_does(place: Place, local: str) -> None:
    job = place.submit("two", pace_s=0)
    end = place.ends(job)
    assert (end.phase, end.exit_code, end.restarts) == ("done", 0, 0), place.log(job)
    assert end.nodes == ("n1", "n2")
    assert digest_of(place.run_dir(job)) == local
    assert "[0] " in place.log(job)


def test_preempted_it_saves_makes_room_and_ends_the_same(place: Place, local: str) -> None:
    job = place.submit("preempted")
    place.trains(job, 30)
    first = place.cluster.ask("sbatch", "--parsable", "-p", "high", "-N4", "--exclusive", "--wrap", "sleep 1").strip()
    waiting = place.until(job, lambda state: state.phase == "waiting")
    assert "make room" in waiting.why
    place.pace("preempted", 0)
    end = place.ends(job)
    assert (end.phase, end.restarts) == ("done", 1), place.log(job)
    assert digest_of(place.run_dir(job)) == local
    assert [r["exit_code"] for r in place.kinds(job, "close")] == [143, 0]  # it left by itself, in time
    assert "COMPLETED" in place.cluster.ask("squeue", "-h", "-t", "all", "-j", first, "-o", "%T")


def test_the_first_node_goes_down_and_the_run_ends_the_same_on_others(place: Place, local: str) -> None:
    job = place.submit("down")
    place.trains(job, 62)
    lost = place.state(job).nodes[0]
    place.cluster.ask("scontrol", "update", f"NodeName={lost}", "State=DOWN", "Reason=test")
    place.pace(job.run, 0)
    try:
        place.hurry(job)
        end = place.ends(job)
    finally:
        place.cluster.ask("scontrol", "update", f"NodeName={lost}", "State=RESUME")
    assert (end.phase, end.restarts) == ("done", 1), place.log(job)
    assert lost not in end.nodes
    assert digest_of(place.run_dir(job)) == local


def test_the_time_limit_is_near_so_it_saves_and_goes_on(place: Place, local: str) -> None:
    job = place.submit("long", pace_s=0.5, **{"launch.time_limit": "1 h", "guard.grace_s": 28})
    place.trains(job, 10)
    place.cluster.ask("scontrol", "update", f"JobId={job.id}", "TimeLimit=1")  # Slurm looks at them twice a minute
    place.hurry(job)
    place.cluster.ask("scontrol", "update", f"JobId={job.id}", "TimeLimit=60")
    place.pace("long", 0)
    end = place.ends(job)
    assert end.phase == "done", place.log(job)
    assert digest_of(place.run_dir(job)) == local
    assert "SIGUSR2" in [r["signal"] for r in place.kinds(job, "stopping")]


def test_a_wrong_spec_is_not_started_again(place: Place) -> None:
    job = place.submit("wrong", **{"data.train": str(place.folder / "nothing")})
    end = place.ends(job)
    assert (end.phase, end.exit_code, end.restarts) == ("failed", 78, 0), place.log(job)
    assert "another start cannot cure" in end.why
    with pytest.raises(SpecError, match=r"no partition 'night' \(launch\.queue\)"):
        place.submit("refused", **{"launch.queue": "night"})
    with pytest.raises(SpecError, match=r"launch\.memory_gb 99 is more than any node"):
        place.submit("refused", **{"launch.memory_gb": 99})
    with pytest.raises(SpecError, match="no node has GPUs of that kind"):
        place.submit("refused", **{"launch.gpus": 1, "resources.device": "cuda"})


def test_stopped_from_the_command_line_it_saves_and_only_a_person_goes_on(
    place: Place, local: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = place.folder / "told.yaml"
    file.write_text(dump(place.run("told")))
    place.shoal("launch", str(file))
    job = remembered(RunDir.of("told", place.workspace))
    assert job is not None
    place.trains(job, 20)
    place.shoal("stop", "told")
    end = place.ends(job)
    assert (end.phase, end.exit_code, end.restarts) == ("stopped", 143, 0), place.log(job)
    assert place.notes(job).over
    saved = place.kinds(job, "checkpoint")[-1]["step"]
    assert saved == max(r["step"] for r in place.kinds(job, "step"))
    place.pace("told", 0)
    place.shoal("resume", "told")
    again = remembered(RunDir.of("told", place.workspace))
    assert again is not None
    assert again.id != job.id
    assert any("told done" in line for line in place.backend.logs(again, follow=True, lines=None))
    assert digest_of(place.run_dir(job)) == local
    capsys.readouterr()
    place.shoal("ps")
    assert "finished" in next(line for line in capsys.readouterr().out.splitlines() if line.startswith("told "))


def test_with_fewer_nodes_allowed_a_lost_one_ends_no_job(place: Place) -> None:
    job = place.submit("fewer", **{"launch.min_nodes": 1})
    place.trains(job, 20)
    lost = place.state(job).nodes[1]
    place.cluster.ask("scontrol", "update", f"NodeName={lost}", "State=DOWN", "Reason=test")
    place.pace("fewer", 0)
    try:
        end = place.ends(job)
    finally:
        place.cluster.ask("scontrol", "update", f"NodeName={lost}", "State=RESUME")
    assert (end.phase, end.restarts) == ("done", 0), place.log(job)
    assert [r["world"] for r in place.kinds(job, "attempt")] == [2, 1]


def test_why_it_waits_and_a_thousand_jobs_in_one_question(place: Place) -> None:
    held = place.cluster.ask("sbatch", "--parsable", "--hold", "--array=0-999", "--wrap", "true").strip()
    jobs = [Job(f"r{i}", "slurm", f"{held}_{i}", 0.0, 1, 0, str(place.workspace), "") for i in range(1000)]
    watch = Stopwatch()
    states = place.backend.states(jobs)
    took_s = watch.quiet_s()
    assert len(states) == 1000
    assert {state.phase for state in states.values()} == {"waiting"}
    assert f"`scontrol release {held}_7`" in states[f"{held}_7"].why
    assert took_s < 5
    full = place.submit("full", **{"launch.nodes": 4, "launch.slurm": {"exclusive": True}})
    behind = place.submit("behind", **{"launch.nodes": 4})
    never = place.submit("never", **{"launch.queue": "short", "launch.time_limit": "1 h"})
    place.until(full, lambda state: state.phase == "running")
    place.until(behind, lambda state: "not enough nodes are free" in state.why, timeout_s=30)
    place.until(never, lambda state: "longer than its partition allows" in state.why, timeout_s=30)
    for job in (never, behind, full):
        place.backend.stop(job, now=True)
    place.cluster.ask("scancel", held)
    assert place.ends(behind).phase == "stopped"
    place.ends(full)


def test_a_bad_node_is_found_before_the_start_and_left_out(place: Place) -> None:
    broken = place.cluster.nodes[0]
    python = place.folder / "python"  # which does not work on one node
    python.write_text(f'#!/bin/sh\n[ "$(hostname)" = {broken} ] && exit 127\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    job = place.submit("picky", pace_s=0, **{"launch.python": str(python), "train.steps": 10})
    end = place.ends(job)
    assert (end.phase, end.restarts) == ("done", 1), place.log(job)
    assert broken not in end.nodes
    assert list(place.notes(job).excluded) == [broken]


def test_a_sweep_is_an_array(place: Place) -> None:
    requests = [
        request_of(
            make_run(
                place.folder / "data",
                **{"name": f"lr-{lr}", "train.steps": 5, "train.optimizer.lr": lr, "launch.on": "slurm"},
            ),
            place.workspace,
        )
        for lr in (0.001, 0.002, 0.003)
    ]
    jobs = place.backend.submit_array(requests, at_once=2)
    assert {place.ends(job).phase for job in jobs} == {"done"}, place.log(jobs[0])
    assert len({digest_of(place.run_dir(job)) for job in jobs}) == 3


def test_a_script_is_sent_with_its_folder_fails_and_is_restarted(place: Place) -> None:
    folder = place.folder / "mine"
    folder.mkdir()
    (folder / "train.py").write_text(
        "import os, sys, pathlib\n"
        "print('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'], 'in', __file__, flush=True)\n"
        "mark = pathlib.Path(sys.argv[1]) / f\"was-{os.environ['RANK']}\"\n"
        "again = mark.exists()\n"
        "mark.touch()\n"
        "sys.exit(0 if again else 7)\n"
    )
    run = {
        "name": "mine",
        "script": {"path": str(folder / "train.py"), "args": [str(folder)], "processes": 2, "probe": False},
        "launch": {"on": "slurm", "queue": "low", "code": str(folder)},
        "guard": {"backoff_s": 0.01},
        "track": {"mlflow": False},
    }
    (place.folder / "mine.yaml").write_text(json.dumps(run))
    place.shoal("launch", str(place.folder / "mine.yaml"))
    job = remembered(RunDir.of("mine", place.workspace))
    assert job is not None
    assert place.ends(job).phase == "done"
    log = place.log(job)
    assert "rank 1 of 2 in" in log
    assert str(place.workspace / ".shoal" / "bundles") in log, "the copy that travelled"
    assert [r["exit_code"] for r in place.kinds(job, "failure")][:1] == [7]
