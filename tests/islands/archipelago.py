"""Real training on islands, forked from this warm process: start them, kill them, and read what they did."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from shoal.decide.auto import decide
from shoal.islands import worker as island_worker
from shoal.journal.journal import records
from shoal.journal.rundir import RunDir
from shoal.own.carry import carry
from shoal.spec import dump
from shoal.spec.run import Run
from shoal.train import worker
from tests.forked import fork
from tests.patience import Stopwatch


@dataclass
class Archipelago:
    workspace: Path
    run: Run
    world: int = 1  # processes of an island
    pids: dict[int, list[int]] = field(default_factory=dict)
    _codes: dict[int, set[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.run = decide(self.run, self.workspace, self.world).run
        self.run_dir = RunDir.of(self.run.name, self.workspace)
        self.run_dir.path.mkdir(parents=True, exist_ok=True)
        self.run_dir.spec_file.write_text(dump(self.run))
        self.run_dir.journal_file.touch()
        carry(self.run, self.run_dir)

    def start(self, *islands: int) -> None:
        for island in islands:
            store = tempfile.mktemp(prefix=f"store-{island}-", dir=self.workspace)
            self.pids[island] = [self._fork(island, rank, store) for rank in range(self.world)]

    def kill(self, island: int, rank: int = 0) -> None:
        """One rank; its agent would end the others of the island, as is done here."""
        for pid in [self.pids[island][rank], *self.pids[island]]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in self.pids.pop(island):
            os.waitpid(pid, 0)
        self._codes.pop(island, None)

    def signal(self, island: int, number: int) -> None:
        for pid in self.pids[island]:
            os.kill(pid, number)

    def wait(self, timeout_s: float = 90.0) -> dict[int, set[int]]:
        """The exit codes of each island, once all have ended by themselves."""
        codes: dict[int, set[int]] = {}
        watch = Stopwatch()
        while self.pids:
            codes |= self.reap()
            if watch.quiet_s() > timeout_s:
                raise TimeoutError(f"islands {sorted(self.pids)} have not ended:\n{self.logs()}")
            time.sleep(0.02)
        return codes

    def reap(self) -> dict[int, set[int]]:
        """Islands whose last rank has ended since the last call, with the exit codes of all."""
        ended = {}
        for island, pids in list(self.pids.items()):
            for pid in list(pids):
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    pids.remove(pid)
                    self._codes.setdefault(island, set()).add(os.waitstatus_to_exitcode(status))
            if not pids:
                del self.pids[island]
                ended[island] = self._codes.pop(island)
        return ended

    def logs(self) -> str:
        for pids in self.pids.values():
            for pid in pids:
                os.kill(pid, signal.SIGUSR1)
        time.sleep(0.5)
        return "\n".join(f"{path.name}:\n{path.read_text()[-4000:]}" for path in self.workspace.glob("island-*.txt"))

    def journal(self, kind: str) -> list[dict[str, Any]]:
        return [r for r in records(self.run_dir.journal_file) if r["kind"] == kind]

    def wait_for_step(self, step: int, timeout_s: float = 60.0) -> None:
        watch = Stopwatch()
        while max((r["step"] for r in self.journal("step")), default=0) < step:
            if watch.quiet_s() > timeout_s:
                raise TimeoutError(f"step {step} was not reached:\n{self.logs()}")
            time.sleep(0.01)

    def __enter__(self) -> Archipelago:
        return self

    def __exit__(self, *_: object) -> None:
        for island in list(self.pids):
            self.kill(island)

    def _fork(self, island: int, rank: int, store: str) -> int:
        return fork(lambda: self._work(island, rank, store), self.workspace / f"island-{island}-{rank}.txt")

    def _work(self, island: int, rank: int, store: str) -> int:
        here = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": self.world, "LOCAL_WORLD_SIZE": self.world}
        os.environ.update({key: str(value) for key, value in here.items()})
        os.environ.update(SHOAL_ISLAND=str(island), SHOAL_RENDEZVOUS=f"file://{store}", GLOO_SOCKET_IFNAME="lo")
        torch.set_num_threads(1)
        return worker.outcome(lambda: self.run, self.run_dir, worker.StopFlag(), do=island_worker.work)
