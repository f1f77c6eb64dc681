"""How long the survivors of a kill -9 stand still: islands, torchft, and torchrun that restarts from a checkpoint."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import median

from benchmarks.fleet.stalls import stalls as stalls_of
from tests.islands.archipelago import Archipelago
from tests.ranks import _warm
from tests.train.tiny import make_data, make_run

from shoal.decide.auto import decide
from shoal.journal.journal import records
from shoal.journal.rundir import RunDir
from shoal.spec import dump

REPLICAS = 3
AGAINST_TORCHFT, AGAINST_RESTART = 2.0, 10.0
MOST_S = 1.5
WORKLOAD = {"model.dim": 64, "model.layers": 4, "train.batch": 24, "data.seq_len": 128}
HERE = Path(__file__).resolve().parent


def kill(kills: int, wheel: str) -> int:
    _warm()
    rng = random.Random(1)
    stalls = {"islands": _islands(kills, rng)}
    _say("islands", stalls["islands"])
    for name, measure in {
        "torchrun, restart from a checkpoint": lambda: _torchrun(max(2, kills // 4)),
        wheel: lambda: _torchft(kills, wheel),
    }.items():
        try:
            stalls[name] = measure()
            _say(name, stalls[name])
        except (OSError, RuntimeError, TimeoutError, subprocess.CalledProcessError) as e:
            print(f"{name}: left out ({e})")
    ours, missed = median(stalls["islands"]), 0
    checks = [(ours <= MOST_S, f"islands: {ours:.2f} s beyond a step (bar {MOST_S:g} s)")]
    for name, bar in ((wheel, AGAINST_TORCHFT), ("torchrun, restart from a checkpoint", AGAINST_RESTART)):
        if name in stalls:
            ratio = median(stalls[name]) / ours
            checks.append((ratio >= bar, f"{ratio:.1f} times shorter than with {name} (bar {bar:g})"))
    for good, words in checks:
        missed += not good
        print("PASS" if good else "FAIL", "", words)
    return int(missed > 0)


def _say(name: str, stalls: list[float]) -> None:
    ordered = sorted(stalls)
    most = ordered[int(0.99 * (len(ordered) - 1))]
    print(f"{name}: {len(stalls)} kills, median {median(stalls):.2f} s, 99th percentile {most:.2f} s", flush=True)


def _islands(kills: int, rng: random.Random) -> list[float]:
    with tempfile.TemporaryDirectory() as folder:
        data = make_data(Path(folder) / "data", documents=400)
        run = make_run(data, **{**WORKLOAD, "train.steps": 100_000, "fleet.islands": REPLICAS})
        with Archipelago(Path(folder), run) as fleet:
            fleet.start(*range(REPLICAS))
            fleet.wait_for_step(10)

            def ticks() -> list[float]:
                return [r["t"] for r in fleet.journal("step")]

            def kill_one() -> float:
                everybody = list(range(REPLICAS))
                _until(lambda: fleet.journal("epoch")[-1]["members"].__len__() == REPLICAS, 60)
                victim = rng.choice(everybody)
                time.sleep(rng.uniform(0.2, 0.5))  # at any moment of a step
                at = time.time()
                fleet.kill(victim)
                _until(lambda: len([t for t in ticks() if t > at]) > 3, 60)
                fleet.start(victim)
                return at

            return stalls_of([kill_one() for _ in range(kills)], ticks())


def _torchft(kills: int, wheel: str) -> list[float]:
    """Three replicas that all-reduce a gradient of the same size through a torchft Manager (its DDP wrapper does not
    survive in 0.2.0), with a lighthouse that takes a replica for dead after a second."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        install = [sys.executable, "-m", "uv", "pip", "install", "-q", "--target", str(folder / "site"), "--no-deps"]
        packages = [wheel, "opentelemetry-api", "opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-http"]
        packages += [
            "opentelemetry-semantic-conventions",
            "opentelemetry-proto",
            "opentelemetry-exporter-otlp-proto-common",
        ]
        subprocess.run([*install, *packages], check=True, capture_output=True)
        env = os.environ | {"PYTHONPATH": f"{folder / 'site'}", "OMP_NUM_THREADS": "1", "USE_LIBUV": "0"}
        script = [sys.executable, str(HERE / "torchft_replica.py"), str(folder)]
        lighthouse = subprocess.Popen([*script, "lighthouse"], env=env, stderr=subprocess.DEVNULL)
        replicas: dict[int, subprocess.Popen[bytes]] = {}

        def start(i: int) -> None:
            out = open(folder / f"replica-{i}.log", "ab")  # noqa: SIM115  # the child's
            replicas[i] = subprocess.Popen([*script, str(i)], env=env, stdout=out, stderr=out)

        def ticks(i: int) -> list[float]:
            path = folder / f"steps-{i}"
            return [float(line.split()[0]) for line in path.read_text().splitlines()] if path.exists() else []

        def members(i: int) -> int:
            path = folder / f"steps-{i}"
            lines = path.read_text().split("\n")[:-1] if path.exists() else []
            return int(lines[-1].split()[1]) if lines else 0

        try:
            _until((folder / "address").exists, 30)
            for i in range(REPLICAS):
                start(i)
            rng, found = random.Random(1), []
            for _ in range(kills):
                _until(lambda: all(members(i) == REPLICAS and ticks(i)[-1] > time.time() - 5 for i in replicas), 120)
                victim = rng.randrange(REPLICAS)
                watched = (victim + 1) % REPLICAS
                time.sleep(rng.uniform(0.2, 0.5))
                at = time.time()
                replicas[victim].kill()
                replicas[victim].wait()
                _until(lambda at=at, w=watched: len([t for t in ticks(w) if t > at]) > 2, 90)
                if any(process.poll() is not None for i, process in replicas.items() if i != victim):
                    raise RuntimeError(f"a survivor has died: {(folder / f'replica-{watched}.log').read_text()[-300:]}")
                found += stalls_of([at], ticks(watched))
                start(victim)
            return found
        finally:
            for process in [*replicas.values(), lighthouse]:
                process.kill()
                process.wait()


def _torchrun(kills: int) -> list[float]:
    """Shoal under torchrun, which ends all workers and starts them again; they go on from the newest checkpoint."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = make_data(folder / "data", documents=400)
        run = make_run(data, **{**WORKLOAD, "train.steps": 100_000, "checkpoint.every": 5})
        file = folder / "run.yaml"
        file.write_text(dump(decide(run, folder, REPLICAS).run))
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            f"--nproc-per-node={REPLICAS}",
            f"--max-restarts={kills}",
        ]
        command += ["-m", "shoal.train", str(file), "--workspace", str(folder)]
        journal = RunDir.of(run.name, folder).journal_file
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

        def steps() -> list[dict[str, float]]:
            return [r for r in records(journal) if r["kind"] == "step"] if journal.exists() else []

        try:
            found = []
            for _ in range(kills):
                reached = len(steps()) + 20
                _until(lambda reached=reached: len(steps()) > reached, 120)
                found_workers = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True)
                workers = found_workers.stdout.split()
                before = steps()
                at, furthest = time.time(), max(r["step"] for r in before)
                os.kill(int(workers[-1]), signal.SIGKILL)
                _until(lambda f=furthest: max(r["step"] for r in steps()) > f + 1, 180)
                usual = median(b["t"] - a["t"] for a, b in pairwise(before))
                after = next(r["t"] for r in steps() if r["t"] > at and r["step"] > furthest)
                found.append(after - at - usual)
            return found
        finally:
            process.terminate()
            process.wait()


def _until(true: Callable[[], object], timeout_s: float) -> None:
    until = time.monotonic() + timeout_s
    while not true():
        if time.monotonic() > until:
            raise TimeoutError(f"not within {timeout_s:g} s")
        time.sleep(0.01)
