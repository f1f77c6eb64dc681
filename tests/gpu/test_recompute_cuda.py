"""Recomputation on a GPU: every mode, in bf16, eager and compiled, follows the float32 eager curve, and takes less
memory than the one before. `pytest -s` shows the table, with the plan's prediction beside what torch has allocated."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from shoal.journal.rundir import RunDir
from tests.train.tiny import losses_of, make_data

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU here")

MODES = ("none", "selective", "attention", "full")
# Activations of 16k tokens outweigh the state of 100 million parameters many times.
LARGE = {
    "resources.device": "cuda",
    "model.dim": 1024,
    "model.layers": 8,
    "model.heads": 16,
    "model.kv_heads": 8,
    "model.ffn_dim": 2816,
    "data.seq_len": 2048,
    "train.steps": 10,
    "train.batch": 8,
    "train.optimizer.lr": 1e-3,
    "mesh.micro_batch": 8,
}
TOLERANCE = 1e-2  # of a loss in bf16 against float32; what one step's rounding becomes over ten


class Trained(NamedTuple):
    losses: np.ndarray
    peak_bytes: int
    planned_bytes: int
    moment: str


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recompute")
    make_data(folder / "data", documents=8000)
    return folder


@pytest.fixture(scope="module")
def runs(workspace: Path) -> dict[str, Trained]:
    """All side by side: each is a process with a peak of its own, and starting is what takes time."""
    asked = {"fp32": {"train.precision": "fp32", "mesh.recompute": "none"}}
    for compiled, mode in product((False, True), MODES):
        asked[name_of(compiled, mode)] = {
            "train.precision": "bf16",
            "train.compile": compiled,
            "mesh.recompute": mode,
        }
    with ThreadPoolExecutor(len(asked)) as pool:
        results = pool.map(lambda item: trained(workspace, *item), asked.items())
        return dict(zip(asked, results, strict=True))


@pytest.fixture(scope="module")
def exact(runs: dict[str, Trained]) -> Trained:
    return runs["fp32"]


@pytest.fixture(scope="module")
def half(runs: dict[str, Trained]) -> dict[tuple[bool, str], Trained]:
    """By (compiled, mode)."""
    return {key: runs[name_of(*key)] for key in product((False, True), MODES)}


def name_of(compiled: bool, mode: str) -> str:
    return f"bf16-{compiled}-{mode}"


def trained(workspace: Path, name: str, changes: dict[str, Any]) -> Trained:
    """In a process of its own: peaks of memory and compiled code are a process's."""
    command = [sys.executable, "-m", "tests.gpu.worker_alone", str(workspace)]
    out = subprocess.run(
        [*command, json.dumps({**LARGE, "name": name, **changes})], capture_output=True, text=True, timeout=600
    )
    assert out.returncode == 0, out.stderr
    return Trained(losses_of(RunDir.of(name, workspace)), **json.loads(out.stdout.splitlines()[-1]))


@pytest.mark.timeout(1800)
def test_every_mode_follows_the_float32_curve(exact: Trained, half: dict[tuple[bool, str], Trained]) -> None:
    assert exact.losses[-1] < exact.losses[0] - 0.1  # it learns, so the curves have something to agree on
    curves = {f"bf16, {'compiled' if c else 'eager'}, {mode}": run for (c, mode), run in half.items()}
    print(f"\n{'':<26} {'peak GB':>8} {'plan GB':>8} {'ratio':>6}   largest relative difference to float32")
    for name, run in {"float32, eager, none": exact, **curves}.items():
        off = np.max(np.abs(run.losses / exact.losses - 1))
        sizes = f"{run.peak_bytes / 1e9:>8.2f} {run.planned_bytes / 1e9:>8.2f}"
        print(f"{name:<26} {sizes} {run.peak_bytes / run.planned_bytes:>6.2f}   {off:.1e}")
    for run in half.values():
        assert np.max(np.abs(run.losses / exact.losses - 1)) < TOLERANCE


@pytest.mark.parametrize("compiled", [False, True])
def test_the_more_is_recomputed_the_less_memory(half: dict[tuple[bool, str], Trained], compiled: bool) -> None:
    peaks = [half[compiled, mode].peak_bytes for mode in MODES]
    assert sorted(peaks, reverse=True) == peaks
    # Eagerly attention among documents is compiled code, whose insides torch does not see: it is computed again.
    assert len(set(peaks)) == len(peaks) - (not compiled)
