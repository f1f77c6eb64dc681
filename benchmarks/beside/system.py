"""One system's ranks, as processes that wait for their turn (turns.py), and what they answer."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from benchmarks.beside.asked import Asked
from benchmarks.beside.turns import MARK
from tests.gpu.crew import death_of, words_of

from shoal import shared_gpu
from shoal.guard.classify import classify, culprit

ROOT = Path(__file__).resolve().parents[2]
MODULES = {"shoal": "run_shoal", "before": "run_shoal", "torchtitan": "run_torchtitan"}


class Ended(RuntimeError):
    """A rank has ended, or said nothing for too long."""


@dataclass
class System:
    name: str
    asked: Asked
    ranks: list[subprocess.Popen[str]]
    logs: list[Path]
    heard: list[queue.Queue[dict[str, Any]]]
    seconds: list[float] = field(default_factory=list)  # of each round

    def say(self, words: str) -> None:
        for rank in self.ranks:
            assert rank.stdin is not None
            with contextlib.suppress(OSError):  # it has ended; `answers` tells
                rank.stdin.write(words + "\n")
                rank.stdin.flush()

    def answers(self, within_s: float) -> list[dict[str, Any]]:
        """One of each rank."""
        end, told = time.monotonic() + within_s, []
        for heard in self.heard:
            while True:
                try:
                    told.append(heard.get(timeout=0.2))
                    break
                except queue.Empty:
                    self._alive(end)
        return told

    def _alive(self, end: float) -> None:
        codes = [rank.poll() for rank in self.ranks]
        if any(code is not None for code in codes):
            time.sleep(1.0)  # for the last words of the others
            codes = [rank.poll() for rank in self.ranks]
            failures = [classify(death_of(i, code, self.logs[i])) for i, code in enumerate(codes) if code is not None]
            first = culprit(failures)
            assert first is not None
            raise Ended(f"{self.name}: rank {first.rank} {words_of(first)}")
        if time.monotonic() > end:
            raise Ended(f"{self.name}: no answer in time; rank 0's log ends: {self.logs[0].read_text()[-300:]}")

    def end(self) -> None:
        self.say("end")
        for rank in self.ranks:
            try:
                rank.wait(5)
            except subprocess.TimeoutExpired:
                rank.kill()
                rank.wait()


def shares_gpus(world: int, device: str) -> bool:
    return device == "cuda" and world > torch.cuda.device_count()


def start(name: str, asked: Asked, env: dict[str, str], source: Path) -> System:
    folder = Path(asked.folder)
    folder.mkdir(parents=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks, logs, heard = [], [], []
    for rank in range(asked.world):
        own = {
            **os.environ,
            **env,
            **(shared_gpu.settings(rank) if shares_gpus(asked.world, asked.device) else {}),
            shared_gpu.SETTING: "1",
            "PYTHONPATH": os.pathsep.join([str(source), str(ROOT), *env.get("PYTHONPATH", "").split(os.pathsep)]),
            "PYTHONUNBUFFERED": "1",
            "OMP_NUM_THREADS": "1",
            "PYTORCH_ALLOC_CONF": "expandable_segments:True",
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(asked.world),
            "LOCAL_WORLD_SIZE": str(asked.world),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "SHOAL_RENDEZVOUS": f"file://{folder}/store",
        }
        logs.append(folder / f"rank-{rank}.log")
        with open(logs[-1], "wb") as log:
            command = [sys.executable, "-m", f"benchmarks.beside.{MODULES[name]}", asked.dump()]
            ranks.append(
                subprocess.Popen(
                    command, env=own, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, cwd=folder
                )
            )
        heard.append(listen_to(ranks[-1]))
    return System(name, asked, ranks, logs, heard)


def listen_to(rank: subprocess.Popen[str]) -> queue.Queue[dict[str, Any]]:
    heard: queue.Queue[dict[str, Any]] = queue.Queue()

    def listen() -> None:
        assert rank.stdout is not None
        for line in rank.stdout:
            if line.startswith(MARK):
                heard.put(json.loads(line.removeprefix(MARK)))

    threading.Thread(target=listen, daemon=True).start()
    return heard
