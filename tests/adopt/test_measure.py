"""Measured: what the losses of a script say about what was found by reading it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shoal.adopt.doctor import examine
from shoal.adopt.finding import CONFIRMED, REFUTED, UNCONFIRMED
from shoal.adopt.measured import Measured, Row
from shoal.adopt.verdicts import judged
from shoal.cli.main import main
from shoal.script.shadow import shadow

SCRIPT = """\
import argparse
import os

import torch

parser = argparse.ArgumentParser()
parser.add_argument("--resume")
args = parser.parse_args()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.2), torch.nn.Linear(16, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
first = 0
if args.resume:
    saved = torch.load(args.resume)
    model.load_state_dict(saved["model"])
    torch.set_rng_state(saved["rng"])
    first = saved["step"]
for step in range(first, 12):
    x = torch.randn(16, 8)
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if (step + 1) % 4 == 0:
        state = {"model": model.state_dict(), "rng": torch.get_rng_state(), "step": step + 1}
        torch.save(state, "last.tmp")
        os.replace("last.tmp", "last.pt")
"""
SAME = Row("repeated", True, "the same")
ALONE = Row("two processes", None, "it runs")
UNKNOWN = Row("resumed", None, "not measured")


def verdicts(folder: Path, text: str, *rows: Row) -> dict[str, str]:
    (folder / "train.py").write_text(text)
    return {f.rule: f.confidence for f in judged(examine(folder / "train.py"), Measured(list(rows))).findings}


def test_losses_that_differ_confirm_what_fits_them(tmp_path: Path) -> None:
    both = SCRIPT.replace(' "rng": torch.get_rng_state(),', "").replace('    torch.set_rng_state(saved["rng"])\n', "")
    at_once, later = Row("resumed", False, "differ", 0), Row("resumed", False, "differ", 1)
    parts = ("checkpoint-optimizer", "checkpoint-rng")
    assert verdicts(tmp_path, both, SAME, UNKNOWN, ALONE) == dict.fromkeys(parts, UNCONFIRMED)
    found = verdicts(tmp_path, both, SAME, at_once, ALONE)
    assert (found["checkpoint-rng"], found["checkpoint-optimizer"]) == (CONFIRMED, UNCONFIRMED)
    found = verdicts(tmp_path, both, SAME, later, ALONE)
    assert (found["checkpoint-rng"], found["checkpoint-optimizer"]) == (UNCONFIRMED, CONFIRMED)
    assert verdicts(tmp_path, both, SAME, Row("resumed", True, "same"), ALONE) == dict.fromkeys(parts, REFUTED)


def test_a_script_that_never_repeats_cannot_confirm_how_it_resumes(tmp_path: Path) -> None:
    text = SCRIPT.replace("torch.manual_seed(0)\n", "")
    differ = Row("repeated", False, "differ"), Row("resumed", False, "differ", 0)
    assert verdicts(tmp_path, text, *differ, ALONE) == {"no-seed": CONFIRMED, "checkpoint-optimizer": UNCONFIRMED}


def test_what_no_rule_has_found_is_found_by_its_losses(tmp_path: Path) -> None:
    good = SCRIPT.replace('{"model"', '{"optimizer": optimizer.state_dict(), "model"').replace(
        "    first = saved", '    optimizer.load_state_dict(saved["optimizer"])\n    first = saved'
    )
    assert verdicts(tmp_path, good, SAME, UNKNOWN, ALONE) == {}
    assert verdicts(tmp_path, good, Row("repeated", False, "x"), UNKNOWN, ALONE) == {"not-repeated": CONFIRMED}
    assert verdicts(tmp_path, good, SAME, Row("resumed", False, "x", 2), ALONE) == {"not-resumed": CONFIRMED}


def test_a_shadow_has_copies_and_leaves_checkpoints_of_old_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.script.shadow.MOST_COPIED", 10)
    folder = tmp_path / "mine"
    (folder / "data").mkdir(parents=True)
    (folder / "runs").mkdir()
    (folder / "runs" / "x").write_text("x")
    (folder / "train.py").write_text("x = 1\n")
    (folder / "data" / "train.bin").write_bytes(bytes(100))
    (folder / "old.pt").write_bytes(bytes(100))
    (folder / "old.bin").write_bytes(b"PK\x03\x04" + bytes(100))
    (folder / "round").symlink_to(folder)
    shadow(folder, tmp_path / "copy")
    copy = tmp_path / "copy"
    assert sorted(p.relative_to(copy).as_posix() for p in copy.rglob("*")) == ["data", "data/train.bin", "train.py"]
    assert (copy / "data" / "train.bin").is_symlink()
    assert not (copy / "train.py").is_symlink()


def test_a_shadow_follows_links_to_folders_and_not_in_circles(tmp_path: Path) -> None:
    folder, elsewhere = tmp_path / "here", tmp_path / "scratch" / "data"
    (folder / "lib").mkdir(parents=True)
    elsewhere.mkdir(parents=True)
    (elsewhere / "tokens.bin").write_text("12")
    (folder / "data").symlink_to(elsewhere)
    (folder / "lib" / "round").symlink_to(folder)
    (folder / "lib" / "above").symlink_to(tmp_path)
    (elsewhere / "back").symlink_to(folder / "lib")
    shadow(folder, tmp_path / "copy")
    copy = tmp_path / "copy" / "data" / "tokens.bin"
    copy.write_text("34")  # as a script might
    assert (elsewhere / "tokens.bin").read_text() == "12"
    assert [p for p in (tmp_path / "copy").rglob("*") if p.is_file()] == [copy]


@pytest.mark.slow
def test_a_checkpoint_without_its_optimizer_is_confirmed_by_killing_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first loss after the resume is the same, for weights, batch and random numbers are; the second is not."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (tmp_path / "train.py").write_text(SCRIPT)
    words = ["--measure", "--steps", "12", "--resume", "--resume {checkpoint}", "--checkpoints", "last.pt", "--json"]
    assert main(["adopt", *words, "train.py"]) == 2
    said = json.loads(capsys.readouterr().out)
    assert [(f["rule"], f["confidence"]) for f in said["findings"]] == [("checkpoint-optimizer", CONFIRMED)]
    assert [row["same"] for row in said["measured"]] == [True, False, True]
    assert "resumed from step 4" in said["measured"][1]["found"]
    assert "differ from step 6 on" in said["measured"][1]["found"]
    assert [p.name for p in tmp_path.iterdir()] == ["train.py"]  # nothing of ours is left, and nothing of its own
