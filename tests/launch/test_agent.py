"""Agents on several nodes: they train as one machine does, lose a node, grow, and leave with one exit code."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.launch.agents import Cluster
from tests.patience import limit
from tests.train.tiny import digest_of, make_data, make_run, train_on

from shoal import wire
from shoal.errors import UsageError
from shoal.guard.nodes.talk import HELLO
from shoal.journal.journal import Journal
from shoal.journal.rundir import RunDir
from shoal.launch import agent
from shoal.launch.agent import main
from shoal.launch.holding import hold
from shoal.spec import Run, dump, load

pytestmark = pytest.mark.usefixtures("warm_starts")
Make = Callable[..., Cluster]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Make]:
    made: list[Cluster] = []

    def make(nodes: int = 2, least: int | None = None, **changes: object) -> Cluster:
        data = tmp_path / "data"
        if not data.exists():
            make_data(data)
        settings = {"train.steps": 12, "checkpoint.every": 2, "checkpoint.read_back": "headers", **changes}
        folder = tmp_path / f"workspace-{len(made)}"
        folder.mkdir()
        made.append(Cluster(make_run(data, **settings), folder, nodes, least))
        return made[-1]

    yield make
    for one in made:
        one.close()


def digest(cluster: Cluster) -> str:
    return str(cluster.records("finished")[-1]["digest"])


def test_a_node_that_is_killed_is_replaced_and_the_run_ends_as_if_nothing_had_been(cluster: Make) -> None:
    rough = cluster(2, **{"train.steps": 12})
    rough.start_all()
    rough.wait_for("step", step=5)
    rough.agents[1].kill()
    failure = rough.wait_for("failure")
    assert failure["cause"] == "node-lost"
    assert "node 1" in failure["evidence"]
    rough.agents[1].wait()
    rough.start(1)
    assert rough.codes() == {0: 0, 1: 0}
    calm = train_on(rough.run, rough.workspace / "calm", 2)  # by the same worker, with no launcher
    assert digest(rough) == digest_of(calm)
    assert [r["world"] for r in rough.records("attempt")] == [2, 2]


@pytest.mark.slow
def test_a_rank_that_stands_still_on_another_node_is_named_and_restarted(cluster: Make) -> None:
    job = cluster(2, **{"guard.hang": "2 s", "train.steps": 30})
    job.start_all()
    job.wait_for("step", step=6)
    (attempt,) = job.records("attempt")
    os.kill(attempt["pids"][1], signal.SIGSTOP)
    hang = job.wait_for("hang")
    assert (hang["rank"], hang["stopped"]) == (1, True)
    assert job.codes() == {0: 0, 1: 0}
    assert [f["cause"] for f in job.records("failure")] == ["hang"]
    assert attempt["nodes"][0]["ranks"] == [1]


@pytest.mark.slow
def test_islands_on_two_nodes_go_on_without_one_of_them_and_take_its_replacement_in(cluster: Make) -> None:
    settings = {"fleet.islands": 2, "fleet.deterministic": True, "train.steps": 150, "checkpoint.every": 50}
    calm, rough = cluster(2, **settings), cluster(2, **settings)
    calm.start_all()
    assert calm.codes() == {0: 0, 1: 0}
    # The one that is left must not be at its end before the other has started: it takes a second for each step then.
    slowly = rough.workspace / "slowly"
    slowly.mkdir()
    rough.env = {"SHOAL_FAULT": "step:sleep=1", "SHOAL_FAULT_TOKENS": str(slowly)}
    rough.start_all()
    rough.wait_for("step", islands=[0, 1])
    tokens = [slowly / str(step) for step in range(150)]
    for token in tokens:
        token.touch()
    lost = time.time()
    far = next(r for r in rough.records("island") if r["island"] == 1)
    rough.agents[1].kill()  # a machine that dies takes all with it
    os.kill(far["agent"], signal.SIGKILL)
    rough.agents[1].wait()
    rough.wait_for("epoch", members=[0], since=lost)
    rough.start(1)
    rough.wait_for("epoch", joined=[1], since=lost)
    for token in tokens:
        token.unlink(missing_ok=True)
    assert rough.codes() == {0: 0, 1: 0}
    assert digest(rough) == digest(calm)
    assert len(rough.records("attempt")) == 1, "nobody but the lost one was restarted"


@pytest.mark.slow
def test_with_fewer_nodes_than_asked_it_starts_and_grows_when_another_comes(cluster: Make) -> None:
    job = cluster(2, least=1, **{"train.steps": 400})
    job.start(0)
    job.wait_for("step", step=2, timeout_s=120)
    job.start(1)
    job.wait_for("attempt", attempt=1)
    assert [r["world"] for r in job.records("attempt")] == [1, 2]
    job.wait_for("start", attempt=1)
    job.agents[0].send_signal(signal.SIGTERM)
    assert set(job.codes().values()) == {143}
    assert not job.records("failure")


@pytest.mark.slow
def test_a_number_of_nodes_that_the_run_cannot_be_laid_over_leaves_one_out(cluster: Make) -> None:
    job = cluster(4, least=2)
    for node in (0, 1, 2):  # the fourth never comes, and a batch of 16 has no thirds
        job.start(node)
    assert job.codes() == {0: 0, 1: 0, 2: 0}
    assert [r["world"] for r in job.records("attempt")] == [2]
    assert "3 nodes are here, and the run does not go over 3 processes" in job.log(0).read_text()


@pytest.mark.slow
def test_told_to_stop_all_save_and_go_on_later_and_the_first_node_lost_is_found_again(cluster: Make) -> None:
    job = cluster(2, **{"train.steps": 200})
    job.start_all()
    job.wait_for("step", step=3)
    job.agents[0].send_signal(signal.SIGUSR2)  # as Slurm warns
    assert job.codes() == {0: 143, 1: 143}
    saved = job.records("checkpoint")[-1]["step"]
    assert saved >= 3
    job.start_all()
    job.wait_for("start", attempt=1)
    assert job.records("start")[-1]["step"] == saved
    # And the first node is lost: the others find the one that takes its place.
    job.wait_for("step", step=saved + 3)
    job.agents[0].kill()
    job.agents[0].wait()
    job.start(0)
    assert job.codes() == {0: 0, 1: 0}
    assert [r["cause"] for r in job.records("failure")] == ["supervisor-lost"]
    assert job.records("finished")


@pytest.mark.slow
def test_a_node_told_to_leave_lets_all_save_and_its_replacement_goes_on(cluster: Make) -> None:
    job = cluster(2, **{"train.steps": 60, "checkpoint.every": 0})
    job.start_all()
    job.wait_for("step", step=3)
    job.agents[1].send_signal(signal.SIGTERM)
    assert job.agents[1].wait(limit(60)) == 143
    job.start(1)
    job.wait_for("start", attempt=1)
    assert job.records("start")[-1]["step"] >= 3, "nothing was lost, although no checkpoint was due"
    assert not job.records("failure")
    assert job.codes() == {0: 0, 1: 0}


def test_a_wrong_run_file_ends_every_node_with_2(cluster: Make) -> None:
    job = cluster(2, **{"mesh.tp": 3})
    job.start_all()
    assert job.codes() == {0: 2, 1: 2}
    assert "mesh" in job.log(0).read_text()
    assert "node 0 has ended: " in job.log(1).read_text()
    assert "mesh" in job.log(1).read_text()


@pytest.mark.slow
def test_nodes_that_share_no_disk_are_refused_unless_checkpoints_go_elsewhere(cluster: Make, tmp_path: Path) -> None:
    job = cluster(2)
    job.start(0)
    job.start(1, workspace=tmp_path / "elsewhere")
    assert job.codes() == {0: 78, 1: 78}
    assert "does not see" in job.log(0).read_text()
    remote = {"checkpoint.remote": f"file://{tmp_path / 'bucket'}", "checkpoint.local": False, "train.steps": 300}
    apart = cluster(2, **remote)
    apart.start(0)
    apart.start(1, workspace=tmp_path / "far")
    apart.wait_for("step", step=3)
    apart.agents[0].send_signal(signal.SIGTERM)
    assert apart.codes() == {0: 143, 1: 143}
    far = apart.run_dir.logs / "attempt-000" / "rank-00001.log"
    assert "stopped after step" in far.read_text(), "its lines were sent to node 0"


@pytest.mark.slow
def test_a_stranger_disturbs_nobody_and_nodes_that_are_one_machine_share_its_cores(cluster: Make) -> None:
    """Two claims about one run: a stranger who does not know the token learns nothing; threads are divided."""
    job = cluster(2, **{"resources.threads": "auto"})
    job.start(0)
    job.wait_for("open")
    with socket.create_connection(("127.0.0.1", job.port)) as sock, pytest.raises((wire.Broken, OSError)):
        wire.greet(sock, b"x" * 32, HELLO)
    job.start(1)
    assert job.codes() == {0: 0, 1: 0}
    cores = len(os.sched_getaffinity(0))
    assert load(job.run_dir.spec_file).run.resources.threads == max(1, cores // 2)


@pytest.mark.parametrize(
    ("env", "says"),
    [
        ({"SHOAL_NODE": "2", "SHOAL_NODES": "2"}, "counted from 0"),
        ({"SHOAL_NODE": "one"}, "not a number"),
        ({"SHOAL_NODE": "1", "SHOAL_NODES": "2"}, "SHOAL_HEAD and SHOAL_TOKEN"),
    ],
)
def test_an_agent_that_does_not_know_who_it_is_says_so(
    env: dict[str, str], says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert main(["run.yaml"]) == 2
    assert says in capsys.readouterr().err


def test_an_earlier_start_of_the_same_job_is_waited_for_another_one_is_not(tmp_path: Path) -> None:
    run_dir = RunDir.of("tiny", tmp_path)
    run_dir.path.mkdir(parents=True)
    Journal(run_dir.journal_file).append("open", session=0, pid=1, host="n1", job="7")
    with open(run_dir.pid_file, "w") as other, ExitStack() as held:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(UsageError, match="already running"):
            hold(held, run_dir, "8")
        freed = threading.Timer(0.3, lambda: fcntl.flock(other, fcntl.LOCK_UN))
        freed.start()
        hold(held, run_dir, "7")
        assert freed.finished.is_set()


def test_an_agent_gives_a_longer_run_to_its_workers_and_asks_how_its_rate_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[Run] = []
    monkeypatch.setattr(agent, "supervise", lambda run_dir, run, world, **more: started.append(run) or 0)
    run = make_run(make_data(tmp_path / "data"), **{"train.steps": 4})
    file, run_dir = tmp_path / "run.yaml", RunDir.of(run.name, tmp_path)
    file.write_text(dump(run))
    start = [str(file), "--workspace", str(tmp_path)]
    assert main(start) == 0
    journal = Journal(run_dir.journal_file)
    for step in range(1, 5):
        journal.append("step", step=step, loss=1.0, begin=0.0, tokens=1)
    longer = run.model_copy(update={"train": run.train.model_copy(update={"steps": 9})})
    file.write_text(dump(longer))
    assert main(start) == 2
    assert "at step 4 would jump from 0.0003 to " in capsys.readouterr().err
    file.write_text(dump(load(file, ["train.schedule.prolong=keep"]).run))
    for _ in range(2):  # a scheduler starts the same job again: nothing changes a second time
        assert main(start) == 0
        known = load(run_dir.spec_file).run
        assert (known.steps, known) == (9, started[-1])
        assert [(p.until, p.steps, p.then) for p in known.train.schedule.past] == [(4, 4, "keep")]
        journal.append("step", step=6, loss=1.0, begin=0.0, tokens=1)
