"""SmolLM2-135M fine-tuned on prompts and answers by Shoal, packed by best fit, and by transformers, one pair a row.

Both read the same pairs in the same steps: Shoal's feed says which stand in a batch, transformers gets each of them
alone in a row, padded on the right, with prompts and padding out of its labels. Both normalise by the targets of the
batch and take AdamW with the same numbers. Bars: the losses of the first step, before any update, agree within 1e-5,
the curves within 1e-3. Then what packing does to these pairs: padding and cut pairs of best fit and of chopping.

CPU, float32. The model is the one of the slow tests (scripts/fetch_smollm2.py: a download the first time). The pairs
are made from paragraphs of Moby Dick: the first third of one is the prompt, the rest the answer.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from shoal.data.feed import Feed
from shoal.data.order import Order
from shoal.data.packs import shares
from shoal.data.shards import TokenShards
from shoal.data.windows import PADDING, Windows
from shoal.journal import journal
from shoal.spec.resolve import load

ROOT = Path(__file__).resolve().parent.parent
STEP_0, CURVE = 1e-5, 1e-3
LR, BETAS, EPS, CLIP = 1e-4, (0.9, 0.95), 1e-8, 1.0
RUN = """\
name: pairs
model: {{weights: {weights}}}
data: {{train: data, seq_len: {seq_len}, packing: best-fit}}
train:
  steps: {steps}
  batch: {batch}
  clip: {clip}
  precision: fp32
  optimizer: {{name: adamw, lr: {lr}, betas: [{betas[0]}, {betas[1]}], eps: {eps}, weight_decay: 0.0}}
  schedule: {{name: constant, warmup_steps: 0}}
mesh: {{dp_replicate: 1, dp_shard: 1, micro_batch: 1}}
checkpoint: {{every: 0}}
track: {{mlflow: false}}
resources: {{device: cpu}}
"""
Ids = list[int]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--batch", type=int, default=2, help="windows in a step")
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--pairs", type=int, default=400)
    args = parser.parse_args()
    fetch = subprocess.run([sys.executable, ROOT / "scripts" / "fetch_smollm2.py"], stdout=subprocess.PIPE, text=True)
    if fetch.returncode:
        return fetch.returncode
    weights = Path(fetch.stdout.splitlines()[-1])
    with tempfile.TemporaryDirectory(prefix="shoal-pairs-") as folder:
        return compare(Path(folder), weights, args)


def compare(folder: Path, weights: Path, args: argparse.Namespace) -> int:
    pairs = made_pairs(args.pairs, args.seq_len, AutoTokenizer.from_pretrained(weights))
    (folder / "pairs.jsonl").write_text("".join(json.dumps({"prompt": p, "text": t}) + "\n" for p, t in pairs))
    numbers = {"lr": LR, "betas": BETAS, "eps": EPS, "clip": CLIP, "weights": weights}
    (folder / "run.yaml").write_text(RUN.format(**numbers, **vars(args)))
    prepare = ["data", "prepare", "pairs.jsonl", "--prompt-field", "prompt", "--tokenizer", str(weights)]
    shoal(folder, *prepare, "--out", "data")
    steps = pairs_of_steps(folder, weights, pairs, args.steps)
    shoal(folder, "train", "run.yaml", "--workspace", ".")
    records = journal.records(folder / "runs" / "pairs" / "journal.jsonl")
    ours = [r["loss"] for r in records if r["kind"] == "step"]
    theirs = fine_tuned(weights, steps)
    print(f"{'step':>4} {'pairs':>5} {'transformers':>13} {'shoal':>10} {'difference':>11}")
    for t, (a, b) in enumerate(zip(theirs, ours, strict=True)):
        print(f"{t:>4} {len(steps[t]):>5} {a:>13.6f} {b:>10.6f} {b - a:>11.1e}")
    first, curve = abs(ours[0] - theirs[0]), max(abs(b - a) for a, b in zip(theirs, ours, strict=True))
    data = TokenShards.open(folder / "data")
    print(f"\n{'window':>6} {'packing':>9} {'windows':>8} {'padding':>8} {'pairs cut':>10}")
    for seq_len in (128, 256, 512):
        for way, one in shares(data, seq_len).items():
            cut = f"{one['cut_share']:.1%}"
            print(f"{seq_len:>6} {way:>9} {one['windows']:>8,} {one['padding']:>8.2%} {cut:>10}")
    missed = first > STEP_0 or curve > CURVE
    print(
        f"step 0 differs by {first:.1e} (bar {STEP_0:.0e}), the curve by at most {curve:.1e} (bar {CURVE:.0e}): "
        + ("MISSED" if missed else "met")
    )
    return int(missed)


def made_pairs(most: int, seq_len: int, tokenizer: Any) -> list[tuple[str, str]]:
    """Such as fit a window: transformers has no rule for others."""
    text = (ROOT / "examples" / "text" / "moby-dick.txt").read_text(encoding="utf-8")
    paragraphs = [" ".join(p.split()).split(" ") for p in text.split("\n\n")]
    fit = [w for w in paragraphs if len(w) >= 12 and len(tokenizer(" ".join(w))["input_ids"]) < seq_len - 4]
    chosen = fit[:: max(1, len(fit) // most)][:most]
    return [(" ".join(w[: len(w) // 3]), " " + " ".join(w[len(w) // 3 :])) for w in chosen]


def shoal(folder: Path, *arguments: str) -> None:
    done = subprocess.run([sys.executable, "-m", "shoal", *arguments], cwd=folder, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"shoal {arguments[0]}: {done.stdout[-2000:]}{done.stderr[-2000:]}")


def pairs_of_steps(
    folder: Path, weights: Path, pairs: list[tuple[str, str]], steps: int
) -> list[list[tuple[Ids, int]]]:
    """The pairs of each step, as transformers' tokenizer makes them: (ids, of which so many are no target). That Shoal
    reads these very pairs, whole, is checked on the way."""
    read = AutoTokenizer.from_pretrained(weights)
    known: dict[tuple[int, ...], int] = {}
    for prompt, answer in pairs:
        first, last = (read(part, add_special_tokens=False)["input_ids"] for part in (prompt, answer))
        known[(*first, *last, read.eos_token_id)] = len(first)
    run = load(folder / "run.yaml").run
    windows = Windows.of([TokenShards.open(folder / "data")], run.data)
    found: list[list[tuple[Ids, int]]] = []
    with Feed(windows, Order(windows.sizes, [1.0], run.seed), run.train.batch) as feed:
        for t in range(steps):
            (batch,) = feed.assemble(t)
            found.append([])
            for tokens, targets, documents in zip(batch.tokens, batch.targets, batch.documents, strict=True):
                for number in np.unique(documents[documents != PADDING]):
                    places = np.flatnonzero(documents == number)
                    ids = tokens[places].tolist()
                    if places[-1] == len(tokens) - 1 and targets[-1] >= 0:
                        ids.append(int(targets[-1]))  # a full window: the last token is a target and not read
                    start = 0 if tuple(ids) in known else 1  # a start token of the data set's rule
                    found[-1].append((ids, known[tuple(ids[start:])] + start))
    return found


def fine_tuned(weights: Path, steps: list[list[tuple[Ids, int]]]) -> list[float]:
    model = AutoModelForCausalLM.from_pretrained(weights, dtype=torch.float32)
    model.train()
    adamw = torch.optim.AdamW(model.parameters(), lr=LR, betas=BETAS, eps=EPS, weight_decay=0.0)
    losses = []
    for pairs in steps:
        longest = max(len(ids) for ids, _ in pairs)
        tokens = torch.zeros(len(pairs), longest, dtype=torch.long)
        labels, seen = torch.full_like(tokens, -100), torch.zeros_like(tokens)
        for row, (ids, prompt) in enumerate(pairs):
            tokens[row, : len(ids)], seen[row, : len(ids)] = torch.tensor(ids), 1
            labels[row, prompt : len(ids)] = torch.tensor(ids[prompt:])
        loss = model(input_ids=tokens, attention_mask=seen, labels=labels).loss  # the mean over the labels
        adamw.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        adamw.step()
        losses.append(float(loss.detach()))
    return losses


if __name__ == "__main__":
    sys.exit(main())
