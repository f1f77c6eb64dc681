"""What it costs to look at a run of a million steps, and to start it again: seconds and memory of the real commands.

Writes a journal as a run on GPUs would (steps with the phases of the device, saves in the background, evaluations, a
failure and a restart now and then, batches left out; with --experts a record of the router every 50 steps), and asks
each command for its answer in a process of its own: first without an index, then with the one that the first left.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from shoal.journal.rundir import RunDir
from shoal.spec import Run, dump

STEP_S, SAVE_EVERY, EVAL_EVERY, FAIL_EVERY = 0.4, 500, 1000, 50_000
# Seconds and MB with a million steps, an index at hand; ten million may take twice the memory.
BARS = {"ps": (1.0, 200), "train, finished": (1.0, 200), "a start's reading": (1.0, 200), "report": (5.0, 500)}
# What the supervisor and rank 0 read of the journal before the first step, without the time to import torch. (Older
# versions of Shoal know no `told`: the figures from before are made with this very script.)
START = """
import sys
from pathlib import Path
from shoal.checkpoint.interval import Seen
from shoal.guard.history import History
from shoal.journal.rundir import RunDir
run_dir = RunDir(Path(sys.argv[1]))
History.of(run_dir)
try:
    from shoal.journal.reading import told as read
except ImportError:
    from shoal.journal.journal import records as read
Seen.of(read(run_dir.journal_file))
"""


def lines(steps: int, experts: bool) -> Iterator[str]:
    chance = random.Random(1)
    t, attempt, step, undone = 1_700_000_000.0, 0, 0, set[int]()

    def line(kind: str, **fields: object) -> str:
        return json.dumps({"v": 1, "kind": kind, "t": round(t, 6), **fields}, separators=(",", ":"))

    def begin() -> Iterator[str]:
        nonlocal t
        yield line("attempt", attempt=attempt, world=64, pids=list(range(64)))
        t += 40
        about = {"device": "NVIDIA H200", "params": 8_000_000_000, "precision": "bf16", "peak_flops": 9.89e14}
        yield line("start", attempt=attempt, step=step, world=64, total=steps, resumed_from=step or None, **about)

    yield line("open", session=0, pid=4242, host="node-0", argv=["shoal", "train", "run.yaml"], resumed=False)
    for key in ("resources.device", "mesh.dp_shard", "mesh.micro_batch", "train.kernels"):
        yield line("decision", key=key, value=1, why="as an example")
    yield from begin()
    saving: tuple[float, int, float] | None = None
    while step < steps:
        if step and step % FAIL_EVERY == 123 and step not in undone:
            undone.add(step)
            yield line("failure", attempt=attempt, rank=17, cause="killed", evidence="ended by SIGKILL", signal=9, at=t)
            t += 5
            attempt, step, saving = attempt + 1, step - step % SAVE_EVERY, None
            yield from begin()
        began, t, step = t, t + STEP_S * chance.uniform(0.98, 1.1), step + 1
        loss = 2.0 + 6.0 / (1 + step / 2000) + chance.gauss(0, 0.02)
        took = t - began
        yield (
            f'{{"v":1,"kind":"step","t":{t:.6f},"attempt":{attempt},"step":{step},"begin":{began:.6f},'
            f'"position":{(step - 1) * 512},"samples":512,"tokens":4194304,"targets":4193792,"loss":{loss:.8f},'
            f'"grad_norm":{1 + chance.random():.8f},"lr":0.0003,"flops":2.1e+17,"hardware_flops":2.6e+17,'
            f'"time":{{"data_s":{0.002 * chance.random():.6f},"compute_s":{took * 0.95:.6f},"optimizer_s":0.004}},'
            f'"device":{{"step":{step - 1},"wait_s":0.001,"forward_s":{took * 0.3:.6f},"backward_s":{took * 0.6:.6f},'
            f'"clip_s":0.002,"optimizer_s":0.011}}'
            + (f',"expert_imbalance":{1 + chance.random():.4f},"expert_dead":0.0' if experts else "")
            + "}"
        )
        t += 0.0005
        if experts and step % 50 == 0:
            layers = [round(1 + chance.random(), 4) for _ in range(32)]
            more = {"imbalance": layers, "entropy": layers, "dead": layers, "imbalance_mean": 1.5, "imbalance_max": 2.0}
            yield line("router", attempt=attempt, step=step, experts=64, first_layer=0, dead_share=0.0, **more)
        if saving and t > saving[2]:
            of = {"bytes": 96_000_000_000, "path": f"step-{saving[1]:08d}-term-1", "stall_s": 0.3, "persist_s": 9.0}
            yield line("checkpoint", attempt=attempt, step=saving[1], begin=round(saving[0], 6), **of)
            saving = None
        if step % SAVE_EVERY == 0:
            saving = (t, step, t + 9.0)
        if step % EVAL_EVERY == 0:
            began, t = t, t + 12.0
            yield line("eval", attempt=attempt, step=step, begin=round(began, 6), loss=loss + 0.1, targets=4_000_000)
        if step % 20_011 == 0:
            skipped = {"batch": step, "loss": "nan", "grad_norm": "nan", "why": "the loss is no number"}
            yield line("skip", attempt=attempt, step=step + 1, begin=round(t - 0.3, 6), **skipped)
    yield line("finished", attempt=attempt, step=steps, digest="0123abcd" * 4)
    t += 1
    yield line("close", session=0, status="done", exit_code=0, reason=f"all {steps} steps are done")
    yield line("exit", session=0)


def make(workspace: Path, steps: int, experts: bool) -> RunDir:
    run_dir = RunDir.of("long", workspace)
    run_dir.path.mkdir(parents=True)
    asked = {"name": "long", "model": {"dim": 64, "layers": 2, "vocab_size": 320}, "data": {"train": "data"}}
    run = Run.model_validate({**asked, "train": {"steps": steps, "batch": 512}})
    run_dir.spec_file.write_text(dump(run))
    run_dir.identity_file.write_text("{}")
    with open(run_dir.journal_file, "w") as f:
        f.writelines(f"{line}\n" for line in lines(steps, experts))
    return run_dir


def cost(command: list[str]) -> tuple[float, float, float]:
    """Wall seconds, CPU seconds and peak MB of a process."""
    began = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} left with {process.returncode}")
    return time.perf_counter() - began, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--experts", action="store_true", help="of a mixture of experts")
    parser.add_argument("--only", nargs="*", help="commands, by a part of their name")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        workspace = Path(folder)
        run_dir = make(workspace, args.steps, args.experts)
        index, place = run_dir.path / "journal.index", ["--workspace", folder]
        shoal = [sys.executable, "-m", "shoal"]
        commands = {
            "ps": [*shoal, "ps", "long", *place],
            "train, finished": [*shoal, "train", str(run_dir.spec_file), *place],
            "a start's reading": [sys.executable, "-c", START, str(run_dir.path)],
            "report": [*shoal, "report", "long", *place],
            "report --no-png": [*shoal, "report", "long", "--no-png", *place],
            "report of two": [*shoal, "report", "long", str(run_dir.path), "--no-png", *place],
        }
        size = run_dir.journal_file.stat().st_size / 1e6
        print(f"{args.steps:,} steps, a journal of {size:,.0f} MB")
        print(f"{'':22}{'s':>8}{'CPU s':>8}{'MB':>8}   bar")
        missed = False
        for index_is_there in (False, True):
            for name, command in commands.items():
                if args.only and not any(part in name for part in args.only):
                    continue
                if not index_is_there:
                    if name != "ps":
                        continue
                    index.unlink(missing_ok=True)
                wall_s, cpu_s, mb = cost(command)
                bar = BARS.get(name) if index_is_there else None
                scale = 1 if args.steps <= 1_000_000 else 2
                over = bar is not None and (mb > scale * bar[1] or (scale == 1 and cpu_s > bar[0]))
                missed |= over
                told = "" if bar is None else f"{bar[0]:g} s, {scale * bar[1]} MB{'  MISSED' if over else ''}"
                label = name if index_is_there else f"{name}, no index"
                print(f"{label:22}{wall_s:8.2f}{cpu_s:8.2f}{mb:8.0f}   {told}", flush=True)
        if index.exists():
            print(f"the index has {index.stat().st_size / 1e6:,.0f} MB")
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
