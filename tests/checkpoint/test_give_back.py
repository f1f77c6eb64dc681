"""Memory that killed workers have left is given back by whoever outlives them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.checkpoint.nodes import leave
from tests.patience import limit

from shoal import checkpoint
from shoal.checkpoint import Name, ledger
from shoal.checkpoint.memory.give_back import give_back, give_back_saved
from shoal.checkpoint.memory.ram import hold, memory_folder
from shoal.checkpoint.store import Folder


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SHOAL_MEMORY", str(tmp_path / "ram"))
    (tmp_path / "runs" / "myrun").mkdir(parents=True)
    return tmp_path / "runs" / "myrun"


def killed(run: Path, step: int, node: int = 0) -> Path:
    """What a worker that was killed leaves: a snapshot that nobody holds."""
    held = hold(memory_folder(run, node))
    leave(held.folder, Name(step, 1), 0, world=1)
    held.close()
    return held.folder


def saved(run: Path, step: int) -> Folder:
    disk = Folder(run / "checkpoints")
    ledger.claim([disk], -1)
    checkpoint.save(disk, step, {"model.w": torch.ones(2)}, {}, term=1)
    return disk


def test_what_nobody_uses_goes_and_what_somebody_uses_stays(run: Path) -> None:
    used, left = hold(memory_folder(run, 0)), killed(run, 10, node=1)
    other = killed(run.parent / "another", 10)
    assert not give_back(run, wait_s=0.0)
    assert used.folder.exists()
    assert not left.exists()
    used.close()
    assert give_back(run, wait_s=0.0)
    assert not used.folder.parent.exists()
    assert other.exists(), "of another run, which may go on"
    assert give_back(run.parent / "never there", wait_s=0.0)


@pytest.mark.parametrize(("step", "stays"), [(9, False), (10, False), (11, True)])
def test_a_step_that_the_disk_does_not_have_stays_for_the_next_start(run: Path, step: int, stays: bool) -> None:
    disk, left = saved(run, 10), killed(run, step)
    assert give_back_saved(run, disk, wait_s=0.0) != stays
    assert left.exists() == stays


def test_the_shell_of_a_job_gives_it_back_whatever_is_in_it(run: Path, tmp_path: Path) -> None:
    left = killed(run, 11)
    (tmp_path / "link").symlink_to(tmp_path / "runs")
    command = [sys.executable, "-m", "shoal.checkpoint.memory.give_back", str(tmp_path / "link" / "myrun")]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=limit(60))
    assert (done.stdout, done.stderr) == ("", "")
    assert not left.exists()
