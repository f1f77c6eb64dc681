"""A trainer that computes nothing and takes its time: steps and parts of a large model, as long and as large.

python -m benchmarks.fleet.swarm_trainer {"params", "part_bytes", "step_s", "batch", "hand_in_s", "follow_s", "code_s"}

A step of `batch` samples takes `step_s`. At the end of a round the weights leave the device (`hand_in_s`, which nothing
hides); a part is encoded (`code_s`) and a record's parts are decoded (`code_s`) beside the next steps; the result goes
back to the device (`follow_s`, not hidden). Weights are not kept: a digest is the hash of the records. Writes what it
did to SHOAL_SWARM_FOLDER/times.jsonl: seconds of computing, of moving weights, and of waiting.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks.fleet.stand_in import StandIn


class Trainer(StandIn):
    def __init__(self, asked: dict[str, Any]) -> None:
        super().__init__()
        self.asked, self.digest = asked, "0"
        self.handed_in: dict[int, list[list[int]]] = {}
        self.later: list[tuple[float, dict[str, Any]]] = []  # what is encoded or decoded meanwhile
        self.owed = 0.0  # seconds that the device is to wait for new weights
        self.times = {"compute": 0.0, "moving": 0.0, "waiting": 0.0}
        self.payload = bytearray(os.urandom(asked["part_bytes"]))
        self.file = open(self.folder / "times.jsonl", "a")  # noqa: SIM115

    def passes(self, what: str, seconds: float) -> None:
        """Meanwhile messages are read, and what is coded gets done. A step is as long as it was, which is a little more
        than was asked for."""
        began = time.monotonic()
        until = began + seconds
        while True:
            self.hear()
            now = time.monotonic()
            while self.later and self.later[0][0] <= now:
                self.say(**self.later.pop(0)[1])
            if now >= until:
                break
            time.sleep(min(0.02, until - now))
        self.times[what] += time.monotonic() - began

    def soon(self, **message: Any) -> None:
        begin = max(time.monotonic(), self.later[-1][0] if self.later else 0.0)
        self.later.append((begin + self.asked["code_s"], message))

    def told(self, said: dict[str, Any]) -> None:
        match said["kind"]:
            case "fresh" | "load":
                if said["kind"] == "load":
                    self.digest = json.loads((Path(said["path"]) / "state.json").read_text())["digest"]
                self.rounds, self.carried = [], []
                self.say(kind="loaded", digest=self.digest)
            case "returned":
                self.carried += self.handed_in.pop(said["round"], [])
            case "apply" | "merge":
                name = said["record"]["hash"]
                self.digest = hashlib.sha256(f"{self.digest} {name}".encode()).hexdigest()
                self.owed += self.asked["follow_s"]
                self.soon(kind="applied", round=said["record"]["round"], hash=name, digest=self.digest, seconds=0.0)
            case "save":
                folder = self.folder / "snapshots" / f"{time.time_ns()}"
                folder.mkdir(parents=True)
                (folder / "state.json").write_text(json.dumps({"digest": self.digest}))
                self.say(kind="saved", round=0, digest=self.digest, path=str(folder))

    def step(self, one: dict[str, Any]) -> None:
        self.take(one, self.asked["batch"])
        self.passes("compute", self.asked["step_s"])

    def hand_in(self, one: dict[str, Any]) -> None:
        self.passes("moving", self.asked["hand_in_s"])
        path = self.folder / f"{one['round']}.part"
        self.payload[:8] = one["round"].to_bytes(8, "big")
        threading.Thread(target=path.write_bytes, args=(bytes(self.payload),)).start()  # long before it is coded
        used = self.handed_in[one["round"]] = self.used(one)
        tokens = sum(b - a for a, b in used)
        self.soon(
            kind="part", round=one["round"], path=str(path), tokens=tokens, targets=tokens, used=used,
            steps=one["steps"], seconds=one["steps"] * self.asked["step_s"], loss=None,
        )  # fmt: skip
        self.file.write(json.dumps({"round": one["round"], "t": time.time(), **self.times}) + "\n")
        self.file.flush()

    def run(self) -> None:
        self.say(kind="ready", params=self.asked["params"])
        said = time.monotonic()
        while True:
            self.hear()
            one = self.rounds[0] if self.rounds else None
            if one and self.is_over(one):
                self.hand_in(self.rounds.pop(0))
            elif self.owed:
                owed, self.owed = self.owed, 0.0
                self.passes("moving", owed)
            elif one and one["left"]:
                self.step(one)
            else:
                self.passes("waiting", 0.02)
            if time.monotonic() - said > 1.0:
                said = time.monotonic()
                total = sum(self.times.values())
                self.say(kind="status", busy=self.times["compute"] / total if total else 0.0)


if __name__ == "__main__":
    Trainer(json.loads(sys.argv[1])).run()
