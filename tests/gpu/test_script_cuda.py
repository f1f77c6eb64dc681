"""The probe in a script on a GPU: its losses come without a wait for the device, and no bit is another."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from shoal.journal.journal import records

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU here")

STEPS = 60
SCRIPT = f"""
import sys, torch
torch.manual_seed(0)
torch.use_deterministic_algorithms(True)
model = torch.nn.Sequential(torch.nn.Linear(512, 2048), torch.nn.Dropout(0.1), torch.nn.Linear(2048, 512)).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
losses = []
for step in range({STEPS}):
    if step == 5:
        torch.cuda.set_sync_debug_mode("error")  # whatever waits for the device raises
    for _ in range(2):
        x = torch.randn(1024, 512, device="cuda")
        loss = (model(x) - x).square().mean() / 2
        loss.backward()
        losses.append(loss.detach())
    optimizer.step()
    optimizer.zero_grad()
torch.cuda.set_sync_debug_mode("default")
given = torch.stack(losses).double().view(-1, 2).sum(1).tolist()
torch.save({{"model": model.state_dict(), "optimizer": optimizer.state_dict(), "given": given}}, sys.argv[1])
"""


def made(folder: Path, name: str, *options: str) -> bytes:
    words = ["run", "--workspace", str(folder), "--name", name, "track.mlflow=false", "guard.restarts=0", *options]
    script, out = folder / "train.py", folder / name
    script.write_text(SCRIPT)
    out.mkdir()
    subprocess.run([sys.executable, "-m", "shoal", *words, str(script), str(out / "model.pt")], check=True)
    return (out / "model.pt").read_bytes()


def test_the_probe_waits_for_no_device_and_changes_no_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    one = "--processes=1"
    assert made(tmp_path, "on", one) == made(tmp_path, "off", one, "--no-probe")
    given = torch.load(tmp_path / "on" / "model.pt")["given"]
    steps = [r for r in records(tmp_path / "runs" / "on" / "journal.jsonl") if r["kind"] == "step"]
    assert sum(step.get("steps", 1) for step in steps) == STEPS
    assert [step["loss"] for step in steps] == pytest.approx([given[step["step"] - 1] for step in steps], abs=1e-6)
