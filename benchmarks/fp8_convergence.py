"""Whether fp8 learns as bf16 does: runs on the shipped text that differ in `train.precision` only, and in
`train.fp8_scaling` (`fp8-row`: a scale for each row).

    python benchmarks/fp8_convergence.py           a 100M-class model, 1,000 steps each (a GPU with 8-bit products)
    python benchmarks/fp8_convergence.py --ways fp8-row        that one beside bf16 alone
    python benchmarks/fp8_convergence.py --tiny    a minute on a processor, emulated: the same path, a toy's claim

A step is 4,096 tokens, so that the shipped text is read seven times and not learned by heart: near a loss of zero one
percent says nothing. Bar: the mean of the last 50 losses lies within 1% of bf16's, and so does the loss on text that
was held out.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from statistics import mean

from shoal.journal.journal import records
from shoal.journal.rundir import RunDir

ROOT = Path(__file__).resolve().parent.parent
TEXTS = [ROOT / "examples/text/moby-dick.txt", ROOT / "examples/text/state-of-the-union.jsonl"]
BAR = 0.01
LAST = 50
SIZES = {
    "100m": ({"dim": 768, "layers": 12, "heads": 12, "kv_heads": 4, "ffn_dim": 2048}, 1000, 8, 512, 8192),
    "tiny": ({"dim": 128, "layers": 2, "heads": 4, "kv_heads": 2, "ffn_dim": 256}, 150, 8, 128, 1024),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--ways", default="fp8,fp8-row", help="to be compared with bf16; some of: %(default)s")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="write the curves there, as JSON")
    args = parser.parse_args()
    ways = args.ways.split(",")
    model, steps, batch, seq, vocab = SIZES["tiny" if args.tiny else "100m"]
    with tempfile.TemporaryDirectory() as folder:
        workspace = Path(folder)
        _prepare(workspace, vocab)
        with ThreadPoolExecutor() as pool:  # at once: how long they take is not asked
            told = {
                way: pool.submit(_train, workspace, way, model, steps, batch, seq, args.seed) for way in ("bf16", *ways)
            }
        curves = {way: one.result() for way, one in told.items()}
    if args.out:
        args.out.write_text(json.dumps(curves))
    ends = {name: mean(curve["loss"][-LAST:]) for name, curve in curves.items()}
    held_out = {name: curve["eval"][-1] for name, curve in curves.items()}
    ok = True
    for way, (what, values) in product(ways, (("training", ends), ("held-out", held_out))):
        gap = values[way] / values["bf16"] - 1
        ok &= abs(gap) <= BAR
        said = f"{what} loss after {steps} steps: bf16 {values['bf16']:.4f}, {way} {values[way]:.4f}, {gap:+.2%}"
        print(f"{'PASS' if abs(gap) <= BAR else 'MISS'}  {said} (bar {BAR:.0%})")
    return int(not ok)


def _prepare(workspace: Path, vocab: int) -> None:
    texts = [str(path) for path in TEXTS]
    _shoal("data", "tokenizer", *texts, "--vocab-size", str(vocab), "--out", str(workspace / "tokenizer.json"))
    _shoal(
        "data", "prepare", *texts, "--separator", "\n\n\n", "--tokenizer", str(workspace / "tokenizer.json"),
        "--eval-fraction", "0.05", "--out", str(workspace / "data"),
    )  # fmt: skip


def _train(
    workspace: Path, way: str, model: dict[str, int], steps: int, batch: int, seq: int, seed: int
) -> dict[str, list[float]]:
    spec = {
        "name": way,
        "seed": seed,
        "model": model,
        "data": {"train": "data/train", "eval": "data/eval", "seq_len": seq},
        "train": {
            "steps": steps,
            "batch": batch,
            "precision": way.removesuffix("-row"),
            "fp8_scaling": "row" if way.endswith("-row") else "tensor",
            "optimizer": {"lr": 6e-4},
            "schedule": {"warmup_steps": steps // 20},
        },
        "checkpoint": {"every": 0},
        "track": {"mlflow": False},
        "resources": {"processes": 1},
    }
    file = workspace / f"{way}.yaml"
    file.write_text(json.dumps(spec))  # which is YAML too
    _shoal("train", str(file), "--workspace", str(workspace))
    told = records(RunDir.of(way, workspace).journal_file)
    return {
        "loss": [r["loss"] for r in told if r["kind"] == "step"],
        "eval": [r["loss"] for r in told if r["kind"] == "eval"],
    }


def _shoal(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "shoal", *words], check=True, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    sys.exit(main())
