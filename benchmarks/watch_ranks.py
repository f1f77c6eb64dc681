"""Claim: a look at 4,096 ranks costs the watch over hangs and stragglers at most 20 ms of CPU time, in any state.

    python benchmarks/watch_ranks.py

Node 0 of a run over nodes: all ranks are on others, each is heard of once a second, five looks a second
(tests/guard/crowd.py). Printed: CPU time of a look (hang watch, straggler search by the hosts' clocks and by the
devices'), its median and the worst, while the ranks mark phases, compute in one long step, or all wait for each other.
Beside it what a look cost that asked rank by rank (tests/guard/by_rank.py), which reads the same messages.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.guard.by_rank import WatchByRank
from tests.guard.crowd import Crowd

from shoal.guard.hang import Hang, Watch
from shoal.guard.slow_device import SlowDevices
from shoal.guard.straggler import Stragglers

BAR_S = 0.020
LOOKS = 75
KINDS = {"marking": "marking phases", "computing": "in one long step", "waiting": "all waiting"}


def costs_s(world: int, kind: str, by_rank: bool) -> list[float]:
    crowd = Crowd(world, kind)
    watch: Watch | WatchByRank = (WatchByRank if by_rank else Watch)(crowd.pids, crowd.kernel, kernel=crowd.kernel)
    stragglers, devices, spent = Stragglers(), SlowDevices(), list[float]()
    verdict: Callable[[float], Hang | None] = watch.verdict
    for _ in range(LOOKS):
        crowd.advance()
        began = time.process_time()
        verdict(crowd.now)
        if not by_rank:
            beats = watch.beats
            stragglers.look(beats, crowd.now)
            devices.look(beats, crowd.now)
        spent.append(time.process_time() - began)
    return spent[5:]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=int, nargs="+", default=[256, 1024, 4096])
    args = parser.parse_args()
    print(f"{'ranks':>6}  {'state':18}{'a look':>10}{'worst':>10}{'rank by rank':>15}")
    worst_s = 0.0
    for world in args.worlds:
        for kind, words in KINDS.items():
            mine, theirs = costs_s(world, kind, False), costs_s(world, kind, True)
            median_s = statistics.median(mine)
            worst_s = max(worst_s, median_s)
            numbers = [f"{1e3 * s:.1f} ms" for s in (median_s, max(mine), statistics.median(theirs))]
            print(f"{world:>6}  {words:18}{numbers[0]:>10}{numbers[1]:>10}{numbers[2]:>15}")
    print(f"{'PASS' if worst_s <= BAR_S else 'MISS'}  {1e3 * worst_s:.1f} ms a look at most (bar {1e3 * BAR_S:.0f} ms)")
    return int(worst_s > BAR_S)


if __name__ == "__main__":
    sys.exit(main())
