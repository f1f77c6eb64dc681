"""Seeded faults on four islands that really train: whether each run ends by itself, and with the same bits."""

from __future__ import annotations

import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.fleet.stalls import stalls as stalls_of
from tests.islands.archipelago import Archipelago
from tests.islands.storm import Storm
from tests.ranks import _warm
from tests.train.tiny import make_data, make_run

ISLANDS, STEPS, FAULTS_A_RUN = 4, 160, 10
SPEC = {"fleet.islands": ISLANDS, "fleet.shards": 16, "fleet.deterministic": True, "checkpoint.every": 40}


def campaign(faults: int, seed: int) -> int:
    _warm()
    bad, stalls = 0, []
    with tempfile.TemporaryDirectory() as folder:
        data = make_data(Path(folder) / "data")
        with Archipelago(Path(folder), _run(data, "quiet")) as quiet:
            quiet.start(*range(ISLANDS))
            quiet.wait(300)
            expected = quiet.journal("finished")[-1]["digest"]
        done = number = 0
        while done < faults:
            count = min(FAULTS_A_RUN, faults - done)
            words = _storm(Path(folder), data, f"storm-{seed + number}", seed + number, count, expected, stalls)
            done, number, bad = done + count, number + 1, bad + bool(words)
            print(f"  {done} faults: {words or 'nothing lost, the same bits'}", flush=True)
    stalls.sort()
    p99 = stalls[int(0.99 * (len(stalls) - 1))]
    print(f"{done} faults in {number} runs: {number - bad} ended by themselves, every sample once, with the same bits")
    print(f"survivors stood still after a kill: median {median(stalls):.2f} s, 99th percentile {p99:.2f} s")
    return int(bad > 0)


def _run(data: Path, name: str) -> Any:
    return make_run(data, **{**SPEC, "name": name, "train.steps": STEPS})


def _storm(folder: Path, data: Path, name: str, seed: int, faults: int, expected: str, stalls: list[float]) -> str:
    """What was wrong in the end; nothing, if nothing was."""
    with Archipelago(folder, _run(data, name)) as fleet:
        storm = Storm(fleet, seed, faults)
        if wrong := storm.blow():
            return wrong
        stalls += stalls_of(storm.killed, [r["t"] for r in fleet.journal("step")])
        digests = {r["digest"] for r in fleet.journal("finished")}
        return "" if digests == {expected} else f"other weights: {digests}"
