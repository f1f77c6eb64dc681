"""Whether a swarm learns as one data centre does: 8 peers that exchange little, against exchanging every gradient.

    python benchmarks/swarm_convergence.py ladder     each codec, and DiLoCo as others do it: minutes, on a GPU
    python benchmarks/swarm_convergence.py attack     2 of 8 peers hostile, with and without the checks: on a CPU
    … --tiny                                          a minute: the same path, no claim
    … --seed N --steps N                              another run

The shipped text, Shoal's data order, model, optimizer, codecs and outer step; 8 logical peers in one process, and no
network: the record of a round comes after a quarter of the next one, as an exchange that takes so long brings it. Every
way sees the same tokens in batches of the same size from the same weights. Traffic is what a peer sends, a step: parts
go to all other peers; an all-reduce is a ring. Loss is that on held-out text, and beside it that on the text itself,
which is read some two hundred times.

Bars: topk and 2bit are within 1% of every-step data parallelism at its best rate, with at least 150 times less traffic
than its bf16 ring; under attack within 2% of the honest run.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["ladder", "attack"])
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--seed", type=int, default=1851)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    args = parser.parse_args()
    import torch
    from benchmarks.fleet import swarm_rows as rows
    from benchmarks.fleet.stacked_swarm import sail
    from benchmarks.fleet.swarm_sim import Sea, prepare

    size = rows.TINY if args.tiny else rows.LONG if args.what == "ladder" else rows.SHORT
    size = replace(size, seed=args.seed, steps=args.steps or size.steps)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if args.what == "ladder" and device.type == "cpu" and not (args.tiny or args.steps):
        parser.error("the ladder takes days without a GPU: --tiny, or --steps of your choice.")
    with tempfile.TemporaryDirectory() as folder:
        prepare(Path(folder))
        if args.what == "ladder":
            courses = rows.ladder(size.lr)
            checks = rows.print_ladder(courses, sail(Sea(Path(folder), size), courses, device), size)
        else:
            ways = rows.attacks()
            checks = rows.print_attacks(ways, rows.run(ways, size, Path(folder), args.processes))
    if args.tiny:
        return 0
    for claim, held in checks:
        print(f"{'PASS' if held else 'MISS'}  {claim}")
    return int(not all(held for _, held in checks))


if __name__ == "__main__":
    sys.exit(main())
