"""What schedulers, their tools and our own notes beside them say is typed where it arrives, or one sentence."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest
from tests.journal.journals import make_run
from tests.launch.test_kubernetes_states import a_job, a_pod

from shoal.cli.main import main
from shoal.errors import SetupError
from shoal.journal import lock
from shoal.journal.rundir import RunDir
from shoal.launch.job import Job, remember, remembered
from shoal.launch.kubernetes.client import Cluster
from shoal.launch.kubernetes.states import Seen, state
from shoal.launch.slurm import notes
from shoal.launch.slurm.hostlist import expand
from shoal.launch.sweep import Sweep, file_of

JOB = Job("demo", "kubernetes", "ns/demo", 1.0, 2, 8, "/w", "ab", {"kind": "jobs.batch"})
BAD: list[Any] = [None, [], {}, "x", -1, 2.5, 10**30, True, [None], {"a": []}]


def spots(said: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = said.items() if isinstance(said, dict) else enumerate(said) if isinstance(said, list) else ()
    return [at, *(spot for key, value in inner for spot in spots(value, (*at, key)))]


def changed(said: Any, spot: tuple[Any, ...], new: Any) -> Any:
    if not spot:
        return new
    said = json.loads(json.dumps(said))
    inner = said
    for key in spot[:-1]:
        inner = inner[key]
    inner[spot[-1]] = new
    return said


def test_a_folded_list_is_not_written_out_before_its_length_is_known() -> None:
    assert expand("n[1-99999][1-99999]") == ()
    assert expand("n[" + ",".join(["1-99999"] * 50) + "]") == ()
    assert expand(",".join(["n[1-99999][9-1]"] * 1000)) == ()  # nothing times much
    assert expand("n[1-99999]" + "x" * 5000) == ()  # few letters, half a gigabyte of names
    assert expand("n[1-2][1-2]") == ("n11", "n12", "n21", "n22")
    assert expand(f"n[{'9' * 5000}-{'9' * 5000}]") == ()


@pytest.mark.parametrize("thing", ["Pod", "Job"])
def test_no_object_of_a_cluster_breaks_a_state(thing: str) -> None:
    ended = {"terminated": {"exitCode": 78, "message": "x", "startedAt": "2026-11-16T02:00:01Z"}}
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "m"}
    pod = a_pod(0, "Failed", containerStatuses=[{"image": "x", "state": ended}], conditions=[condition])
    owned = {"kind": "Workload", "metadata": {"ownerReferences": [{"uid": "uid-demo"}]}, "spec": {}}
    job = a_job(suspend=True, conditions=[{"type": "Failed", "status": "False", "lastTransitionTime": "x"}])
    whole = pod if thing == "Pod" else job
    for spot in spots(whole):
        for new in BAD:
            odd = changed(whole, spot, new)
            objects = [odd, a_job()] if thing == "Pod" else [odd, pod]
            assert state(JOB, Seen.of([*objects, owned, {"kind": "Event", "involvedObject": new}])).phase


def test_a_stray_pod_with_the_label_is_left_out_and_said() -> None:
    for index in ("7x", "-1", "99", "²"):
        stray = a_pod(0, "Failed")
        stray["metadata"]["annotations"]["batch.kubernetes.io/job-completion-index"] = index
        stray["metadata"]["name"] = "debug"
        said = state(JOB, Seen.of([a_job(), stray, a_pod(0, "Running"), a_pod(1, "Running")]))
        assert said.phase == "running"
        assert "pod debug is left out" in said.why
        assert index in said.why


@pytest.mark.parametrize("printed", ["", "5", "[]", "{}", '{"items": 5}', '{"items": [5]}', "[" * 10_000, "Welcome!"])
def test_what_is_no_answer_of_kubectl_is_a_sentence(tmp_path: Path, monkeypatch: Any, printed: str) -> None:
    (tmp_path / "said").write_text(printed)
    (tmp_path / "kubectl").write_text(f"#!/bin/sh\ncat {tmp_path / 'said'}\n")
    (tmp_path / "kubectl").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(SetupError, match="no answer"):
        Cluster().get("ns", ["pods"])


def test_a_damaged_job_file_is_one_sentence_and_hides_no_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("demo", "good"):
        make_run(tmp_path, name).open().start().steps(2).close()
    run_dir = RunDir.of("demo", tmp_path)
    local = Job("demo", "local", "1-2", 1.0, 1, 0, str(tmp_path), "ab", {"host": "elsewhere"})
    remember(local, run_dir)
    whole = json.loads((run_dir.path / "job.json").read_text())
    for spot in spots(whole):
        for new in BAD:
            odd = changed(whole, spot, new)
            (run_dir.path / "job.json").write_text(json.dumps(odd))
            try:
                assert remembered(run_dir) is not None
            except SetupError as e:
                assert "move it away" in str(e)  # noqa: PT017  # one or the other
    (run_dir.path / "job.json").write_text(json.dumps({**whole, "nodes": "2"}))
    assert main(["ps", "--workspace", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "\ngood " in out
    assert "damaged: " in out
    assert "job.json" in out
    for verb in (["ps"], ["logs"], ["resume"], ["stop"]):
        assert main([*verb, "demo", "--workspace", str(tmp_path)]) == 78
        assert "nodes: '2' where a whole number belongs" in capsys.readouterr().err
    (run_dir.path / "job.json").unlink()
    os.mkfifo(run_dir.path / "job.json")
    assert main(["ps", "demo", "--workspace", str(tmp_path)]) == 78
    assert "is a FIFO" in capsys.readouterr().err


@pytest.mark.parametrize("pid", [0, -1, True, 1 << 40, "1"])
def test_a_lock_that_names_no_process_is_no_reason_to_send_signals(tmp_path: Path, pid: Any) -> None:
    run_dir = make_run(tmp_path, "demo").open().run_dir
    with lock.hold(run_dir):
        said = {"pid": pid, "host": socket.gethostname(), "started": 1.0}
        run_dir.pid_file.write_text(json.dumps(said))
        found = lock.holder(run_dir)
    assert found is not None
    assert found.host == "?", "nobody signals a process of another host"


def test_notes_and_sweeps_of_the_wrong_types(tmp_path: Path) -> None:
    path = tmp_path / "7.json"
    notes.write(path, notes.Notes(3, 1, {"n1": "bad"}, 75, "why", False, 2.0))
    assert notes.read(path) == notes.Notes(3, 1, {"n1": "bad"}, 75, "why", False, 2.0)
    for field, new in (("furthest", "3"), ("excluded", [1]), ("code", 2.5), ("over", 1), ("other", 1)):
        path.write_text(json.dumps({field: new}))
        assert notes.read(path) is None
    file = file_of("lr", tmp_path)
    file.parent.mkdir(parents=True)
    good = {"name": "lr", "points": {"lr-000": ["a=1"]}, "total": 5, "early": True, "stopped": {}}
    file.write_text(json.dumps(good))
    assert Sweep.read("lr", tmp_path).points == {"lr-000": ("a=1",)}
    for field, new in (("points", [1]), ("points", {"../x": []}), ("total", "5"), ("stopped", {"a": 1}), ("name", "x")):
        file.write_text(json.dumps({**good, field: new}))
        with pytest.raises(SetupError, match="move it away"):
            Sweep.read("lr", tmp_path)
