"""A node is lost with all that is on it, and nothing is on disk: the next node's memory has a copy."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from shoal.checkpoint.memory.ram import memory_folder
from shoal.journal import journal
from shoal.journal.rundir import RunDir
from shoal.spec import dump, load
from tests.patience import Stopwatch, limit
from tests.services import free_ports
from tests.train.tiny import make_data, make_run, steps_of

pytestmark = pytest.mark.slow


def node(number: int, nodes: int, port: int, workspace: Path, *overrides: str) -> subprocess.Popen[bytes]:
    """torchrun on one of several nodes that are played on this machine; each has a folder of memory of its own."""
    command = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={nodes}", f"--node-rank={number}"]
    command += ["--nproc-per-node=1", "--master-addr=127.0.0.1", f"--master-port={port}", "-m", "shoal.train"]
    log = open(workspace / f"node-{number}-of-{nodes}.log", "wb")  # noqa: SIM115  the child keeps it
    return subprocess.Popen([*command, "run.yaml", *overrides], cwd=workspace, stdout=log, stderr=log)


def everything_of(agent: subprocess.Popen[bytes], memory: Path) -> list[psutil.Process]:
    """The agent, its worker, the worker's persister and keeper: all that a power cut would end."""
    family = [psutil.Process(agent.pid), *psutil.Process(agent.pid).children(recursive=True)]
    keepers = [p for p in psutil.process_iter(["cmdline"]) if str(memory) in (p.info["cmdline"] or [])]
    return [*family, *keepers]


def test_a_lost_node_costs_the_steps_whose_copies_were_under_way(tmp_path: Path) -> None:
    make_data(tmp_path / "data")
    changes: dict[str, object] = {"name": "lost", "train.steps": 100_000, "checkpoint.every": 0, "checkpoint.memory": 1}
    changes |= {"checkpoint.background": True}
    run = make_run(tmp_path / "data", **changes)
    (tmp_path / "run.yaml").write_text(dump(run))
    run_dir = RunDir.of("lost", tmp_path)
    (port, again) = free_ports(2)
    agents = [node(n, 2, port, tmp_path) for n in (0, 1)]
    try:
        await_step(run_dir, 20, agents, tmp_path)
        time.sleep(3.0)  # steps take milliseconds here, and the first copy is under way for longer than twenty of them
        victims = everything_of(agents[1], memory_folder(run_dir.path, 1))
        assert any("shoal.checkpoint.memory.keeper" in (p.cmdline() or []) for p in victims)
        assert any("shoal.checkpoint.persister" in (p.cmdline() or []) for p in victims)
        for process in victims:
            process.send_signal(signal.SIGKILL)
        shutil.rmtree(memory_folder(run_dir.path, 1))
        agents[0].send_signal(signal.SIGKILL)  # a scheduler would end it and start anew on what is left
        for process in psutil.Process(agents[0].pid).children(recursive=True):
            process.send_signal(signal.SIGKILL)
    finally:
        for agent in agents:
            agent.kill()
            agent.wait()
    done = steps_of(run_dir)[-1]["step"]
    assert not (run_dir.checkpoints / f"step-{done:08d}-term-1").exists(), "there is nothing on disk"

    stop = done + 10
    last = node(0, 1, again, tmp_path, f"train.steps={stop}", "train.schedule.prolong=keep")
    assert last.wait(limit(180)) == 0, (tmp_path / "node-0-of-1.log").read_text()[-3000:]
    start = [r for r in journal.records(run_dir.journal_file) if r["kind"] == "start"][-1]
    assert start["world"] == 1
    # The step that was not finished, and what was on its way to the other node: moments, however many steps these are.
    at = {r["step"]: r["t"] for r in steps_of(run_dir) if r["attempt"] == 0}
    assert at[done] - at[start["resumed_from"]] < limit(2.0)
    assert steps_of(run_dir)[-1]["step"] == stop
    past = load(run_dir.spec_file).run.train.schedule.past
    assert [(p.until, p.then) for p in past] == [(done, "keep")]
    assert len({r["lr"] for r in steps_of(run_dir) if r["step"] > done}) == 1
    assert not memory_folder(run_dir.path, 0).exists(), "a finished run gives the memory back"


def await_step(run_dir: RunDir, step: int, agents: list[subprocess.Popen[bytes]], workspace: Path) -> None:
    watch = Stopwatch()
    while watch.quiet_s() < 200:
        if run_dir.journal_file.exists() and any(r["step"] >= step for r in steps_of(run_dir)):
            return
        ended = [i for i, agent in enumerate(agents) if agent.poll() is not None]
        assert not ended, (workspace / f"node-{ended[0]}-of-2.log").read_text()[-3000:]
        time.sleep(0.2)
    raise AssertionError(f"step {step} was not reached")
