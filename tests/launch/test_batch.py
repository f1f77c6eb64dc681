"""A batch is launched as any run is: the same runner on every node, and each scheduler told what suits a batch."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.batch.place import Place, once_each
from tests.launch.schemas import validate
from tests.launch.stand_in import ended

from shoal.cli.main import main
from shoal.errors import ShoalError
from shoal.journal.claims import runners
from shoal.journal.rundir import RunDir
from shoal.journal.units import Folder
from shoal.launch.backend import State
from shoal.launch.bundle import Bundle
from shoal.launch.job import Job, remembered
from shoal.launch.kubernetes.backend import Kubernetes
from shoal.launch.local import Local
from shoal.launch.ray.node import _last_step
from shoal.launch.request import Request
from shoal.launch.send import checked
from shoal.launch.slurm import states
from shoal.launch.slurm.backend import Slurm
from shoal.spec import Run

SHARED = {
    "image": "registry.example/shoal:0.1.0",
    "workspace": "/data/space",
    "volumes": [{"at": "/data", "claim": "shared"}],
}


def request(on: str, batch: dict[str, Any] | None = None, **launch: Any) -> Request:
    whole = {"command": ["true", "{index}"], "units": 100, "at_once": 4, **(batch or {})}
    run = Run.model_validate({"name": "clean", "batch": whole, "launch": {"on": on, **launch}})
    return Request(checked(run), Path("/ws"), Bundle.of("run", None), token="ab" * 32)


def test_nodes_of_this_machine_share_the_units_and_all_verbs_know_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SHOAL_WORKSPACE", str(tmp_path))
    place = Place(tmp_path)
    # The first units of both nodes wait for each other: none of them is done by one node alone.
    place.command('until [ "$(wc -l <began)" -ge 2 ]; do sleep 0.02; done; [ "$1" != 5 ] || exit 2\necho "unit $1"\n')
    batch = {"command": ["sh", "unit.sh", "{index}"], "units": 30, "at_once": 1}
    (tmp_path / "b.yaml").write_text(json.dumps({"name": "b", "batch": batch, "launch": {"nodes": 2}}))
    try:
        assert main(["launch", "b.yaml", "--follow"]) == 78
        said = capsys.readouterr()
        assert "[17] unit 17\n" in said.out
        assert "unit 5 was called wrongly" in said.err
        assert place.ends("done") == once_each(set(range(30)) - {5})
        assert place.noted("clashes") == []
        assert {r.node: r.left for r in runners(Folder(place.run_dir))} == {0: 0, 1: 0}
        place.command("")
        assert main(["resume", "b"]) == 0
        job = remembered(place.run_dir)
        assert job is not None
        assert ended(job) == "done"
        assert place.ends("done") == once_each(range(30))
        assert main(["ps"]) == 0
        assert "30/30" in capsys.readouterr().out
    finally:
        if job := remembered(place.run_dir):
            Local().stop(job, now=True)


def test_slurm_gets_an_array_of_nodes_each_of_which_is_requeued_alone(tmp_path: Path) -> None:
    asked = request("slurm", nodes=5, cpus=8, time_limit="4 h")
    (part,) = Slurm().render(asked)
    lines = part.text.splitlines()
    for option in ("--array=0-4%5", "--nodes=1", "--cpus-per-task=8", "--requeue", "--time=0-04:00:00"):
        assert f"#SBATCH {option}" in lines
    assert "#SBATCH --output=/ws/.shoal/slurm/clean-%A_%a.log" in lines
    assert "export SHOAL_BATCH_NODE=$SLURM_ARRAY_TASK_ID SHOAL_BATCH_JOB=slurm-$SLURM_ARRAY_JOB_ID" in lines
    assert "export SHOAL_BATCH_NODES=5" in lines
    assert subprocess.run(["bash", "-n"], input=part.text, text=True, capture_output=True).returncode == 0
    assert asked.token not in part.text


def test_an_array_is_one_job_in_what_shoal_says() -> None:
    job = Job("clean", "slurm", "12", 0.0, 3, 0, "/ws", "x", {"tasks": "3"})
    assert [task.id for task in states.tasks_of(job)] == ["12_0", "12_1", "12_2"]
    assert states.tasks_of(Job("clean", "slurm", "12", 0.0, 3, 0, "/ws", "x")) == []
    runs, done = State("running", "on n1", ("n1",), started=5.0), State("done", "it is done")
    waits, failed = State("waiting", "for a free node"), State("failed", "it failed", exit_code=78)
    assert states.together([runs, runs, waits]).why == "2 of 3 tasks run; 1 wait: for a free node"
    assert states.together([waits, waits]).phase == "waiting"
    assert states.together([done, runs]).phase == "running"
    assert states.together([done, waits]).phase == "done"
    assert states.together([failed, done, done]) == failed


@pytest.mark.parametrize("nodes", [1, 4])
def test_kubernetes_gets_an_indexed_job_whose_pods_fail_and_come_back_one_by_one(nodes: int) -> None:
    (part,) = Kubernetes().render(request("kubernetes", nodes=nodes, requeues=7, **SHARED))
    documents = list(yaml.safe_load_all(part.text))
    for document in documents:
        validate(document)
    job = next(d for d in documents if d["kind"] == "Job")["spec"]
    assert (job["completionMode"], job["completions"], job["parallelism"]) == ("Indexed", nodes, nodes)
    assert job["backoffLimitPerIndex"] == 7
    assert "maxFailedIndexes" not in job, "the others go on"
    wrong, lost, told = job["podFailurePolicy"]["rules"]
    assert (wrong["action"], wrong["onExitCodes"]["values"]) == ("FailIndex", [2, 78])
    assert (lost["action"], told["action"], told["onExitCodes"]["values"]) == ("Ignore", "Ignore", [143])
    assert ("successPolicy" in job) == (nodes > 1), "node 0 leaves when all units are over"
    (container,) = job["template"]["spec"]["containers"]
    assert container["resources"]["requests"]["cpu"] == "4", "as many cores as units at once"


@pytest.mark.parametrize(
    ("launch", "batch", "said"),
    [
        ({"image": "x"}, {}, "the pods of a batch agree there on who does what"),
        ({**SHARED, "kubernetes": {"jobset": True}}, {}, "for pods that must be there together"),
        ({**SHARED, "min_nodes": 2, "nodes": 3}, {}, "a batch goes on with whatever nodes there are"),
        ({**SHARED, "processes": 3}, {}, "it is batch.at_once of a batch"),
        (
            SHARED,
            {"units": None, "items": "{items}"},
            "the nodes may not see it; put it into a folder",
        ),
    ],
)
def test_what_cannot_work_is_refused_in_one_sentence(
    launch: dict[str, Any], batch: dict[str, Any], said: str, tmp_path: Path
) -> None:
    (tmp_path / "items").write_text("a\n")
    if "items" in batch:
        batch = {**batch, "items": str(tmp_path / "items")}
    with pytest.raises(ShoalError) as e:
        Kubernetes().render(request("kubernetes", batch, **launch))
    assert said in str(e.value)


def test_progress_that_refills_the_budget_of_starts_is_units_that_are_over(tmp_path: Path) -> None:
    from shoal.launch.slurm.verdict import _furthest

    lines = [{"kind": "units", "t": 1.0, "done": done, "failed": 2, "total": 90} for done in (3, 40)]
    run_dir = RunDir.of("clean", tmp_path)
    run_dir.path.mkdir(parents=True)
    run_dir.journal_file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert _last_step(run_dir.journal_file) == 42
    run_dir.spec_file.write_text("name: clean\nbatch:\n  units: 90\n")
    assert _furthest(tmp_path, "clean", 5) == 5, "there are no units yet"
    Folder(run_dir).begin(90, None)
    assert _furthest(tmp_path, "clean", 5) == 0
