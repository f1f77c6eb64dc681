"""A swarm of real nodes over the emulated wide area network: starts them, watches them, and adds up what they did."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from shoal.emulate import Wan
from shoal.net.identity import Identity

PORT = 7000
ROOT = Path(__file__).resolve().parents[2]


class Swarm:
    """Peers at open sites, one a site; `site` names both. All keys are known from the beginning, also of those who come
    later."""

    def __init__(self, wan: Wan, folder: Path, sites: Sequence[str], run: dict[str, Any], trainer: list[str]) -> None:
        self.wan, self.folder, self.run, self.trainer = wan, folder, run, trainer
        folder.mkdir(parents=True, exist_ok=True)
        self.keys = {site: Identity.at(folder / f"{site}.key").id for site in sites}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, site: str, trainer: list[str] | None = None) -> None:
        addresses = {self.keys[s]: [f"{self.wan.address(s)}:{PORT}"] for s in self.keys}
        config = {
            "folder": str(self.folder / site),
            "key": str(self.folder / f"{site}.key"),
            "run": self.run,
            "trainer": trainer or self.trainer,
            "peers": addresses,
            "port": PORT,
        }
        file = self.folder / f"{site}.json"
        file.write_text(json.dumps(config))
        env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-m", "benchmarks.fleet.swarm_peer", str(file)]
        self.processes[site] = self.wan.run(site, command, env)

    def kill(self, site: str) -> None:
        """As if its machine had lost power: node and trainer at once."""
        node = self.processes.pop(site)
        for pid in [*_children(node.pid), node.pid]:
            with suppress(ProcessLookupError):
                os.kill(pid, 9)
        node.wait()

    def status(self, site: str) -> dict[str, Any]:
        try:
            return dict(json.loads((self.folder / site / "status.json").read_text()))
        except (OSError, ValueError):
            return {}

    def events(self, site: str, kind: str) -> list[dict[str, Any]]:
        found = []
        with suppress(OSError), open(self.folder / site / "events.jsonl") as f:
            for line in f:
                with suppress(ValueError):
                    record = json.loads(line)
                    if record.get("kind") == kind:
                        found.append(record)
        return found

    def agree(self) -> bool:
        """All that run are the members of one head, and hold the same weights."""
        said = [self.status(site) for site in self.processes]
        members = {self.keys[site] for site in self.processes}
        return (
            all(said)
            and len({s["head"] for s in said}) == 1
            and len({s["digest"] for s in said} | {None}) == 2
            and all(set(s["peers"]) == members for s in said)
        )

    def until(self, true: Callable[[], bool], within_s: float, what: str) -> float:
        """Seconds until it was so."""
        began = time.monotonic()
        while not true():
            for site, process in self.processes.items():
                if process.poll() not in (None, 0):
                    raise AssertionError(f"the node of {site} has ended with {process.returncode}")
            if time.monotonic() - began > within_s:
                raise AssertionError(f"{what}: not within {within_s:g} s; {self}")
            time.sleep(0.2)
        return time.monotonic() - began

    def round(self, site: str) -> int:
        return int(self.status(site).get("round", 0))

    def __str__(self) -> str:
        said = {site: self.status(site) for site in self.processes}
        return "; ".join(
            f"{k}: round {s.get('round')} of {len(s.get('peers', []))} {s.get('mode')}" for k, s in said.items()
        )

    def close(self) -> None:
        for site in list(self.processes):
            self.kill(site)


def _children(pid: int) -> list[int]:
    """All below it."""
    found: list[int] = []
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += [int(child) for child in (task / "children").read_text().split()]
    return found + [grand for child in found for grand in _children(child)]
