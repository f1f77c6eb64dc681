"""`shoal drill` of a script: broken by real signals, in copies of its folder, and judged by its losses and files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shoal.cli.main import main

pytestmark = pytest.mark.usefixtures("warm_starts")
# Steps that wait, so that there is time to break them; what one computes follows from its number and the state.
SCRIPT = """
import argparse, os, time
import torch
parser = argparse.ArgumentParser()
parser.add_argument("--resume")
args = parser.parse_args()
torch.manual_seed(0)
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
first = 0
if args.resume:
    saved = torch.load(args.resume)
    model.load_state_dict(saved["model"])
    OPTIMIZER
    first = saved["step"]
for step in range(first, 40):
    torch.manual_seed(step)
    x = torch.randn(4, 8)
    (model(x) - x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.05)
    if (step + 1) % 5 == 0:
        os.makedirs("out", exist_ok=True)
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
        torch.save(state, f"out/step-{step + 1:04d}.pt")
"""
RUN = """
name: s
script:
  path: train.py
  processes: 1
  resume: [--resume, "{checkpoint}"]
  checkpoints: out/*.pt
guard: {backoff_s: 0.01}
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "train.py").write_text(SCRIPT.replace("OPTIMIZER", 'optimizer.load_state_dict(saved["optimizer"])'))
    (tmp_path / "run.yaml").write_text(RUN)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--scenario", "nan"], "nan does not apply to a script"),
        (["--scenario", "kill,bitflip"], "bitflip does not apply to a script"),
        (["--scenario", "explode"], "there is no scenario 'explode'"),
        (["--pace", "0.5"], "--pace makes Shoal's own steps longer"),
        (["--baseline", "runs/s"], "--baseline is for Shoal's own training"),
        (["script.probe=false"], "without the probe nobody sees steps"),
    ],
)
def test_what_needs_steps_of_shoals_own_is_refused_before_anything_is_started(
    words: list[str], said: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["drill", "run.yaml", *words]) == 2
    assert said in capsys.readouterr().err
    assert sorted(p.name for p in place.iterdir()) == ["run.yaml", "train.py"]


@pytest.mark.slow
@pytest.mark.parametrize(("saves_all", "scenario"), [(True, "kill,stop,preempt"), (False, "kill")])
def test_a_script_that_is_broken_ends_and_it_is_said_whether_with_the_same_losses(
    saves_all: bool, scenario: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if not saves_all:
        (place / "train.py").write_text(SCRIPT.replace("OPTIMIZER", "pass"))
    assert main(["drill", "run.yaml", "--scenario", scenario, "--seed", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [fault["kind"] for fault in found["faults"]] == scenario.split(",")
    assert all(fault["detection_s"] is not None for fault in found["faults"])
    assert (found["passed"], found["steps"], found["losses_compared"]) == (True, 40, 40)
    changed = set(found["files"]["others"]) - set(found["files"]["same_tensors"])
    if saves_all:
        assert (found["losses_differ_from"], changed) == (None, set())
    else:  # it forgets its moments
        assert found["losses_differ_from"] is not None
        assert changed
    assert found["files"]["compared"] == 8
    assert sorted(p.name for p in place.iterdir()) == ["run.yaml", "train.py"]  # nothing of it is left
