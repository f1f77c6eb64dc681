"""Starts the peers of a cut model as processes, on loopback or each in a place of its own in an emulated network."""

from __future__ import annotations

import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from shoal.emulate.wan import Site, Wan
from shoal.journal.journal import records
from shoal.net.identity import Identity

ROOT = Path(__file__).resolve().parents[2]
PORT = 4100


@dataclass(frozen=True)
class Network:
    """None of it: loopback."""

    mbit: float = 0.0
    rtt_ms: float = 0.0
    loss: float = 0.0

    def __str__(self) -> str:
        if not self.mbit:
            return "loopback"
        lossy = f", {self.loss:.1%} loss" if self.loss else ""
        return f"{self.mbit:g} Mbit/s, {self.rtt_ms:g} ms{lossy}"


LOOPBACK, WAN = Network(), Network(100.0, 100.0)


@dataclass(frozen=True)
class Outcome:
    """What the peers' journals say, by stage and peer."""

    journals: list[list[list[dict[str, Any]]]]

    def steps(self, stage: int = 0, peer: int = 0) -> list[dict[str, Any]]:
        return [r for r in self.journals[stage][peer] if r["kind"] == "step"]

    def losses(self) -> list[float]:
        return [r["loss"] for r in self.steps()]

    def step_s(self) -> float:
        """The median, without the first, which waits for connections to find their speed."""
        return statistics.median(self.gaps()[1:])

    def gaps(self) -> list[float]:
        at = [r["at_s"] for r in self.steps()]
        return [b - a for a, b in pairwise(at)]

    def digests(self, stage: int) -> set[str]:
        """Of the peers that have finished."""
        return {r["digest"] for journal in self.journals[stage] for r in journal if r["kind"] == "finished"}

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [r for stage in self.journals for journal in stage for r in journal if r["kind"] == kind]


class Peers:
    """Running peers. `command` is followed by --peers, --key and --folder."""

    def __init__(self, command: Sequence[str], counts: Sequence[int], folder: Path, network: Network) -> None:
        self.folders = [[folder / f"peer-{s}-{i}" for i in range(n)] for s, n in enumerate(counts)]
        self._network, self._command, self._file = network, list(command), folder / "peers.json"
        self._sites = [[f"s{s}p{i}" for i in range(n)] for s, n in enumerate(counts)]
        self._stack = ExitStack()
        self._wan: Wan | None = None
        self._processes: dict[Path, subprocess.Popen[Any]] = {}

    def __enter__(self) -> Peers:
        flat = [site for stage in self._sites for site in stage]
        if self._network.mbit:
            sites = [Site(s, up_mbit=self._network.mbit, down_mbit=self._network.mbit) for s in flat]
            self._wan = self._stack.enter_context(Wan(sites, self._network.rtt_ms, self._network.loss))
            at = {site: f"{self._wan.address(site)}:{PORT}" for site in flat}
        else:
            at = {site: f"127.0.0.1:{_free_port()}" for site in flat}
        peers = [
            [{"id": Identity.at(f / "key").id, "tcp": [at[s]]} for f, s in zip(*pair, strict=True)]
            for pair in zip(self.folders, self._sites, strict=True)
        ]
        self._file.write_text(json.dumps(peers))
        for stage in range(len(self.folders)):
            for peer in range(len(self.folders[stage])):
                self.start(stage, peer)
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes.values():
            process.kill()
            process.wait()
        self._stack.close()

    def start(self, stage: int, peer: int) -> None:
        folder = self.folders[stage][peer]
        command = [*self._command, "--peers", str(self._file), "--key", str(folder / "key"), "--folder", str(folder)]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
        with open(folder / "log", "ab") as log:
            how: dict[str, Any] = {"stdout": log, "stderr": subprocess.STDOUT}
            if self._wan is None:
                self._processes[folder] = subprocess.Popen(command, env=env, **how)
            else:
                self._processes[folder] = self._wan.run(self._sites[stage][peer], command, env, **how)

    def kill(self, stage: int, peer: int) -> None:
        process = self._processes.pop(self.folders[stage][peer])
        process.send_signal(signal.SIGKILL)
        process.wait()

    def until(self, true: Callable[[], bool], within_s: float) -> None:
        end = time.monotonic() + within_s
        while not true():
            for folder, process in self._processes.items():
                if process.poll():
                    sys.exit(f"{folder.name} left with {process.returncode}:\n{(folder / 'log').read_text()[-3000:]}")
            if time.monotonic() > end:
                logs = "\n".join(f"{f.name}: {(f / 'log').read_text()[-800:]}" for f in self._processes)
                sys.exit(f"not done after {within_s:g} s:\n{logs}")
            time.sleep(0.1)

    def finish(self, within_s: float, without: Path | None = None) -> Outcome:
        """When all have finished; one may be left out, which came back too late for the last steps."""
        wanted = [p for folder, p in self._processes.items() if folder != without]
        self.until(lambda: all(p.poll() == 0 for p in wanted), within_s)
        return self.outcome()

    def outcome(self) -> Outcome:
        return Outcome([[records(f / "journal.jsonl") for f in stage] for stage in self.folders])

    def steps(self, stage: int, peer: int) -> int:
        file = self.folders[stage][peer] / "journal.jsonl"
        return sum(r["kind"] == "step" for r in records(file)) if file.exists() else 0

    def carried_bytes(self) -> int:
        return sum(self._wan.carried().values()) if self._wan else 0


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])
