"""A save costs training next to nothing, and a load is no slower: Shoal against torch DCP and torch.save, in one run.

    python benchmarks/checkpoint.py [--quick] [--ranks 2 1] [--size medium] [--device cuda]

Real processes train Shoal's own decoder with FSDP2 and AdamW on random tokens and save their whole state again and
again, each time in another way; the ways take turns, so that the noise of the machine falls on all of them. All write
to the same disk, fsync'd. DCP has its fastest settings, is warmed up, and keeps its memory between saves.

    stall      time in which the training thread stands still, with any wait before the next update
    lost       seconds of training that a save costs in all, also by what goes on in the background
    CPU        seconds of CPU time that all processes together burn for a save
    durable    seconds until the checkpoint is on disk, while training goes on
    save       GB/s of a save with nothing else to do (with --alone 0: of those while training goes on)
    load       GB/s from disk (page cache dropped, where this user may) and from the page cache

Exits with 1 when a bar is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
SHARED_MEMORY = Path("/dev/shm")
MARK = "SHOAL_BENCH_MARK"
STALL_BAR = 0.5  # of DCP async's best
LOST_BAR = 0.01  # of the training time, at one save a minute
CHECKSUM_BAR = 0.02  # of the save's time
LOAD_BAR = 1.0  # of DCP's time
# DCP's other settings (it copies while training waits) and torch.save without fsync are never the best ones.
USUAL = ["Shoal, synchronous", "DCP", "DCP thread, overlapped", "DCP process, overlapped", "torch.save + fsync"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--ranks", type=int, nargs="+", help="process counts to measure (default: 2 1; on cuda: 1)")
    parser.add_argument("--size", help="small, medium, large or 1b (default: medium; on cuda: 1b)")
    parser.add_argument("--rounds", type=int, default=5, help="in each, every way to save and to load has its turn")
    parser.add_argument("--alone", type=int, default=5, help="rounds in which each also saves with nothing else to do")
    parser.add_argument("--pairs", type=int, default=4, help="saves with and without checksums in each round")
    parser.add_argument("--rest", type=float, default=3.0, metavar="S", help="seconds before each of those")
    parser.add_argument("--quiet", type=float, default=5.0, metavar="S", help="seconds of training between two saves")
    parser.add_argument("--minutes", type=float, default=30, help="after that no other round is begun")
    parser.add_argument("--folder", type=Path, help="where to write (default: the system's temporary folder)")
    parser.add_argument("--quick", action="store_true", help="a small state and two rounds: about a minute")
    parser.add_argument("--beside", nargs="+", metavar="NAME", default=USUAL, help="other ways to save, or `all`")
    parser.add_argument("--json", type=Path, help="write every single number there, too")
    parser.add_argument("--as-rank", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.quick:
        args.rounds, args.alone, args.quiet, args.rest = 2, 2, 1.0, 0.5
    args.size = args.size or ("1b" if args.device == "cuda" else "small" if args.quick else "medium")
    args.ranks = args.ranks or ([1] if args.device == "cuda" else [2] if args.quick else [2, 1])
    if args.as_rank:
        from benchmarks.checkpointing.run import run

        return run(args, SHARED_MEMORY / args.as_rank.name)
    signal.signal(signal.SIGTERM, _stopped)
    results, missed = [], 0
    for ranks in args.ranks:
        results.append(_measure(args.folder, ranks))
        missed += _report(results[-1])
        if args.json:
            args.json.write_text(json.dumps(results, indent=1))
        if results[-1].get("stopped"):
            return 143
    return int(missed > 0)


def _measure(where: Path | None, ranks: int) -> dict[str, Any]:
    """Starts the processes and returns what rank 0 has written down."""
    folder = Path(tempfile.mkdtemp(prefix="shoal-bench-", dir=where))
    common = {
        **os.environ,
        MARK: uuid.uuid4().hex,
        "WORLD_SIZE": str(ranks),
        "OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // ranks)),
        "SHOAL_RENDEZVOUS": f"file://{folder}/store",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, __file__, *sys.argv[1:], "--as-rank", str(folder)]
    processes: list[subprocess.Popen[bytes]] = []
    try:
        with open(folder / "log", "wb") as log:  # DCP's daemon is talkative
            for rank in range(ranks):
                environment = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                processes.append(subprocess.Popen(command, env=environment, stderr=log))
        if failed := _first_failure(processes):
            sys.stderr.write((folder / "log").read_text(errors="replace")[-4000:])
            raise SystemExit(f"a process of the benchmark ended with {failed}; its words are above")
        return json.loads((folder / "result.json").read_text())
    except InterruptedError:
        if not (folder / "result.json").exists():
            sys.exit(143)
        print("stopped; what there is:")
        return json.loads((folder / "result.json").read_text()) | {"stopped": True}
    finally:
        for process in processes:
            process.kill()
        shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(SHARED_MEMORY / folder.name, ignore_errors=True)


def _first_failure(processes: list[subprocess.Popen[bytes]]) -> int:
    """Waits until all have ended well (0), or one has not: its exit code."""
    while True:
        codes = [process.poll() for process in processes]
        if failed := [code for code in codes if code]:
            return failed[0]
        if None not in codes:
            return 0
        time.sleep(0.05)


def _stopped(*_: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # `timeout` says it twice
    raise InterruptedError


def _report(result: dict[str, Any]) -> int:
    """Prints the table and the bars; how many were missed."""
    ways, size = result["ways"], result["bytes"]
    step_s = median(cost["step_s"] for way in ways.values() for cost in way["costs"])
    print(
        f"\n{result['ranks']} process(es) on {result['device']}, torch {result['torch']}: a state of "
        f"{size / 1e9:.2f} GB in {result['tensors']} tensors, a step of {step_s:.2f} s; "
        f"medians of {len(ways['Shoal']['costs'])} saves"
    )
    head = ("stall ms", "lost s", "CPU s", "durable s", "save GB/s", "load GB/s", "cached GB/s")
    print(f"{'':<25}" + "".join(f"{title:>12}" for title in head))
    for name, way in ways.items():
        stall, lost, cpu, durable = (_median(way, key) for key in ("stall_s", "lost_s", "cpu_s", "durable_s"))
        speeds = [way["alone"] or [durable], way["cold load"], way["warm load"]]
        cells = [f"{stall * 1e3:.1f}", f"{lost:.2f}", f"{cpu:.2f}", f"{durable:.2f}"]
        cells += [f"{size / median(times) / 1e9:.2f}" if times else "" for times in speeds]
        print(f"{name:<25}" + "".join(f"{cell:>12}" for cell in cells))
    bars = list(_bars(result))
    for held, words in bars:
        print(f"{'PASS' if held else 'FAIL'}  {words}")
    sys.stdout.flush()
    return sum(not held for held, _ in bars)


def _bars(result: dict[str, Any]) -> Iterator[tuple[bool, str]]:
    ways = result["ways"]
    ours = ways["Shoal"]
    stall, lost = _median(ours, "stall_s"), _median(ours, "lost_s") / 60
    if rivals := {name: _median(way, "stall_s") for name, way in ways.items() if name.startswith("DCP ")}:
        best = min(rivals, key=rivals.__getitem__)
        ratio = stall / rivals[best]
        yield ratio <= STALL_BAR, f"stall {ratio:.3f} of the best of DCP async, {best} (bar {STALL_BAR})"
    yield lost < LOST_BAR, f"training lost at one save a minute {lost:.2%} (bar {LOST_BAR:.0%})"
    if (times := result["checksums"])["without"]:
        shares = sorted(1 - b / a for a, b in zip(times["with"], times["without"], strict=False))
        share, half = median(shares), f"half of {len(shares)} pairs from {shares[len(shares) // 4]:.1%} to"
        half += f" {shares[-1 - len(shares) // 4]:.1%}"
        yield share < CHECKSUM_BAR, f"checksums {share:.1%} of a save's time (bar {CHECKSUM_BAR:.0%}; {half})"
    if "DCP" in ways:
        for kind in ("cold load", "warm load"):
            if pairs := list(zip(ours[kind], ways["DCP"][kind], strict=False)):
                ratio = median(a / b for a, b in pairs)
                yield ratio <= LOAD_BAR, f"{kind} in {ratio:.2f} of DCP's time (bar {LOAD_BAR:.0f})"


def _median(way: dict[str, Any], key: str) -> float:
    return median(cost[key] for cost in way["costs"])


if __name__ == "__main__":
    sys.exit(main())
