"""What evaluation in 8 bits says beside evaluation in bf16, of the same weights.

    python benchmarks/eval_precision.py [--cache FOLDER] [--seeds 2]     one GPU that computes in fp8
    python benchmarks/eval_precision.py --tiny                           to try the code

34M parameters, trained in fp8 by `shoal train` for 300 steps, once for each precision of evaluation: the same seed
gives the same losses of training to the bit (checked), so that the held-out losses differ by evaluation alone. There is
no bar; the choice of `eval.precision: auto` stands in docs/decisions/064-counting.md.
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
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from benchmarks.to_loss.text import prepared  # noqa: E402
from benchmarks.to_loss.trials import FULL, TINY  # noqa: E402

from shoal.journal import journal  # noqa: E402
from shoal.journal.rundir import RunDir  # noqa: E402

PRECISIONS = ("bf16", "fp8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, help="keeps the text, and takes it from there")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    trial = TINY["88m"] if args.tiny else FULL["34m"]
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        data = prepared(args.cache or work, trial.tokens, trial.vocab)
        spec: dict[str, Any] = {
            "name": "any",
            "model": {**trial.model, "vocab_size": trial.vocab},
            "data": {"train": str(data / "train"), "eval": str(data / "eval"), "seq_len": trial.seq},
            "train": {"steps": trial.steps, "batch": trial.batch, "precision": "fp8", "optimizer": {"lr": trial.lr}},
            "eval": {"every": max(1, trial.steps // 3)},
            "resources": {"processes": 1},
            "track": {"mlflow": False},
        }
        (work / "run.yaml").write_text(json.dumps(spec))
        rows = list(product(range(args.seeds), PRECISIONS))
        with ThreadPoolExecutor(1 if args.tiny else 4) as pool:
            told = dict(zip(rows, pool.map(lambda row: trained(work, *row), rows), strict=True))
    print(f"{'seed':>4} {'step':>5} " + " ".join(f"{p:>10}" for p in PRECISIONS) + " fp8 - bf16")
    for seed in range(args.seeds):
        losses = [told[seed, p][0] for p in PRECISIONS]
        if any(one != losses[0] for one in losses):
            print(f"seed {seed}: the losses of training differ, so this compares nothing")
            return 1
        for step in told[seed, "bf16"][1]:
            bf16, fp8 = (told[seed, p][1][step] for p in PRECISIONS)
            print(f"{seed:>4} {step:>5} {bf16:>10.6f} {fp8:>10.6f} {fp8 - bf16:>+10.1e}")
    return 0


def trained(work: Path, seed: int, precision: str) -> tuple[list[float], dict[int, float]]:
    """The losses of training, and the held-out loss by step."""
    name = f"{precision}-{seed}"
    changes = [f"name={name}", f"seed={seed}", f"eval.precision={precision}"]
    command = [sys.executable, "-m", "shoal", "train", "run.yaml", *changes, "--workspace", "."]
    done = subprocess.run(command, cwd=work, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{name}: {done.stderr[-3000:]}")
    records = list(journal.records(RunDir.of(name, work).journal_file))
    steps = [r["loss"] for r in records if r["kind"] == "step"]
    return steps, {r["step"]: r["loss"] for r in records if r["kind"] == "eval"}


if __name__ == "__main__":
    sys.exit(main())
