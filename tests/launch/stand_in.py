"""A workspace with a small run and agents that only pretend: a shell script that does as $STAND_IN says."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.guard.fake import until

from shoal.launch.job import Job
from shoal.launch.local import Local
from shoal.launch.request import Request
from shoal.launch.send import request_of
from shoal.spec.run import Run

AGENT = """\
echo "node $SHOAL_NODE of $SHOAL_NODES at $SHOAL_HEAD for $SHOAL_JOB, A=$A, B=$B, token ${#SHOAL_TOKEN}"
trap 'echo told; exit 143' TERM
trap 'echo at once; exit 75' INT
case $STAND_IN in
  wait) while :; do sleep 0.02; done ;;
  *) echo "shoal: the data is gone."; exit "$STAND_IN" ;;
esac
"""


def pretend(monkeypatch: pytest.MonkeyPatch, does: str = "wait") -> None:
    """Agents leave with a code at once, or `wait` until they are told to stop."""
    monkeypatch.setattr(Request, "agent", lambda self, code: ["bash", "-c", AGENT])
    monkeypatch.setenv("STAND_IN", does)


def make_request(workspace: Path, **launch: object) -> Request:
    data = {"train": str(workspace / "data")}
    run = Run.model_validate({"name": "demo", "data": data, "train": {"steps": 20}, "launch": launch})
    return request_of(run, workspace)


def ended(job: Job) -> str:
    """The phase that it ends in."""
    return str(until(lambda: (phase := Local().states([job])[job.id].phase) != "running" and phase))
