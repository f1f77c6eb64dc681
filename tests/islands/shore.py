"""Starts toy islands, does things to them, and checks from their logs that nothing was lost, repeated or forked."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.forked import fork
from tests.islands import toy
from tests.patience import Stopwatch


@dataclass
class Shore:
    folder: Path
    islands: int = 4
    steps: int = 60
    shards: int = 16
    tree: bool = True
    step_s: float = 0.02
    faults: Path | None = None  # read by processes of their own (shoal.islands.cut looks for it when it is imported)
    pids: dict[int, int] = field(default_factory=dict)

    def start(self, *islands: int) -> None:
        for island in islands:
            numbers = [island, self.islands, self.steps, self.shards]
            argv = [str(self.folder), *map(str, numbers), f"--step-s={self.step_s}", *(["--tree"] * self.tree)]
            out = self.folder / f"out-{island}.txt"
            if self.faults:
                self.pids[island] = _spawn(argv, out, self.faults, island)
            else:
                self.pids[island] = fork(lambda argv=argv: toy.run(toy.parse(argv)), out)

    def signal(self, island: int, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pids[island], number)

    def kill(self, island: int) -> None:
        self.signal(island, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pids[island], 0)
        del self.pids[island]

    def reap(self) -> dict[int, int]:
        """Islands that have ended, with their exit codes."""
        ended = {}
        for island, pid in list(self.pids.items()):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                ended[island] = os.waitstatus_to_exitcode(status)
                del self.pids[island]
        return ended

    def wait(self, timeout_s: float = 60.0) -> dict[int, int]:
        """Until all have ended by themselves."""
        ended, watch = {}, Stopwatch()
        while self.pids:
            ended |= self.reap()
            if watch.quiet_s() > timeout_s:
                stacks = self.stacks()
                raise TimeoutError(f"islands {sorted(self.pids)} have not ended:\n{stacks}")
            time.sleep(0.02)
        return ended

    def stacks(self) -> str:
        for pid in self.pids.values():
            os.kill(pid, signal.SIGCONT)
            os.kill(pid, signal.SIGUSR1)
        time.sleep(0.5)
        return "\n".join(f"island {i}:\n{(self.folder / f'out-{i}.txt').read_text()[-6000:]}" for i in self.pids)

    def close(self) -> None:
        for island in list(self.pids):
            self.kill(island)

    def __enter__(self) -> Shore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def log(self, island: int) -> list[dict[str, Any]]:
        path = self.folder / f"island-{island}.log"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []  # without one that is being written
        return [json.loads(line) for line in lines]

    def step(self) -> int:
        """The furthest that any island has come."""
        logs = (self.log(island) for island in range(self.islands))
        return max((r["step"] for log in logs for r in log if r["kind"] == "step"), default=-1)

    def wait_for_step(self, step: int, timeout_s: float = 30.0) -> None:
        watch = Stopwatch()
        while self.step() < step:
            if watch.quiet_s() > timeout_s:
                raise TimeoutError(f"step {step} was not reached, but {self.step()}:\n{self.stacks()}")
            time.sleep(0.01)

    def check(self) -> str:
        """All that must be true at the end; returns the digest."""
        everything = list(range(self.shards))
        digests = set()
        for island in range(self.islands):
            at = 0
            for record in self.log(island):
                match record["kind"]:
                    case "entered":
                        at = record["step"]
                    case "step":
                        assert record["step"] == at, f"island {island} went from {at} to {record['step']}"
                        assert record["samples"] == everything, f"step {at} took shards {record['samples']}"
                        at += 1
                    case "finished":
                        assert at == self.steps
                        digests.add(record["digest"])
        by_step: dict[int, set[int]] = {}
        for island in range(self.islands):
            for record in self.log(island):
                if record["kind"] == "step":
                    by_step.setdefault(record["step"], set()).add(record["epoch"])
        assert sorted(by_step) == list(range(self.steps))
        assert len(digests) == 1, f"the islands have ended with other weights: {digests}"
        return digests.pop()


def alone(steps: int, shards: int) -> str:
    """The digest of the same run without islands: the tree over all shards, in one place."""
    from shoal.spec.island_sums import Forest

    one = toy.Toy(Path("nowhere"))
    for step in range(steps):
        forest: Forest[Any] = Forest(shards, lambda a, b: a.add_(b))
        for shard in range(shards):
            forest.plant((shard, shard + 1), one.gradient(step, shard))
        total = forest.root()
        assert total is not None
        one.apply(step, total, [])
    return one.digest()


def _spawn(argv: list[str], out: Path, faults: Path, island: int) -> int:
    env = os.environ | {"SHOAL_FAULT_FILE": str(faults), "SHOAL_ISLAND": str(island), "OMP_NUM_THREADS": "1"}
    with open(out, "ab") as f:
        return subprocess.Popen([sys.executable, "-m", "tests.islands.toy", *argv], env=env, stdout=f, stderr=f).pid
