"""Tokens/s and memory of one GPU against torchtitan and transformers + Liger, in one run.

    pip install --target FOLDER --no-deps torchtitan==0.2.2 torchdata tyro docstring_parser typeguard liger-kernel
    python benchmarks/h200.py --peers FOLDER [--sizes 1b,3b,8b,8b-4,1b-32k,1b-128k] [--warm "shoal bf16"] [--out FILE]
    python benchmarks/h200.py --sizes 1b --systems "shoal bf16,shoal fp8,shoal fp8 rows"        Shoal alone, no peers
    python benchmarks/h200.py --measured FILE        judge what an earlier run has written

Llama shapes, vocabulary 128,256, 4,096 tokens, untied head, float32 weights, AdamW, clipping, random tokens, no
recomputation but at 128k tokens, where each system takes the first way that fits (sizes.py has their order, `--ways`
names others). Every system in a process of its own, one after the other, with nothing compiled before; the best of the
rounds of each, so that a slow moment of the machine counts against nobody. Bars, for 1b and 3b: bf16 1.15 and fp8 1.40
of torchtitan's bf16, bf16 1.3 of Liger, at no more memory; and for all no more than 5% below what data/h200/speed.json
says was reached (the regression gate). `--warm` starts systems once more, with what they compiled: their first step is
to be ready in 60 s.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from benchmarks.one_gpu.sizes import SIZES  # noqa: E402

BASELINE = HERE / "data" / "h200" / "speed.json"
SYSTEMS = {
    "torchtitan bf16": ["benchmarks.one_gpu.run_torchtitan", "{size}", "{way}", "{steps}"],
    "transformers + Liger": ["benchmarks.one_gpu.run_liger", "{size}", "{way}", "{steps}"],
    "shoal bf16": ["benchmarks.one_gpu.run_shoal", "{size}", "bf16", "{way}", "{steps}"],
    "shoal fp8": ["benchmarks.one_gpu.run_shoal", "{size}", "fp8", "{way}", "{steps}"],
    "shoal fp8 rows": ["benchmarks.one_gpu.run_shoal", "{size}", "fp8-row", "{way}", "{steps}"],
}
BARS = [
    ("shoal bf16", "torchtitan bf16", 1.15),
    ("shoal bf16", "transformers + Liger", 1.30),
    ("shoal fp8", "torchtitan bf16", 1.40),
]
TOLD = [("shoal fp8 rows", "shoal fp8"), ("shoal fp8 rows", "shoal bf16")]  # what a scale for each row costs: no bar
BARRED = ("1b", "3b")  # sizes that the bars are about; of the others the ratios are told
GATE = 0.95
WARM_S = 60

Told = dict[str, dict[str, dict[str, Any]]]  # by size, by system


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, help="the folder that the peers were installed to")
    parser.add_argument("--sizes", default="1b,3b")
    parser.add_argument("--systems", default=",".join(SYSTEMS), help="some of: %(default)s")
    parser.add_argument("--ways", default="", help="of recomputing, to be tried in this order; else the size's own")
    parser.add_argument("--warm", default="", help="systems that are started again, for the time to the first step")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--out", type=Path, help="write what was measured there, as JSON")
    parser.add_argument("--measured", type=Path, help="do not run: take what --out wrote")
    args = parser.parse_args()
    told: Told = json.loads(args.measured.read_text()) if args.measured else {}
    if not told:
        for _ in range(args.rounds):
            for size in args.sizes.split(","):
                for system in args.systems.split(","):
                    ways = args.ways.split(",") if args.ways else SIZES[size].ways
                    _run(told, size, system, ways, args.steps, args.peers, again=system in args.warm.split(","))
                    if args.out:
                        args.out.write_text(json.dumps(told, indent=1))
    return judge(told, json.loads(BASELINE.read_text()) if BASELINE.exists() else {})


def _run(told: Told, size: str, system: str, ways: Sequence[str], steps: int, peers: Path | None, again: bool) -> None:
    too_large = []
    for way in ways:
        with tempfile.TemporaryDirectory() as compiled:
            now = _started(size, system, way, steps, peers, compiled)
            if now and again and (warm := _started(size, system, way, 1, peers, compiled)):
                now["warm_first_step_s"] = warm["first_step_s"]
        if now is None:
            return
        if now:
            break
        too_large.append(way)
        print(f"{size} {system}: out of memory with recompute {way}", flush=True)
    else:
        return
    if len(ways) > 1:
        now |= {"recompute": way, "too_large": too_large}
    print(f"{size:<8} {system:<22} {now['tokens_s']:>8,} tokens/s {now['gb']:>7.1f} GB  {now}", flush=True)
    before = told.setdefault(size, {}).get(system)
    if before is None or now["tokens_s"] > before["tokens_s"]:
        told[size][system] = now


def _started(size: str, system: str, way: str, steps: int, peers: Path | None, compiled: str) -> dict[str, Any] | None:
    """What a process of its own tells, nothing if its memory was not enough, None if it failed otherwise; `compiled`:
    the folder that it finds and leaves compiled code in."""
    module = [part.format(size=size, way=way, steps=steps) for part in SYSTEMS[system]]
    path = os.pathsep.join(str(p) for p in (HERE.parent, peers and peers.resolve(), os.environ.get("PYTHONPATH")) if p)
    settings = {f"{name}_CACHE_DIR": f"{compiled}/{name}" for name in ("TORCHINDUCTOR", "TRITON")}
    settings["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"  # as torchtitan's own launcher says
    out = subprocess.run(
        [sys.executable, "-m", *module],
        capture_output=True,
        text=True,
        env={**os.environ, **settings, "PYTHONPATH": path},
    )
    if out.returncode and "OutOfMemoryError" in out.stderr:
        return {}
    if out.returncode:
        print(f"{size} {system}: {out.stderr[-600:]}", flush=True)
        return None
    told: dict[str, Any] = json.loads(out.stdout.splitlines()[-1])
    return told


def judge(told: Told, baseline: Told) -> int:
    missed = 0
    for size, systems in told.items():
        for ours, peer, bar in BARS:
            if ours in systems and peer in systems:
                ratio = systems[ours]["tokens_s"] / systems[peer]["tokens_s"]
                lean = systems[ours]["gb"] <= systems[peer]["gb"]
                if size not in BARRED:
                    print(f"      {size}: {ours} {ratio:.3f} of {peer}")
                    continue
                missed += (ratio < bar) + (not lean)
                print(
                    f"{'PASS' if ratio >= bar else 'MISS'}  {size}: {ours} {ratio:.3f} of {peer} (bar {bar}); memory "
                    f"{systems[ours]['gb']:.1f} against {systems[peer]['gb']:.1f} GB {'PASS' if lean else 'MISS'}"
                )
        for one, other in TOLD:
            if one in systems and other in systems:
                ratio = systems[one]["tokens_s"] / systems[other]["tokens_s"]
                print(
                    f"      {size}: {one} {ratio:.3f} of {other}, {systems[one]['gb'] - systems[other]['gb']:+.1f} GB"
                )
        for system, now in systems.items():
            if warm := now.get("warm_first_step_s"):
                missed += warm >= WARM_S
                told_times = f"first step after {now['first_step_s']} s, with a warm cache {warm} s (bar {WARM_S})"
                print(f"{'PASS' if warm < WARM_S else 'MISS'}  {size}: {system} {told_times}")
            then = baseline.get(size, {}).get(system)
            if then and system.startswith("shoal") and now["tokens_s"] < GATE * then["tokens_s"]:
                missed += 1
                print(f"SLOWER  {size}: {system} {now['tokens_s']:,} tokens/s; it was {then['tokens_s']:,}")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
