"""A real model, all the way: SmolLM2-135M imported, compared with transformers, fine-tuned through the command line,
exported, and opened again by transformers. Slow: a download the first time, then about two minutes on two cores."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from shoal.journal import journal
from shoal.model.decoder import Decoder
from shoal.model.hf import load_shape, load_weights
from tests.model.families import logits, opened

ROOT = Path(__file__).resolve().parents[2]
MOBY_DICK = ROOT / "examples" / "text" / "moby-dick.txt"
SENTENCES = (
    "The quick brown fox jumps over the lazy dog. In 1969, Neil Armstrong became the first person to walk on the Moon."
)
# Absolute, in float32, on logits of up to 33: a few millionths of the largest.
TOLERANCE = 1e-4

RUN = """\
name: smol
model: {{weights: {weights}}}
data: {{train: data, seq_len: 128}}
train:
  steps: 6
  batch: 4
  optimizer: {{lr: 1e-4, weight_decay: 0.0}}
  schedule: {{name: constant, warmup_steps: 1}}
mesh: {{dp_replicate: 1, dp_shard: 2}}
checkpoint: {{every: 0}}
track: {{mlflow: false}}
resources: {{device: cpu}}
"""


@pytest.fixture(scope="module")
def smollm2() -> Path:
    fetch = subprocess.run([sys.executable, ROOT / "scripts" / "fetch_smollm2.py"], capture_output=True, text=True)
    assert fetch.returncode == 0, fetch.stderr[-2000:]
    return Path(fetch.stdout.splitlines()[-1])


def shoal(*argv: str | Path, cwd: Path) -> None:
    done = subprocess.run([sys.executable, "-m", "shoal", *argv], cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, f"shoal {argv[0]}: {done.stdout[-2000:]}{done.stderr[-2000:]}"


def imported(folder: Path) -> Decoder:
    with torch.device("meta"):
        model = Decoder(load_shape(folder))
    model.to_empty(device="cpu")
    load_weights(model, folder)
    return model


def compare(folder: Path, ids: torch.Tensor) -> float:
    """The largest difference between Shoal's logits and those of transformers, both from one folder."""
    theirs = logits(opened(folder), ids)
    with torch.no_grad():
        ours = imported(folder)(ids)
    assert theirs.abs().max() > 10  # a trained model has opinions
    assert torch.equal(ours.argmax(-1), theirs.argmax(-1))
    return float((ours - theirs).abs().max())


@torch.no_grad()
def loss_on(model: Decoder, ids: torch.Tensor) -> float:
    return float(model(ids[:, :-1], targets=ids[:, 1:]) / (ids.shape[1] - 1))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_real_model_is_imported_fine_tuned_and_exported(smollm2: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    read = AutoTokenizer.from_pretrained(smollm2)
    ids = read(SENTENCES, return_tensors="pt").input_ids
    assert compare(smollm2, ids) < TOLERANCE

    (tmp_path / "run.yaml").write_text(RUN.format(weights=smollm2))
    tokenizer = smollm2 / "tokenizer.json"
    shoal("data", "prepare", MOBY_DICK, "--tokenizer", tokenizer, "--out", "data", cwd=tmp_path)
    shoal("train", "run.yaml", "--workspace", tmp_path, cwd=tmp_path)
    steps = [r for r in journal.records(tmp_path / "runs" / "smol" / "journal.jsonl") if r["kind"] == "step"]
    losses = [r["loss"] for r in steps]
    assert len(losses) == 6
    assert losses[0] < 5  # it reads English before the first step: an untrained model starts at ln(49152) = 10.8
    assert sum(losses[-2:]) < sum(losses[:2])

    shoal("checkpoint", "export", "smol", tmp_path / "hf", "--workspace", tmp_path, cwd=tmp_path)
    assert compare(tmp_path / "hf", ids) < TOLERANCE
    tuned = AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert tuned.decode(tuned(SENTENCES).input_ids, skip_special_tokens=True) == SENTENCES
    assert load_shape(tmp_path / "hf") == load_shape(smollm2)
    # Different batches differ by more than six steps teach, so the same page is asked before and after.
    page = read(MOBY_DICK.read_text(encoding="utf-8")[600_000:602_000], return_tensors="pt").input_ids
    before, after = loss_on(imported(smollm2), page), loss_on(imported(tmp_path / "hf"), page)
    print(f"loss a step: {losses}; on one page: {before:.3f} before, {after:.3f} after")
    assert after < before - 0.05
