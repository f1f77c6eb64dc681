"""Islands (fleet.islands) against the others, with real training on the CPU.

    python benchmarks/islands.py overhead     tokens/s without faults, against DDP          (bar: at most 3% less)
    python benchmarks/islands.py kill         how long survivors of a kill -9 stand still, against torchft and against
                                              torchrun restarting from a checkpoint          (bars: 2x and 10x better)
    python benchmarks/islands.py campaign     200 seeded faults on 4 islands: what was lost  (bar: nothing)
    python benchmarks/islands.py price        what fleet.deterministic costs

Islands are forked from this process, so a fault costs seconds here and not the start of Python. torchft is installed
into a temporary folder of its own (`--torchft VERSION`).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["overhead", "kill", "campaign", "price"])
    parser.add_argument("--rounds", type=int, default=3, help="overhead, price: of each way in turn")
    parser.add_argument("--steps", type=int, default=30, help="overhead, price: steps of a round")
    parser.add_argument("--kills", type=int, default=12, help="kill: of each way (torchrun: a quarter of them)")
    parser.add_argument("--torchft", default="torchft==0.2.0", metavar="WHEEL", help="kill: or e.g. torchft-nightly")
    parser.add_argument("--faults", type=int, default=200, help="campaign")
    parser.add_argument("--seed", type=int, default=0, help="campaign")
    args = parser.parse_args()
    if args.what == "campaign":
        from benchmarks.fleet.campaign import campaign

        return campaign(args.faults, args.seed)
    if args.what == "kill":
        from benchmarks.fleet.kill import kill

        return kill(args.kills, args.torchft)
    from benchmarks.fleet.speed import overhead, price

    return overhead(args.rounds, args.steps) if args.what == "overhead" else price(args.rounds, args.steps)


if __name__ == "__main__":
    sys.exit(main())
