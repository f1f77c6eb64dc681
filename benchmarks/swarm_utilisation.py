"""How busy peers are that train a model of a billion parameters over 100 Mbit/s and 100 ms, and what others would be.

python -m benchmarks.swarm_utilisation [--peers 8] [--rounds 4] [--round-s 60] [--loss 0.001 0.01]

Real nodes over the emulated network exchange parts of the size that topk makes of 1e9 parameters; the computing is
simulated by its measured time (1B on one H200: benchmarks/data/h200/speed.json). Busy is the share of time in which
trainers compute, over all peers, from the second round on. Beside it, from the rate that the same links
moved in the same run: a bf16 all-reduce at every step, and DiLoCo with int8 and no overlap (as torchft's), both as a
ring without latency, which is kinder to them than any network.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from benchmarks.fleet.swarm_on_wan import Swarm

from shoal.emulate import Site, Wan, possible
from shoal.errors import SetupError
from shoal.plan.swarm import CODECS, Link, utilisation
from shoal.plan.swarm import Swarm as Planned

PARAMS = 1_000_000_000
BITS = 0.1474  # a parameter, of topk: benchmarks/swarm_codec.py
TOKENS_PER_S = 64_866  # 1B in bf16 on one H200, measured 2026-11-16
PEER_TOKENS = 131_072  # of an inner step of one peer: a million for eight
COPY_S = 0.2  # 4 GB over PCIe 5 at 20 GB/s, each way; not hidden
CODE_S = 4.0  # 4 GB at 1 GB/s on one core; hidden behind the next steps
BARS = {0.001: 0.97, 0.01: 0.93}


@dataclass(frozen=True)
class Found:
    busy: float
    least: float
    moving: float  # share of time in which weights leave or enter the device
    waiting: float
    rounds: int
    taken: float  # parts of peers in each record
    exchange_s: float
    bits_per_s: float


def measure(peers: int, rounds: int, round_s: float, loss: float, folder: Path) -> Found:
    step_s = PEER_TOKENS / TOKENS_PER_S
    sites = [f"p{i}" for i in range(peers)]
    trainer = {
        "params": PARAMS, "part_bytes": int(PARAMS * BITS / 8), "step_s": step_s, "batch": 32,
        "hand_in_s": COPY_S, "follow_s": COPY_S, "code_s": CODE_S,
    }  # fmt: skip
    run = {
        "name": "busy", "data": {"train": "none"}, "train": {"steps": 100_000, "batch": 32 * peers},
        "swarm": {"peers": peers, "round": f"{round_s:g} s", "robust": False},
    }  # fmt: skip
    command = [sys.executable, "-m", "benchmarks.fleet.swarm_trainer", json.dumps(trainer)]
    with Wan([Site(s, "open", up_mbit=100, down_mbit=100) for s in sites], 100.0, loss) as wan:
        swarm = Swarm(wan, folder, sites, run, command)
        try:
            for site in sites:
                swarm.start(site)
            # In the first round nobody knows how many samples a peer needs, and some wait.
            swarm.until(lambda: all(swarm.round(s) >= 3 for s in sites), 120 + 5 * round_s, "the first rounds")
            first, at = {s: _times(swarm, s)[-1] for s in sites}, swarm.round(sites[0])
            done = lambda: swarm.round(sites[0]) >= at + rounds  # noqa: E731
            swarm.until(done, rounds * 4 * round_s + 60, f"{rounds} rounds")
            last = {s: _times(swarm, s)[-1] for s in sites}
            records = [r for r in swarm.events(sites[0], "record") if at < r["round"] <= at + rounds]
            pieces = [e for s in sites for e in swarm.events(s, "part") if at < e["round"] <= at + rounds]
        finally:
            swarm.close()

    def share(what: str) -> list[float]:
        return [(last[s][what] - first[s][what]) / (last[s]["t"] - first[s]["t"]) for s in sites]

    shares = share("compute")
    exchange_s = sum(r["exchange_s"] for r in records) / len(records)
    moved = sum(e["bytes"] for e in pieces) / peers / len(records)  # received by a peer in a round
    return Found(
        sum(shares) / peers,
        min(shares),
        sum(share("moving")) / peers,
        sum(share("waiting")) / peers,
        len(records),
        sum(len(r["took"]) for r in records) / len(records),
        exchange_s,
        8 * moved / max(1e-9, exchange_s - CODE_S),  # a part is encoded before it travels
    )


def _times(swarm: Swarm, site: str) -> list[dict[str, float]]:
    return [json.loads(line) for line in (swarm.folder / site / "times.jsonl").read_text().splitlines()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--round-s", type=float, default=60.0)
    parser.add_argument("--loss", type=float, nargs="+", default=[0.001, 0.01])
    args = parser.parse_args()
    if why := possible():
        raise SetupError(why)
    step_s, worst = PEER_TOKENS / TOKENS_PER_S, 0
    print(
        f"{args.peers} peers, 100 Mbit/s, 100 ms, parts of {PARAMS * BITS / 8e6:.1f} MB, rounds of {args.round_s:g} s"
    )
    for loss in args.loss:
        with tempfile.TemporaryDirectory(prefix="shoal-bench-") as folder:
            found = measure(args.peers, args.rounds, args.round_s, loss, Path(folder))
        ring = 2 * (args.peers - 1) / args.peers
        all_reduce_s = ring * 16 * PARAMS / found.bits_per_s
        int8_s = ring * 8 * PARAMS / found.bits_per_s
        codec = CODECS["topk"] if "topk" in CODECS else CODECS["top-k gaps"]
        inner = round(args.round_s / step_s)
        link = Link(100e6, 100e6, 0.1, loss)
        planned = utilisation(Planned(args.peers, step_s, inner, PARAMS, codec, link, overlap=True))
        naive, plain = step_s / (step_s + all_reduce_s), args.round_s / (args.round_s + int8_s)
        print(
            f"\nloss {loss:.1%}: {found.rounds} rounds, parts of {found.taken:.1f} of {args.peers} peers in each; "
            f"a round's exchange {found.exchange_s:.1f} s, {found.bits_per_s / 1e6:.0f} Mbit/s into each peer"
        )
        rest = f"weights moved {found.moving:.1%}, waited {found.waiting:.1%}; the least busy peer {found.least:.1%}"
        print(f"  Shoal, measured                    busy {found.busy:.1%}   ({rest})")
        print(f"  Shoal, as `shoal plan swarm` says       {planned.expected:.1%}")
        print(f"  bf16 all-reduce every step              {naive:.1%}   ({all_reduce_s:.0f} s a step)")
        print(f"  DiLoCo, int8, every {inner} steps, no overlap {plain:.1%}   ({int8_s:.0f} s a round)")
        print(f"  ratio to DiLoCo in int8: {found.busy / plain:.2f}, to all-reduce: {found.busy / naive:.0f}")
        bar = BARS.get(loss)
        if bar is not None:
            good = found.busy >= bar
            worst |= not good
            print(f"  {'PASS' if good else 'MISS'}: {found.busy:.1%} (bar {bar:.0%})")
    return int(worst)


if __name__ == "__main__":
    sys.exit(main())
