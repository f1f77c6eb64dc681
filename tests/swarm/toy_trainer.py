"""A trainer without a model: its weights go a little towards a point with each sample. The rest of a peer is real.

python -m tests.swarm.toy_trainer COUNT STEPS_PER_S [ATTACK]
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.fleet.stand_in import StandIn

from shoal.swarm.outer import state_files
from shoal.swarm.outer.merge import merge
from shoal.swarm.outer.outer import Outer
from shoal.swarm.outer.peer_side import Local, add
from shoal.swarm.outer.rule import Rule

LAST = 237  # samples of 240, less than a step of one of two peers
RULE = Rule(chunk=256, keep=16, lr=1.0)


def target(count: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.random.default_rng(7).normal(size=count).astype(np.float32)


class Toy(StandIn):
    def __init__(self, count: int, steps_per_s: float, attack: str) -> None:
        super().__init__()
        self.count, self.step_s, self.attack = count, 1 / steps_per_s, attack.removeprefix("slow ")
        self.apply_s = 0.3 if attack.startswith("slow ") else 0.0
        self.goal, self.rng = target(count), np.random.default_rng(os.getpid())
        self.parts: dict[int, tuple[bytes, list[list[int]]]] = {}
        self.outer: Outer | None = None

    def stand(self, outer: Outer) -> None:
        self.outer, self.local, self.rounds, self.carried = outer, Local(outer), [], []
        self.weights = outer.theta.copy()
        self.say(kind="loaded", digest=outer.digest())

    def told(self, said: dict[str, Any]) -> None:
        outer = self.outer
        if said["kind"] == "fresh":
            self.stand(Outer(np.zeros(self.count, np.float32), RULE))
        elif said["kind"] == "load":
            self.stand(state_files.load(Path(said["path"]), RULE, self.count, said["digest"]))
        elif said["kind"] == "returned":
            payload, used = self.parts.pop(said["round"], (b"", []))
            if payload:  # else an earlier life's
                self.local.returned(said["round"], payload)
                self.carried += used
        elif said["kind"] == "score":
            assert outer is not None
            before, scores = self.loss(outer.theta), {}
            for peer, path in said["parts"].items():
                tried = outer.theta.copy()
                outer.codec.add(Path(path).read_bytes(), tried, -1.0)
                scores[peer] = self.loss(tried) - before
            self.say(kind="scored", round=said["round"], scores=scores)
        elif said["kind"] == "save":
            assert outer is not None
            path = self.folder / "snapshots" / str(outer.round)
            self.say(kind="saved", round=outer.round, digest=state_files.save(outer, path), path=str(path))
        elif said["kind"] == "apply":
            assert outer is not None
            record = said["record"]
            time.sleep(self.apply_s)
            applied = outer.apply(record, {p: Path(path).read_bytes() for p, path in said["parts"].items()})
            add(self.local.follow(applied), self.weights)
            late = self.attack == "flip" and record["round"] >= 5
            if late or (self.attack == "flip at the end" and record["ledger"]["done"] >= LAST):
                outer.theta[0] += 1  # a bit of the memory is wrong, once
                self.attack = ""
            if self.attack == "insist" and record["round"] == 5:  # its processor cannot do this sum
                outer.theta[0] += 1
            self.say(kind="applied", round=record["round"], hash=record["hash"], digest=outer.digest(), seconds=0.0)
        elif said["kind"] == "merge":
            assert outer is not None
            base, record = state_files.load(Path(said["base"]), RULE, self.count, said["base_digest"]), said["record"]
            before = outer.theta.copy()
            self.outer = self.local.outer = merged = self.merged(base, record, said["branches"])
            add(self.local.follow_merge(merged.round, before, merged.theta), self.weights)
            self.say(kind="applied", round=record["round"], hash=record["hash"], digest=merged.digest(), seconds=0.0)

    def merged(self, base: Outer, record: dict[str, Any], branches: list[Any]) -> Outer:
        ends = []
        for branch in branches:
            end = base.copy()
            for entry in branch:
                if "branches" in entry:
                    end = self.merged(base, entry["record"], entry["branches"])
                else:
                    end.apply(entry["record"], {p: Path(x).read_bytes() for p, x in entry["parts"].items()})
            ends.append(end)
        return merge(base.copy(), ends, record["weights"], record["round"])

    def loss(self, weights: np.ndarray[Any, Any]) -> float:
        return float(np.square(weights - self.goal).mean())

    def step(self, one: dict[str, Any]) -> None:
        self.take(one, 1)
        noise = self.rng.normal(size=self.count).astype(np.float32)
        self.weights += 0.02 * (self.goal - self.weights) + 0.01 * noise
        time.sleep(self.step_s)

    def hand_in(self, one: dict[str, Any]) -> None:
        payload = self.local.part(one["round"], self.weights)
        if self.attack == "garbage":
            payload = os.urandom(len(payload))
        used = self.used(one)
        self.parts[one["round"]] = (payload, used)
        path = self.folder / f"{one['round']}.part"
        path.write_bytes(payload)
        tokens = sum(b - a for a, b in used)
        self.say(
            kind="part", round=one["round"], path=str(path), tokens=tokens, targets=tokens, used=used,
            steps=one["steps"], seconds=one["steps"] * self.step_s, loss=self.loss(self.weights),
        )  # fmt: skip

    def run(self) -> None:
        self.say(kind="ready", params=self.count)
        said, busy, since = time.monotonic(), 0.0, time.monotonic()
        worked: float | None = None
        while True:
            self.hear()
            one = self.rounds[0] if self.rounds else None
            if one and self.is_over(one):
                self.hand_in(self.rounds.pop(0))
            elif one and one["left"]:
                if worked is not None and time.monotonic() - worked > 0.5:
                    with open(self.folder / "stalls.jsonl", "a") as f:
                        f.write(json.dumps({"seconds": time.monotonic() - worked, "t": time.time()}) + "\n")
                self.step(one)
                worked = time.monotonic()
                busy += self.step_s
            else:
                time.sleep(0.005)
            if self.outer is not None and time.monotonic() - said > 0.5:
                said = time.monotonic()
                loss = self.loss(self.outer.theta)
                self.say(kind="status", step=0, loss=loss, busy=busy / (said - since), tokens_per_s=1 / self.step_s)
                busy, since = 0.0, said


if __name__ == "__main__":
    Toy(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else "").run()
