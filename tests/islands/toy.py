"""Islands that train a toy: real processes, sockets and files, but a gradient that costs nothing.

    python -m tests.islands.toy FOLDER ISLAND ISLANDS STEPS SHARDS [--tree] [--step-s S]

Each life of an island appends what it applied to FOLDER/island-N.log, one JSON line a step.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from shoal.islands.fleet import Fleet
from shoal.islands.member import Evicted
from shoal.islands.trade import Offer
from shoal.parallel.inner import Inner
from shoal.spec.island_sums import Forest, cover

SIZE = 1003


class Toy:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.weights, self.momentum = torch.empty(SIZE), torch.empty(SIZE)
        self.restore()

    def restore(self, back: dict[str, Any] | None = None) -> tuple[int, str]:
        """There are no checkpoints here: a run whose islands have all died begins again, one that is done is done."""
        if any('"finished"' in log.read_text() for log in self.folder.glob("*.log")):
            sys.exit(0)
        self.weights.copy_(torch.linspace(-1, 1, SIZE))
        self.momentum.zero_()
        self.at = 0
        return 0, self.digest()

    def tensors(self) -> Mapping[str, Tensor]:
        return {"weights": self.weights, "momentum": self.momentum}

    def notes(self) -> dict[str, Any]:
        return {"at": self.at}

    def stands_at(self, step: int, notes: dict[str, Any]) -> None:
        assert notes == {"at": step}
        self.at = step

    def apply(self, step: int, total: Tensor, said: list[dict[str, Any]]) -> None:
        assert step == self.at, f"step {step} is applied to a state of {self.at}"
        self.momentum.mul_(0.9).add_(total)
        self.weights.sub_(0.01 * self.momentum)
        self.at += 1

    def gradient(self, step: int, shard: int) -> Tensor:
        return torch.sin(self.weights * (shard + 1) + step)

    def digest(self) -> str:
        return xxhash.xxh3_128(self.weights.numpy().tobytes() + self.momentum.numpy().tobytes()).hexdigest()


def main() -> int:
    torch.set_num_threads(1)
    return run(parse(sys.argv[1:]))


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("island", type=int)
    parser.add_argument("islands", type=int)
    parser.add_argument("steps", type=int)
    parser.add_argument("shards", type=int)
    parser.add_argument("--tree", action="store_true")
    parser.add_argument("--step-s", type=float, default=0.02)
    return parser.parse_args(argv)


def run(args: argparse.Namespace) -> int:
    toy = Toy(args.folder)
    fleet = Fleet(args.folder / "fleet", args.island, args.islands, args.shards, Inner(0, 1), "127.0.0.1")

    def note(kind: str, **fields: Any) -> None:
        with open(args.folder / f"island-{args.island}.log", "a") as log:
            log.write(json.dumps({"kind": kind, "pid": os.getpid(), "t": time.time(), **fields}) + "\n")

    while True:
        note("entered", step=fleet.enter(toy))
        try:
            train(args, toy, fleet, note)
            break
        except Evicted:
            note("evicted", step=toy.at)
    note("finished", digest=toy.digest())
    fleet.close()
    return 0


def train(args: argparse.Namespace, toy: Toy, fleet: Fleet, note: Any) -> None:
    total = torch.empty(SIZE)
    while toy.at < args.steps:
        step, done = toy.at, {}
        while True:
            turn = fleet.take(step, toy)
            assert turn is not None
            for shard in turn.shards:
                if shard not in done:
                    time.sleep(args.step_s / args.shards)
                    done[shard] = toy.gradient(step, shard)
            mine = {shard: done[shard] for shard in turn.shards}
            traded = fleet.trade(step, offer(mine, args), total, args.tree)
            if traded is not None:
                break
        toy.apply(step, traded.total, traded.said)
        fleet.applied(step, traded)
        samples = sorted(shard for said in traded.said for shard in said["shards"])
        members = turn.epoch.keys
        note("step", step=step, samples=samples, mine=turn.shards, epoch=turn.epoch.number, members=members)
    while fleet.take(args.steps, toy) and not fleet.together(args.steps):
        pass


def offer(mine: dict[int, Tensor], args: argparse.Namespace) -> Offer:
    says = {"shards": list(mine)}
    if not args.tree:
        return Offer([(0, 0)] if mine else [], [sum(mine.values(), torch.zeros(SIZE))] if mine else [], says)
    forest: Forest[Tensor] = Forest(args.shards, lambda a, b: a.add_(b))
    for shard, gradient in mine.items():
        forest.plant((shard, shard + 1), gradient.clone())
    assert sorted(forest.sums) == cover(mine, args.shards)
    return Offer(list(forest.sums), list(forest.sums.values()), says)


if __name__ == "__main__":
    sys.exit(main())
