"""Claim: a killed worker is noticed and the whole group started again sooner than torchrun does it.

Two workers that only sleep (no torch in them, so that nothing but the supervisor is measured). One is killed with -9;
the time runs until both have started again. The survivor hears SIGTERM, or is deaf to it as a rank in a collective is.
Peer: torchrun (torch.distributed.run) with --max-restarts, its defaults otherwise. Shoal's backoff is 0 here.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

WORKER = """
import os, signal, sys, time
if sys.argv[2] == "deaf": signal.signal(signal.SIGTERM, signal.SIG_IGN)
name = os.path.join(sys.argv[1], f"{time.time():.6f}-{os.environ['RANK']}-{os.getpid()}")
open(name + ".tmp", "w").close(); os.rename(name + ".tmp", name)
while True: time.sleep(60)
"""
SUPERVISOR = """
import json, sys
from pathlib import Path
from shoal.guard.supervise import supervise
from shoal.spec.run import Run
from shoal.journal.rundir import RunDir
folder, command = json.loads(sys.argv[1])
run = {"name": "bench", "data": {"train": "none"}, "train": {"steps": 1}, "track": {"mlflow": False},
       "guard": {"restarts": 1000, "backoff_s": 0.0}}
sys.exit(supervise(RunDir.of("bench", Path(folder)), Run.model_validate(run), 2, command=command))
"""


def started(folder: Path) -> list[tuple[float, int, int]]:
    """(time, rank, pid) of every worker that has started, in that order."""
    found = [p.name.split("-") for p in folder.glob("*-*-*") if not p.name.endswith(".tmp")]
    return sorted((float(t), int(rank), int(pid)) for t, rank, pid in found)


def until_started(folder: Path, count: int, within_s: float) -> list[tuple[float, int, int]]:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if len(now := started(folder)) >= count:
            return now
        time.sleep(0.005)
    raise SystemExit(f"{count} workers did not start within {within_s} s")


def restarts(who: str, hearing: str, repetitions: int) -> list[float]:
    """Seconds from a kill to both workers being there again, one a repetition."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "started"
        folder.mkdir()
        worker = Path(scratch) / "worker.py"
        worker.write_text(WORKER)
        arguments = [str(worker), str(folder), hearing]
        if who == "shoal":
            command = [sys.executable, "-c", SUPERVISOR, json.dumps([scratch, [sys.executable, *arguments]])]
        else:
            torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
            command = [*torchrun, "--max-restarts=1000", *arguments]
        process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        try:
            times = []
            for repetition in range(1, repetitions + 1):
                now = until_started(folder, 2 * repetition, within_s=120)
                victim = next(pid for _, rank, pid in reversed(now) if rank == 1)
                time.sleep(0.3)  # a supervisor that has just started its workers may not be watching yet
                killed_at = time.time()
                os.kill(victim, signal.SIGKILL)
                times.append(until_started(folder, 2 * repetition + 2, within_s=120)[-1][0] - killed_at)
            return times
        finally:
            pids = [pid for _, _, pid in started(folder)[-2:]]
            process.kill()
            process.wait()
            for pid in pids:  # torchrun's workers outlive it
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=5)
    args = parser.parse_args()
    ratios = []
    print(f"{'survivor':<10} {'shoal s':>9} {'torchrun s':>11} {'ratio':>7}")
    # A deaf survivor costs torchrun half a minute, so it is asked once.
    for hearing, repetitions in (("hears", args.repetitions), ("deaf", 1)):
        ours = statistics.median(restarts("shoal", hearing, args.repetitions))
        theirs = statistics.median(restarts("torchrun", hearing, repetitions))
        ratios.append(theirs / ours)
        print(f"{hearing:<10} {ours:>9.2f} {theirs:>11.2f} {ratios[-1]:>6.1f}x")
    held = ratios[0] >= 1 and ratios[1] >= 10
    print("bar: not slower when the survivor hears, 10x when it is deaf:", "held" if held else "MISSED")
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
