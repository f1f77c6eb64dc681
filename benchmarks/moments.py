"""Moments in 16 bits beside float32: held-out curves at beta2 0.95, 0.99 and 0.999.

    python benchmarks/moments.py [--cache FOLDER] [--seeds 2]       one GPU: 88M parameters, 15 million tokens a curve
    python benchmarks/moments.py --tiny                             a processor, to try the code: no claim

`nearest` is how 16 bits were rounded before: from a beta2 of 0.995 on the second moment did not fall any more. Bar: at
every beta2 `bf16` ends within 0.5% of float32.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.to_loss.settings import Curve, Setting, chosen, curves, table
from benchmarks.to_loss.text import prepared
from benchmarks.to_loss.trials import FULL

BETAS = (0.95, 0.99, 0.999)
NEAR = 0.005


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--shape", default="88m", choices=FULL, help="which model learns (default: %(default)s)")
    parser.add_argument("--cache", type=Path, help="keep the prepared text there, and find it there")
    args = parser.parse_args()
    trial, worst = chosen(args.tiny, args.shape), 0.0
    with tempfile.TemporaryDirectory() as folder:
        data = prepared(args.cache or Path(folder), trial.tokens, trial.vocab)
        for beta2 in BETAS:
            wide, narrow, nearest = curves(trial, data, _settings(beta2), args.seeds)
            table([wide, narrow, nearest], against=wide)
            worst = max(worst, _off(narrow, wide))
    print(f"bf16 ends within {100 * worst:.2f}% of float32 (bar: {100 * NEAR:g}%)")
    return int(worst > NEAR)


def _settings(beta2: float) -> list[Setting]:
    betas = [0.9, beta2]
    return [
        Setting(f"beta2 {beta2:g}, float32", {"betas": betas}),
        Setting(f"beta2 {beta2:g}, bf16", {"betas": betas, "moments": "bf16"}),
        Setting(f"beta2 {beta2:g}, bf16 to the nearest", {"betas": betas, "moments": "bf16"}, nearest=True),
    ]


def _off(one: Curve, other: Curve) -> float:
    return abs(one.end / other.end - 1)


if __name__ == "__main__":
    sys.exit(main())
