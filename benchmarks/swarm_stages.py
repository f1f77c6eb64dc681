"""A model cut over four peers at 100 Mbit/s and 100 ms, against the same cut on loopback.

    python benchmarks/swarm_stages.py train       real training of a small model: time and loss   (bars: 1.5x, 1%)
    python benchmarks/swarm_stages.py kill        one of two peers of a stage is killed mid-run   (bar: no restart)
    python benchmarks/swarm_stages.py simulated   messages of an 8B model, compute by its time    (bar: 1.5x)
    python benchmarks/swarm_stages.py ladder      what each way to send activations costs in loss (minutes; a GPU helps)

The first three need network namespaces (root). `train` and `kill` are real but for a pause: a micro-batch takes 60 ms
in a stage, as on a device of that speed, since with two cores for all the peers would wait for each other. A small
model's messages are small, so these show what the distance costs, and that the loss is right. `simulated` shows what
the rate costs: messages are those of 1,024 tokens of an 8B model (dim 4,096, 8 layers a stage), and peers sleep for as
long as a device of so many TFLOP/s computes. On an H200 such a stage took 29 + 64 ms for 4,096 tokens, which is 470
TFLOP/s (2026-11-16).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["train", "kill", "simulated", "ladder"])
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--data", type=Path, help="prepared text; the shipped text is prepared without it")
    args = parser.parse_args()
    from benchmarks.fleet import stage_bench

    from shoal.emulate.possible import possible

    if args.what != "ladder" and (why := possible()):
        print(why)
        return 78
    with tempfile.TemporaryDirectory(prefix="shoal-stages-") as name:
        folder = Path(name)
        if args.what == "simulated":
            return stage_bench.simulated(folder, args.steps or 4)
        data = args.data.resolve() if args.data else stage_bench.prepared(folder)
        if args.what == "ladder":
            from benchmarks.fleet.stage_ladder import ladder

            ladder(data, args.steps or 300)
            return 0
        return (stage_bench.train if args.what == "train" else stage_bench.kill)(folder, data, args.steps or 40)


if __name__ == "__main__":
    sys.exit(main())
