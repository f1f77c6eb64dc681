"""Any class of transformers (`model.hf`), cut by its own plan over two ranks and NCCL: the curve of one process.

And `shoal check` on the GPU. A part of `make test-gpu` (tests/gpu/suite.py).
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal.journal import journal
from shoal.journal.rundir import RunDir
from shoal.spec.run import Run
from tests.gpu.crew import Crew
from tests.gpu.here import DEVICE, needs_device
from tests.gpu.train_apart import task
from tests.model.hf_kinds import write_config
from tests.model.hf_layouts import asked
from tests.train.matrix import FLOAT32, Job
from tests.train.tiny import losses_of, make_data, steps_of

pytestmark = [needs_device, pytest.mark.filterwarnings("ignore")]

LAYOUTS = {"1": (1, ()), "tp 2": (2, ("mesh.tp=2",)), "dp_shard 2": (2, ("mesh.dp_shard=2",))}
CUT = {  # by tp 2: parameters, of so many (docs/guide/hf-models.md)
    "gemma3_text": (15, 28),
    "gemma2": (15, 24),
    "phi3": (10, 15),
    "qwen3_next": (35, 66),
    "deepseek_v3": (10, 30),
    "granite": (16, 21),
    "olmo2": (16, 25),
    "cohere2": (15, 18),
}
TIED = ("gemma3_text", "gemma2", "cohere2")  # whose table is cut as the head
CASES = [(kind, "tp 2") for kind in CUT] + [(kind, "dp_shard 2") for kind in ("gemma3_text", "falcon_h1", "mamba2")]


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, crew: Crew) -> Path:
    """All that is asked for is being trained: the references first."""
    folder = tmp_path_factory.mktemp("hf")
    make_data(folder / "data")
    items = [item for item in request.session.items if item.path == request.path]
    cases = [item.callspec.params for item in items if hasattr(item, "callspec")]
    for kind in dict.fromkeys(c["kind"] for c in cases):
        write_config(folder / kind, kind)
        add(crew, folder, kind, "1")
    for c in cases:
        add(crew, folder, c["kind"], c["layout"])
    return folder


def add(crew: Crew, folder: Path, kind: str, layout: str) -> None:
    world, mesh = LAYOUTS[layout]
    name = name_of(kind, layout)
    run: Run = asked(folder, kind, name, f"resources.device={DEVICE}", "train.kernels=plain", *mesh)
    crew.add(task(folder, Job(run, world)))


def name_of(kind: str, layout: str) -> str:
    return f"{kind}-{layout}".replace(" ", "-").replace("_", "-")


@pytest.mark.parametrize(("kind", "layout"), CASES)
def test_a_class_of_transformers_trains_on_the_curve_of_one_process(
    kind: str, layout: str, folder: Path, crew: Crew, record_property: pytest.RecordProperty
) -> None:
    for each in ("1", layout):
        crew.done(name_of(kind, each))
    alone, mesh = (RunDir.of(name_of(kind, each), folder) for each in ("1", layout))
    loss = apart(losses_of(mesh), losses_of(alone))
    norm = apart(norms_of(mesh), norms_of(alone))
    cut = [r["why"] for r in journal.records(mesh.journal_file) if r["kind"] == "decision" and r["key"] == "mesh.tp"]
    record_property("told", f"loss {loss:.1e}, norm {norm:.1e}; {''.join(cut).partition('cuts ')[2] or 'sharded'}")
    assert loss < FLOAT32.loss
    assert norm < FLOAT32.norm
    if layout == "tp 2":
        parameters, of = CUT[kind]
        if kind not in TIED and not names_the_table(folder / kind):
            parameters -= 1
        assert f"cuts {parameters} of {of} parameters" in "".join(cut)


def names_the_table(folder: Path) -> bool:
    """Whether the plan says how the embedding is cut: transformers 5.22 does, and 5.17 does not."""
    import torch
    import transformers

    with torch.device("meta"):
        net = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(folder))
    return any("embed_tokens" in name for name in net.tp_plan)


def norms_of(run_dir: RunDir) -> np.ndarray:
    return np.array([r["grad_norm"] for r in steps_of(run_dir)])


def apart(a: np.ndarray, b: np.ndarray) -> float:
    assert len(a) == len(b) > 0
    return float(np.max(np.abs(a / b - 1)))


def test_a_run_is_checked_on_the_device(folder: Path, record_property: pytest.RecordProperty) -> None:
    """Repeated, resumed, on two ranks and in micro-batches, by the command that people type."""
    run = {
        "name": "small",
        "model": {"dim": 32, "layers": 2, "heads": 4, "kv_heads": 2, "ffn_dim": 64},
        "data": {"train": "data", "seq_len": 32},
        "train": {"steps": 10, "batch": 4},
        "resources": {"device": DEVICE},
    }
    (folder / "small.yaml").write_text(json.dumps(run))  # which is YAML, too
    command = [sys.executable, "-m", "shoal", "check", "small.yaml", "--json"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    rows: list[dict[str, Any]] = json.loads(done.stdout)["rows"]
    told = "; ".join(f"{row['name']}: {row['found']}" for row in rows)
    record_property("told", told)
    assert len(rows) == 6
