"""Seeded faults on four islands that really train: whether each run ends by itself, and with the same bits."""

from __future__ import annotations

import random
import signal
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.fleet.stalls import stalls as stalls_of
from tests.ranks import _warm
from tests.train.archipelago import Archipelago
from tests.train.tiny import make_data, make_run

from shoal.fleet.member import SILENT_S

ISLANDS, STEPS, FAULTS_A_RUN = 4, 120, 10
SPEC = {"fleet.islands": ISLANDS, "fleet.shards": 16, "fleet.deterministic": True, "checkpoint.every": 40}
KINDS = ("kill", "kill", "kill", "stop", "pause", "first", "two", "preempt")


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
    rng = random.Random(seed)
    with Archipelago(folder, _run(data, name)) as fleet:
        fleet.start(*range(ISLANDS))
        fleet.wait_for_step(3)
        moments = sorted(rng.sample(range(4, STEPS - 15), faults))
        back: dict[int, tuple[float, str]] = {}
        killed: list[float] = []
        began = time.monotonic()
        while fleet.pids or back:
            now = time.monotonic()
            for island in [i for i, (at, _) in back.items() if at <= now]:
                if back.pop(island)[1] == "start":
                    fleet.start(island)
                else:
                    fleet.signal(island, signal.SIGCONT)
            for island, codes in fleet.reap().items():
                if codes == {143}:
                    back[island] = (now + 0.2, "start")  # it was told to leave, and comes back
                elif codes != {0}:
                    return f"island {island} ended with {codes}: {fleet.logs()[-1500:]}"
            step = max((r["step"] for r in fleet.journal("step")), default=0)
            members = fleet.journal("epoch")[-1]["members"] if step else []
            free = [island for island in fleet.pids if island not in back]
            # Somebody who has the state is left alone: when all die, a run goes on from its checkpoint.
            if moments and step >= moments[0] and sum(island in members for island in free) > 2:
                moments.pop(0)
                _fault(rng, fleet, free, back, killed, now)
            if now - began > 300:
                return f"stands still at step {step}: {fleet.logs()[-3000:]}"
            time.sleep(0.01)
        steps = fleet.journal("step")
        if [r["step"] for r in steps] != list(range(1, STEPS + 1)):
            return f"the journal's steps are {[r['step'] for r in steps]}"
        stalls += stalls_of(killed, [r["t"] for r in steps])
        digests = {r["digest"] for r in fleet.journal("finished")}
        return "" if digests == {expected} else f"other weights: {digests}"


def _fault(
    rng: random.Random,
    fleet: Archipelago,
    free: list[int],
    back: dict[int, tuple[float, str]],
    killed: list[float],
    now: float,
) -> None:
    kind, island = rng.choice(KINDS), rng.choice(free)
    if kind == "first":
        newest = fleet.journal("epoch")[-1]["members"]
        island = next((i for i in newest if i in free), island)
    if kind in ("stop", "pause"):
        fleet.signal(island, signal.SIGSTOP)
        back[island] = (now + (SILENT_S + 1.0 if kind == "stop" else rng.uniform(0.1, 1.5)), "go on")
    elif kind == "preempt":
        fleet.signal(island, signal.SIGTERM)
    else:
        for victim in rng.sample(free, 2) if kind == "two" and len(free) > 2 else [island]:
            killed.append(time.time())
            fleet.kill(victim)
            back[victim] = (now + rng.choice([0.0, 0.3, 1.0]), "start")
