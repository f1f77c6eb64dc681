"""A trainer that waits for its turn: before each step it asks, and is told by its stdin how many it may take.

    @@ {"shoal": where it is}       go 5        @@ {"s": 0.31, "gb": 8.2}        trace 2, and the like        end

Whoever waits holds its memory and nothing else of the GPU. A traced turn also tells what the GPU did (trace.py).
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from benchmarks.beside.trace import shares
from torch.profiler import ProfilerActivity, profile

MARK = "@@ "


class Turns:
    def __init__(self, device: str, folder: str) -> None:
        self._cuda = device == "cuda"
        self._trace = Path(folder) / f"trace-{os.environ['RANK']}.json"
        self._left = 0
        self._began: float | None = None
        self._profile: profile | None = None

    def __call__(self) -> bool:
        """Before each step; True: it is to stop. (It never is: the end is at once.)"""
        if self._left == 0:
            if self._cuda:
                torch.cuda.synchronize()
            self._tell(_ready() if self._began is None else self._took(time.perf_counter() - self._began))
            self._wait()
        self._left -= 1
        return False

    def _took(self, seconds: float) -> dict[str, Any]:
        told: dict[str, Any] = {"s": seconds}
        if self._cuda:
            told["gb"] = round(torch.cuda.max_memory_allocated() / 1e9, 2)
        if self._profile is not None:
            self._profile.stop()
            self._profile.export_chrome_trace(str(self._trace))
            told |= shares(json.loads(self._trace.read_text())["traceEvents"], seconds)
            self._profile = None
        return told

    def _wait(self) -> None:
        word, _, count = sys.stdin.readline().strip().partition(" ")
        if word not in ("go", "trace"):
            os._exit(0)  # nothing is saved
        self._left = int(count)
        if word == "trace":
            self._profile = profile(activities=[ProfilerActivity.CUDA if self._cuda else ProfilerActivity.CPU])
            self._profile.start()
        self._began = time.perf_counter()

    def _tell(self, told: dict[str, Any]) -> None:
        print(MARK + json.dumps(told), file=sys.__stdout__, flush=True)


def _ready() -> dict[str, Any]:
    """Which tree it is of, where there are two."""
    return {"shoal": getattr(sys.modules.get("shoal"), "__file__", None)}
