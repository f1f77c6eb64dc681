"""The words of `shoal swarm` for a model that is cut over peers; nodes are started in the slow test alone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from shoal.cli.swarm.status import lines
from shoal.journal.journal import records
from shoal.spec import dump, load
from shoal.swarm.charter import Charter
from tests.stages.admitted import HERE, Cut
from tests.stages.test_layers import a_run
from tests.swarm.test_cli import create
from tests.train.tiny import make_data

WHOLE = ["resources.processes=1", "data.eval=[]"]


def test_create_states_the_cut_in_the_charter_and_for_the_founder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = create(tmp_path, capsys, *WHOLE, "swarm.stages.count=2", "checkpoint.every=7", "checkpoint.keep=5")
    charter = Charter.load(Path(made["folder"]) / "charter.json")
    assert (charter.stages, charter.run["swarm"]["peers"], charter.run["checkpoint"]) == (2, 2, {"every": 7})
    assert charter.run["swarm"].keys() == {"peers", "silent", "chunk", "keep", "stages"}
    founder = load(Path(made["folder"]).parent / "run.yaml").run
    others = charter.local(tmp_path / "other" / "run.yaml", {}, ["checkpoint.keep=9"])
    assert (founder.model, founder.train, founder.swarm) == (others.model, others.train, others.swarm)
    assert (founder.checkpoint.keep, others.checkpoint.keep) == (5, 9)  # a machine's own


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["swarm.stages.count=2", "--no-train"], "leave --no-train and --trainer out"),
        (["swarm.stages.count=2", "--trainer", "mine"], "leave --no-train and --trainer out"),
        (["swarm.stages.count=2", "swarm.peers=1"], "must be from 2 to"),
        (["swarm.stages.count=3", "swarm.peers=2", "model.layers=4"], "needs a peer for each: raise it"),
        (["swarm.stages.count=3", "swarm.peers=3"], "the model has 2 layers: lower it"),
        (["swarm.stages.count=2", "checkpoint.every=30 s"], "checkpoint.every"),
        (["swarm.stages.count=2", "swarm.round=30 s"], "swarm.round has no effect in a swarm whose model is cut"),
        (["swarm.stages.count=2", "guard.restarts=7"], "`shoal swarm join RUN` starts it again"),
        (["swarm.stages.rank=8"], "swarm.stages.count is 1, so every peer holds the whole model"),
    ],
)
def test_create_refuses_what_no_cut_swarm_would_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str], words: str
) -> None:
    with pytest.raises(AssertionError):
        create(tmp_path, capsys, *WHOLE, *more)
    err = capsys.readouterr().err
    assert words in err
    assert err.count("\n") == 1
    assert not list(tmp_path.rglob("charter.json"))


def test_the_status_says_who_holds_which_stage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = {"peer": "aa" * 32, "name": "oslo", "stage": 1, "way": None, "state": "computes"}
    two = {"peer": "bb" * 32, "name": "bergen", "stage": 2, "way": "relay", "rtt_s": 0.1, "state": "fetches its state"}
    status = {"time": 0.0, "self": "aa" * 32, "stages": 2, "wanted": 2, "step": 12, "steps": 1200, "loss": 3.25}
    head, _, names, first, second = lines("fishes", {**status, "members": [one, two], "events": []}, True, 1.0)
    assert head == "fishes: step 12 of 1200, 2 stages, 2 peers, loss 3.2500"
    assert names.split() == ["PEER", "WAY", "RTT", "UP", "DOWN", "LOST", "HEARD", "STAGE", "STATE"]
    assert first.split() == ["*", "oslo", "here", "-", "-", "-", "-", "-", "1", "computes"]
    assert second.endswith("2      fetches its state")
    waiting = {**status, "members": [{**one, "stage": None}], "step": 0}
    assert "1 peer, the first step waits for 2" in lines("fishes", waiting, True, 1.0)[0]
    assert lines("fishes", {"stages": "x", "members": [3, {}], "step": None, "wanted": {}}, True, 1.0)  # no traceback
    made = create(tmp_path, capsys, *WHOLE, "swarm.stages.count=2")
    (Path(made["folder"]) / "status.json").write_text(json.dumps({**status, "members": [one]}))
    from shoal.cli.main import main

    assert main(["swarm", "status", "fishes", "--picture", str(tmp_path / "x.svg"), "--workspace", str(tmp_path)]) == 2
    assert "a cut model has no rounds: leave it out" in capsys.readouterr().err


@pytest.mark.slow
def test_processes_as_a_user_starts_them_go_on_when_one_is_killed_and_started_again(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = a_run(make_data(tmp_path / "data"), **{"train.steps": 60, "checkpoint": {"every": 5}})
    (tmp_path / "run.yaml").write_text(dump(run))
    cut = Cut(tmp_path, peers=2, file=tmp_path / "run.yaml")
    shoal, env = [sys.executable, "-m", "shoal", "swarm", "join"], {**os.environ, "OMP_NUM_THREADS": "1"}
    started: list[subprocess.Popen[bytes]] = []

    def start(who: str, *words: str) -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen([*shoal, *words, "--workspace", str(tmp_path / who)], env=env))
        return started[-1]

    def until(true: Callable[[], bool]) -> None:
        end = time.monotonic() + 240
        while not true():
            assert time.monotonic() < end
            time.sleep(0.05)

    def steps(who: str) -> int:
        file = tmp_path / who / "runs" / "tiny" / "journal.jsonl"
        return sum(r["kind"] == "step" for r in records(file)) if file.exists() else 0

    try:
        founder, b = start("founder", "tiny"), start("b", cut.line(), "--yes", "--name", "b", *HERE)
        until(lambda: steps("b") >= 12)
        b.send_signal(signal.SIGKILL)
        assert b.wait() == -signal.SIGKILL
        again = start("b", "tiny")
        assert (founder.wait(240), again.wait(240)) == (0, 0)
    finally:
        for process in started:
            process.kill()
            process.wait()
    for who in ("founder", "b"):
        found = list(records(tmp_path / who / "runs" / "tiny" / "journal.jsonl"))
        assert [r["step"] for r in found if r["kind"] == "finished"] == [60]
        assert [r["status"] for r in found if r["kind"] == "close"][-1] == "done"
