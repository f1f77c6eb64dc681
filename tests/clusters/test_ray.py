"""Runs on a real Ray cluster of several raylets: they train as one machine does, survive losses, stop and go on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.clusters.ray_cluster import RayCluster, ray_cluster
from tests.patience import until
from tests.train.tiny import digest_of, make_data, make_run, train_on

from shoal.journal.journal import Record, records
from shoal.journal.rundir import RunDir
from shoal.launch.backend import OVER, State
from shoal.launch.job import Job
from shoal.launch.ray.backend import Ray
from shoal.launch.ray.mailbox import SECRETS, package
from shoal.launch.request import Request
from shoal.launch.send import request_of
from shoal.spec import Run, dump

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

STEPS = 60
OVER_S = 240.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with ray_cluster("a", "b") as found:
        yield found


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def digest(data: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of the same run without Ray, on one machine."""
    return digest_of(train_on(make_run(data, **_changes()), tmp_path_factory.mktemp("local"), 2))


def _changes(**more: Any) -> dict[str, Any]:
    return {"train.steps": STEPS, "train.batch": 12, "checkpoint.every": 5, "guard.grace_s": 20, **more}


@pytest.fixture
def asked(cluster: RayCluster, data: Path, tmp_path: Path) -> Callable[..., Request]:
    def make(name: str, **changes: Any) -> Request:
        launch = {"on": "ray", "nodes": 2, "ray": {"address": cluster.address}}
        launch |= {key.removeprefix("launch."): value for key, value in changes.items() if key.startswith("launch.")}
        others = {key: value for key, value in changes.items() if not key.startswith("launch.")}
        return request_of(make_run(data, **_changes(name=name, launch=launch, **others)), tmp_path)

    return make


def ended(job: Job) -> State:
    def over() -> State | None:
        said = Ray().states([job])[job.id]
        return said if said.phase in OVER else None

    said = until(over, OVER_S)
    print(*Ray().logs(job, False, None), sep="\n")  # for a test that fails
    assert isinstance(said, State)
    return said


def journal(request: Request) -> list[Record]:
    file = RunDir.of(request.name, request.workspace).journal_file
    return records(file) if file.exists() else []


def reaches(request: Request, step: int) -> None:
    until(lambda: any(r["kind"] == "step" and r["step"] >= step for r in journal(request)), 120)


def test_two_nodes_train_as_one_machine_does_and_nobody_sees_the_secret(
    cluster: RayCluster, asked: Callable[..., Request], digest: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MINE", "hunter2")
    seen = tmp_path / "seen"
    setup = [f'[ -z "$SHOAL_NODE" ] || echo "$SHOAL_NODE $SECRET" >>{seen}']
    request = asked("plain", **{"launch.secrets": {"SECRET": "env:MINE"}, "launch.setup": setup})
    job = Ray().submit(request)
    assert ended(job) == replace(ended(job), phase="done", exit_code=0)
    assert digest_of(RunDir.of("plain", tmp_path)) == digest
    assert sorted(seen.read_text().splitlines()) == ["0 hunter2", "1 hunter2"]
    assert "hunter2" not in json.dumps(cluster.ask("/api/jobs/"))
    assert "hunter2" not in "".join(Ray().logs(job, False, None))
    from shoal.launch.ray.client import Cluster

    assert not Cluster(cluster.address).has(package(SECRETS, job.id))
    # The log again as one that follows it sees it: all of it, and the last lines alone.
    whole = list(Ray().logs(job, False, None))
    assert list(Ray().logs(job, True, None)) == whole
    assert list(Ray().logs(job, True, 3)) == whole[-3:]
    assert any(line.startswith("[0] ") for line in whole)


def test_a_lost_machine_is_replaced_and_a_lost_first_node_too_and_the_end_is_the_same(
    cluster: RayCluster, asked: Callable[..., Request], digest: str
) -> None:
    cluster.add("spare")
    request = asked("lossy")
    job = Ray().submit(request)
    reaches(request, 8)
    cluster.kill(cluster.machine_with("SHOAL_NODE=1", f"SHOAL_JOB={job.id}"))
    until(lambda: [r["kind"] for r in journal(request)].count("start") == 2, 120)
    # The supervisor of node 0 lived on: one session, whose group was restarted.
    assert [r["kind"] for r in journal(request)].count("open") == 1
    until(lambda: [r["kind"] for r in journal(request)][-1] == "step", 120)
    os.kill(cluster.parent_of("SHOAL_NODE=0", f"SHOAL_JOB={job.id}"), signal.SIGKILL)  # the actor of the first node
    assert ended(job).phase == "done"
    assert digest_of(RunDir.of("lossy", request.workspace)) == digest
    assert [r["kind"] for r in journal(request)].count("open") == 2
    said = "\n".join(Ray().logs(job, False, None))
    assert "another node 1 is asked for; the others go on" in said
    assert "node 0 on" in said
    assert "all agents start again" in said


def test_a_run_starts_with_as_few_as_it_can(asked: Callable[..., Request], digest: str) -> None:
    """There are two machines, and it would take three."""
    request = asked("elastic", **{"launch.nodes": 3, "launch.min_nodes": 2})
    job = Ray().submit(request)
    assert ended(job).phase == "done"
    assert digest_of(RunDir.of("elastic", request.workspace)) == digest
    assert "waits for 1 of 3 nodes" in "\n".join(Ray().logs(job, False, None))


def test_what_cannot_help_is_not_tried_again(asked: Callable[..., Request], tmp_path: Path) -> None:
    job = Ray().submit(asked("nowhere", **{"data.train": str(tmp_path / "nothing"), "launch.nodes": 1}))
    said = ended(job)
    assert (said.phase, said.exit_code) == ("failed", 78)
    assert "nothing" in said.why
    lines = list(Ray().logs(job, False, None))
    assert sum("is on" in line for line in lines) == 1
    assert not any("start again" in line for line in lines)


def test_what_may_help_is_tried_again_within_the_budget(asked: Callable[..., Request], tmp_path: Path) -> None:
    """Agents that always leave with 75: here a Python that is one for all but them."""
    python, starts = tmp_path / "python", tmp_path / "starts"
    python.write_text(
        f'#!/bin/sh\ncase "$*" in *guard.tied*) echo x >>{starts}; exit 75 ;; esac\nexec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    job = Ray().submit(asked("again", **{"launch.python": str(python), "launch.requeues": 1, "launch.nodes": 1}))
    said = ended(job)
    assert (said.phase, said.exit_code) == ("failed", 75)
    assert "without progress" in said.why
    assert starts.read_text().split() == ["x", "x"]


def test_a_stopped_run_is_saved_and_goes_on_where_it_was(asked: Callable[..., Request], digest: str) -> None:
    request = asked("halves")
    job = Ray().submit(request)
    reaches(request, 8)
    Ray().stop(job, now=False)
    assert ended(job).phase == "stopped"
    close = [r for r in journal(request) if r["kind"] == "close"][-1]
    assert (close["status"], close["exit_code"]) == ("stopped", 143)
    assert "saved at step" in close["reason"]
    again = Ray().submit(asked("halves"))
    assert ended(again).phase == "done"
    assert digest_of(RunDir.of("halves", request.workspace)) == digest
    starts = [r for r in journal(request) if r["kind"] == "start"]
    assert len(starts) == 2


def test_a_job_that_waits_says_for_what_and_many_are_asked_about_at_once(
    cluster: RayCluster, asked: Callable[..., Request], monkeypatch: pytest.MonkeyPatch
) -> None:
    import requests

    job = Ray().submit(asked("large", **{"launch.nodes": 9}))
    until(
        lambda: Ray().states([job])[job.id].phase == "waiting" and "9 free nodes" in Ray().states([job])[job.id].why,
        120,
    )
    calls: list[str] = []
    real = requests.request
    monkeypatch.setattr(requests, "request", lambda m, url, **more: (calls.append(url), real(m, url, **more))[1])
    many = [replace(job, id=f"other-{i}") for i in range(1000)]
    found = Ray().states([job, *many])
    assert {found[other.id].phase for other in many} == {"gone"}
    assert found[job.id].phase == "waiting"
    assert len(calls) <= 6, calls
    Ray().stop(job, now=True)
    assert ended(job).phase == "stopped"


def test_a_program_that_uses_ray_trains_on_its_cluster(
    cluster: RayCluster, data: Path, tmp_path: Path, digest: str
) -> None:
    (tmp_path / "run.yaml").write_text(dump(make_run(data, **_changes(name="inside", launch={"nodes": 2}))))
    program = (
        "import ray, sys\nfrom shoal.launch.ray import run\n"
        f"ray.init('{cluster.bootstrap}', log_to_driver=False)\nsys.exit(run('run.yaml'))\n"
    )
    env = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")} | {"RAY_USAGE_STATS_ENABLED": "0"}
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=env, capture_output=True, timeout=OVER_S)
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    assert digest_of(RunDir.of("inside", tmp_path)) == digest


def test_a_batch_shares_its_units_between_the_machines(cluster: RayCluster, tmp_path: Path) -> None:
    from tests.batch.place import ALONE, Place, once_each

    (tmp_path / "unit.sh").write_text(
        f'{ALONE}until [ "$(wc -l <began)" -ge 2 ]; do sleep 0.05; done\n'
        'case $1 in 3) exit 2;; 4) [ "$SHOAL_UNIT_ATTEMPT" -ge 1 ] || kill -9 $$;; esac\n'
    )
    batch = {"command": ["sh", "unit.sh", "{index}"], "units": 12, "at_once": 1, "folder": str(tmp_path)}
    launch = {"on": "ray", "nodes": 2, "ray": {"address": cluster.address}}
    run = Run.model_validate({"name": "b", "batch": batch, "guard": {"backoff_s": 0.01}, "launch": launch})
    job = Ray().submit(request_of(run, tmp_path))
    state = ended(job)
    assert (state.phase, state.exit_code) == ("failed", 78), "unit 3 has failed for good"
    place = Place(tmp_path)
    assert place.ends("done") == once_each(set(range(12)) - {3})
    assert place.ends("failed") == once_each([3, 4])
    assert place.noted("clashes") == []
    assert {r["runner"].partition("-")[0] for r in place.records("unit_began")} == {"0", "1"}
