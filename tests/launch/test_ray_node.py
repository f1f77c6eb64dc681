"""The actor of a Ray node, without Ray: it keeps an agent, tells what that says and how it ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.guard.fake import alive, until

from shoal.journal.journal import Journal
from shoal.launch.bundle import Bundle
from shoal.launch.ray.node import Node

TAR = Bundle.of("name: demo\n", None).tar()


@pytest.fixture
def order(tmp_path: Path) -> dict[str, Any]:
    journal = tmp_path / "journal.jsonl"
    return {"code": str(tmp_path / "bundles" / "0123"), "journal": str(journal), "env": {"A": "1 two"}, "script": ""}


def heard(node: Node) -> tuple[list[str], int]:
    lines: list[str] = []

    def ended() -> dict[str, Any] | None:
        said = node.poll(0.2)
        lines.extend(said["lines"])
        return said if said["code"] is not None else None

    return lines, until(ended)["code"]


def test_an_agent_runs_where_the_code_is_and_its_last_words_are_heard(order: dict[str, Any]) -> None:
    node = Node(1)
    assert node.start({**order, "script": 'cat run.yaml; echo "$A" >&2; exit 75'}, TAR) is None
    assert heard(node) == (["name: demo", "1 two"], 75)
    again = Node(1)  # on a disk that they share the code is there already
    assert again.start({**order, "script": "sleep 60 & exit 78"}, TAR) is None
    assert heard(again) == ([], 78)  # though what it left behind holds the pipe
    again.kill()


def test_it_is_told_to_stop_and_killed(order: dict[str, Any]) -> None:
    node = Node(1)
    node.start({**order, "script": "trap 'exit 143' TERM; echo up; while :; do sleep 0.02; done"}, TAR)
    until(lambda: node.poll(0.2)["lines"])
    node.tell(signal.SIGTERM)
    assert heard(node) == ([], 143)
    node.start({**order, "script": "trap '' TERM; echo up; exec sleep 60"}, TAR)
    until(lambda: node.poll(0.2)["lines"])
    node.tell(signal.SIGTERM)
    node.kill()
    assert heard(node) == ([], -signal.SIGKILL)


def test_a_folder_that_cannot_be_written_is_a_sentence(order: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    wrong = Node(0).start({**order, "code": str(tmp_path / "file" / "0123")}, TAR)
    assert wrong is not None
    assert "cannot write the code of the run" in wrong


def test_only_the_first_node_tells_how_far_the_run_has_come(order: dict[str, Any]) -> None:
    journal = Journal(Path(order["journal"]))
    for step in (1, 2, 3):
        journal.append("step", step=step)
    journal.append("warning", text="x")
    journal.close()
    for number, step in ((0, 3), (1, 0)):
        node = Node(number)
        node.start({**order, "script": "exit 0"}, TAR)
        assert until(lambda node=node: (said := node.poll(0.2))["code"] is not None and said)["step"] == step


def test_an_agent_dies_with_its_actor(order: dict[str, Any]) -> None:
    program = (
        "import json, sys\nfrom shoal.launch.ray.node import Node\norder = json.loads(sys.argv[1])\n"
        "node = Node(1)\nnode.start(order, bytes.fromhex(sys.argv[2]))\n"
        "while True:\n    for line in node.poll(1.0)['lines']: print(line, flush=True)\n"
    )
    inner = f'exec {sys.executable} -m shoal.guard.tied "$PPID" bash -c "echo \\$\\$; exec sleep 60"'
    told = json.dumps({**order, "script": inner})
    actor = subprocess.Popen([sys.executable, "-c", program, told, TAR.hex()], stdout=subprocess.PIPE)
    assert actor.stdout is not None
    agent = int(actor.stdout.readline())
    assert alive(agent)
    os.kill(actor.pid, signal.SIGKILL)
    actor.wait()
    until(lambda: not alive(agent))
