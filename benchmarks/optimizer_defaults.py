"""Each default of optimizer and schedule on and off: held-out loss at the end of the same tokens, beside today's.

    python benchmarks/optimizer_defaults.py [--cache FOLDER] [--seeds 2] [--only warm-up,floor]     one GPU
    python benchmarks/optimizer_defaults.py --tiny                                                  to try the code

88M parameters, 450 steps of 32,768 tokens, cosine. The overrides of each row are those of a run file. There is no bar:
what is measured here is chosen in docs/decisions/062-optimizers.md.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.to_loss.settings import Setting, chosen, curves, table
from benchmarks.to_loss.text import prepared
from benchmarks.to_loss.trials import FULL

MUON = {"name": "muon"}
# The first of each group is what the others are compared with. The trials warm up for 5% unless a row says otherwise.
GROUPS = {
    "warm-up": [
        Setting("warm-up 0", schedule={"warmup_steps": 0}),
        Setting("warm-up 1%", schedule={"warmup_steps": "1%"}),
        Setting("warm-up 2%", schedule={"warmup_steps": "2%"}),
        Setting("warm-up 5%", schedule={"warmup_steps": "5%"}),
    ],
    "floor": [
        Setting("min_ratio 0.1"),
        Setting("min_ratio 0.01", schedule={"min_ratio": 0.01}),
        Setting("min_ratio 0", schedule={"min_ratio": 0.0}),
    ],
    "rates": [
        Setting("lr 1e-3"),
        Setting("lr 2e-3", {"lr": 2e-3}),
        Setting("lr 4e-3", {"lr": 4e-3}),
    ],
    "floor-4e-3": [
        Setting("lr 4e-3, min_ratio 0.1", {"lr": 4e-3}),
        Setting("lr 4e-3, min_ratio 0.01", {"lr": 4e-3}, {"min_ratio": 0.01}),
        Setting("lr 4e-3, min_ratio 0", {"lr": 4e-3}, {"min_ratio": 0.0}),
    ],
    "warm-up-4e-3": [
        Setting("lr 4e-3, warm-up 0", {"lr": 4e-3}, {"warmup_steps": 0}),
        Setting("lr 4e-3, warm-up 2%", {"lr": 4e-3}, {"warmup_steps": "2%"}),
        Setting("lr 4e-3, warm-up 5%", {"lr": 4e-3}, {"warmup_steps": "5%"}),
    ],
    "embeddings": [
        Setting("decay_embeddings true"),
        Setting("decay_embeddings false", {"decay_embeddings": False}),
    ],
    "z-loss": [
        Setting("z_loss 0"),
        Setting("z_loss 1e-4", z_loss=1e-4),
    ],
    "muon": [
        Setting("muon_lr 0.02 (decay 0.002 a step)", {**MUON, "muon_lr": 0.02}),
        Setting("muon_lr 0.02, muon_weight_decay 0", {**MUON, "muon_lr": 0.02, "muon_weight_decay": 0.0}),
        Setting("muon_lr 0.02, muon_weight_decay 0.01", {**MUON, "muon_lr": 0.02, "muon_weight_decay": 0.01}),
        Setting("muon_lr auto, lr 1e-3", MUON),
        Setting("muon_lr auto, lr 2e-3", {**MUON, "lr": 2e-3}),
        Setting("muon_lr auto, lr 4e-3", {**MUON, "lr": 4e-3}),
        Setting("muon_lr auto, lr 2e-3, no decay of it", {**MUON, "lr": 2e-3, "muon_weight_decay": 0.0}),
    ],
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--only", default=",".join(GROUPS), help=f"some of {','.join(GROUPS)}")
    parser.add_argument("--shape", default="88m", choices=FULL, help="which model learns (default: %(default)s)")
    parser.add_argument("--cache", type=Path, help="keep the prepared text there, and find it there")
    args = parser.parse_args()
    if unknown := [name for name in args.only.split(",") if name not in GROUPS]:
        parser.error(f"there is no {', '.join(unknown)}")
    trial = chosen(args.tiny, args.shape)
    with tempfile.TemporaryDirectory() as folder:
        data = prepared(args.cache or Path(folder), trial.tokens, trial.vocab)
        for name in args.only.split(","):
            found = list(curves(trial, data, GROUPS[name], args.seeds))
            table(found, against=found[0])
    return 0


if __name__ == "__main__":
    sys.exit(main())
