"""Tokens a second of islands against DDP, in turns on the same machine.

Whatever else the machine does only makes steps slower, and not those of one way more than the other's: so what is
compared is the speed that a quarter of all steps of a way reach, over all rounds.
"""

from __future__ import annotations

import os
import tempfile
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from tests.islands.archipelago import Archipelago
from tests.ranks import run_ranks
from tests.train.tiny import make_data, make_run

from shoal.decide.auto import decide
from shoal.journal.journal import records
from shoal.journal.rundir import RunDir
from shoal.parallel.place import join
from shoal.spec.run import Run
from shoal.train.worker import work

BAR = 0.03
# 7 million parameters, 4,096 tokens a step: one step takes about a second on one core.
WORKLOAD = {
    "model.dim": 256,
    "model.layers": 8,
    "model.heads": 8,
    "model.kv_heads": 4,
    "model.ffn_dim": 704,
    "model.vocab_size": 2048,
    "data.seq_len": 256,
    "train.batch": 16,
    "resources.threads": 1,
}
SKIPPED = 4  # steps at the beginning of a round


def overhead(rounds: int, steps: int) -> int:
    ways = {"DDP": {}, "islands": {"fleet.islands": 2}}
    speeds = _measure(ways, rounds, steps)
    ddp, islands = _print(speeds).values()
    lost = 1 - islands / ddp
    verdict = "PASS" if lost <= BAR else "FAIL"
    print(f"{verdict}  islands are {lost:.1%} slower than DDP on 2 processes (bar {BAR:.0%})")
    return int(lost > BAR)


def price(rounds: int, steps: int) -> int:
    ways = {"usual": {"fleet.islands": 2}, "deterministic": {"fleet.islands": 2, "fleet.deterministic": True}}
    speeds = _measure(ways, rounds, steps)
    usual, deterministic = _print(speeds).values()
    print(f"fleet.deterministic costs {1 - deterministic / usual:.1%} of the tokens/s on 2 islands")
    return 0


def _measure(ways: dict[str, dict[str, Any]], rounds: int, steps: int) -> dict[str, list[float]]:
    """Tokens a second of every step."""
    speeds: dict[str, list[float]] = {name: [] for name in ways}
    with tempfile.TemporaryDirectory() as folder:
        data = make_data(Path(folder) / "data", documents=4000)
        for number in range(rounds):
            names = list(ways) if number % 2 == 0 else list(reversed(ways))
            for name in names:
                changes = {**WORKLOAD, "train.steps": steps, "name": f"{name}-{number}", **ways[name]}
                found = _speeds(make_run(data, **changes), Path(folder))
                speeds[name] += found
                print(f"  round {number + 1}: {name} {median(found):,.0f} tokens/s (median)", flush=True)
    return speeds


def _speeds(run: Run, workspace: Path) -> list[float]:
    if run.fleet.islands > 1:
        with Archipelago(workspace, run) as fleet:
            fleet.start(*range(run.fleet.islands))
            fleet.wait(600)
    else:
        decided = decide(run, workspace, 2)
        run_dir = RunDir.of(run.name, workspace)
        run_dir.path.mkdir(parents=True)

        def rank(rank: int, world: int) -> None:
            os.environ["SHOAL_ATTEMPT"] = "0"
            work(run_dir, decided.run, join(decided.run), lambda: False)

        run_ranks(rank, 2, timeout_s=600)
    steps = [r for r in records(RunDir.of(run.name, workspace).journal_file) if r["kind"] == "step"][SKIPPED:]
    return [b["tokens"] / (b["t"] - a["t"]) for a, b in pairwise(steps)]


def _print(speeds: dict[str, list[float]]) -> dict[str, float]:
    """What a quarter of the steps reach, of each way."""
    reached = {name: quantiles(values, n=4)[2] for name, values in speeds.items()}
    for name, values in speeds.items():
        print(f"{name:<14} {reached[name]:>8,.0f} tokens/s (upper quartile of {len(values)} steps)")
    return reached
