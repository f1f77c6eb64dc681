"""The built wheel, installed outside of the repository, trains with own code: nothing is found by luck in src."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.own.test_own_code import EXAMPLE
from tests.train.tiny import make_data

ROOT = Path(__file__).parents[2]
SCRIPT = """
import shoal, sys
assert shoal.__file__.startswith(sys.argv[1]), shoal.__file__
with shoal.session("run.yaml") as s:
    losses = [s.step()["loss"] for _ in s.steps()]
print(len(losses), *shoal.checkpoints("runs/wheel"))
"""
RUN = """
name: wheel
model: {dim: 32, layers: 2, heads: 4, kv_heads: 2, ffn_dim: 64}
data: {train: data, seq_len: 32}
train: {steps: 3, batch: 8}
own: {block: mine:Block, objective: mine:Loss, hooks: [mine:Norms], settings: {price: 0.01}}
resources: {device: cpu, processes: 1, threads: 1}
track: {mlflow: false}
"""


@pytest.mark.slow
def test_the_wheel_trains_with_own_code_outside_of_the_repository(tmp_path: Path) -> None:
    uv, there, wheels = Path(sys.executable).with_name("uv"), tmp_path / "installed", tmp_path / "wheels"
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "RANK", "WORLD_SIZE")}
    for command in (
        [uv, "build", "--wheel", "--no-build-isolation", "--python", sys.executable, "--out-dir", wheels, ROOT],
        [uv, "pip", "install", "--quiet", "--no-deps", "--target", there],
    ):
        found = [] if command[1] == "build" else list(wheels.glob("*.whl"))
        subprocess.run([*map(str, [*command, *found])], check=True, capture_output=True, env=environment)
    make_data(tmp_path / "data")
    (tmp_path / "run.yaml").write_text(RUN)
    (tmp_path / "mine.py").write_text(EXAMPLE.read_text())
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "script.py", str(there)],
        cwd=tmp_path,
        env={**environment, "PYTHONPATH": str(there)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines()[-1] == "3 3"
