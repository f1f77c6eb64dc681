"""A small run on disk for the tests of drills, and `shoal drill` as a person starts it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from shoal.data.index import write_index
from shoal.data.writer import ShardWriter

RUN = """
name: small
model: {dim: 32, layers: 1, heads: 2}
data: {train: data, seq_len: 32}
train: {steps: 60, batch: 4}
checkpoint: {every: 5}
resources: {processes: 1, threads: 1, device: cpu}
guard: {backoff_s: 0.1}
"""


def make(folder: Path) -> Path:
    """The path of a run file, with its data beside it."""
    random = np.random.default_rng(0)
    (folder / "data").mkdir()
    writer = ShardWriter(folder / "data", "shard-00000", "uint16")
    for _ in range(200):
        writer.add(np.append(random.integers(97, 123, size=random.integers(20, 200)), 256))
    write_index(folder / "data", [writer.close()], vocab_size=257, eos_id=256, tokenizer="byte")
    (folder / "run.yaml").write_text(RUN)
    return folder / "run.yaml"


def start(folder: Path, *args: str) -> subprocess.Popen[str]:
    memory = folder / "memory"
    memory.mkdir(exist_ok=True)
    return subprocess.Popen(
        [sys.executable, "-m", "shoal", "drill", "run.yaml", "--json", *args],
        cwd=folder,
        env=os.environ | {"SHOAL_MEMORY": str(memory)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def drill(folder: Path, *args: str, within_s: float = 280) -> tuple[int, dict[str, Any]]:
    """Exit code and result; nothing of it is left."""
    process = start(folder, *args)
    out, err = process.communicate(timeout=within_s)
    assert out, err
    assert leftovers(folder) == [], err
    return process.returncode, json.loads(out)


def leftovers(folder: Path) -> list[str]:
    """What a drill has left on the disk, in memory and among the processes."""
    there = [str(path) for path in (*folder.glob(".drill-*"), *(folder / "memory").glob("*"))]
    for process in Path("/proc").glob("[0-9]*"):
        try:
            environment = (process / "environ").read_bytes()
        except OSError:
            continue
        if str(folder / "memory").encode() in environment and (process / "stat").read_text().split(") ")[1][0] != "Z":
            there.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode())
    return there


def assert_accounted(found: dict[str, Any]) -> None:
    """The ledgers of both runs sum to the time on the drill's own clock, within 1%."""
    for name in ("ledger", "calm_ledger"):
        ledger = found[name]
        assert ledger["right"], ledger
        sums_to = sum(ledger["parts_s"].values()) + ledger["between_s"]
        assert abs(sums_to - ledger["wall_s"]) <= 0.01 * ledger["wall_s"]
