"""Collectives of all GPUs (NCCL), or of a few processes of a processor (gloo), by size.

The bytes of a row are those of the whole: what an all-gather leaves with everyone, what a reduce-scatter and an
all-reduce begin with, what everyone sends in an all-to-all.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from shoal import shared_gpu
from shoal.bench import shapes
from shoal.bench.clock import digits
from shoal.bench.machine import Machine
from shoal.errors import TransientError
from shoal.plan.hardware_types import Row

OPERATIONS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
REPEATS = 5  # in a round on GPUs: ranks do not begin at the same moment, and share what that costs
START_S = 90.0  # that processes may take to start and to find each other, beyond what they measure

# Newer torch has other names for the same, and warns of the old ones.
_all_gather: Callable[..., object] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Callable[..., object] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def measure(machine: Machine, processes: int, seconds: float) -> list[Row]:
    """Rows of operation, devices, bytes, seconds. All processes have ended when this returns, however it does.

    On a processor they are forked, which takes a tenth of a second instead of four; to be called before torch has
    threads of its own, which do not survive that.
    """
    how = "fork" if sys.platform == "linux" and not machine.cuda else "spawn"
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as folder:
        asked = (processes, machine.device.type, folder, seconds)
        ranks = mp.start_processes(_rank, asked, processes, join=False, daemon=True, start_method=how)
        try:
            _wait(ranks, seconds + START_S)
        finally:
            for process in ranks.processes:
                process.kill()
                process.join()
        rows = json.loads((Path(folder) / "rows.json").read_text())
    return [tuple(row) for row in rows]


def bus_gbs(row: Row) -> float:
    """GB/s that each device sends, if the collective goes round a ring."""
    operation, devices, size, seconds = row
    rounds = 2 if operation == "all_reduce" else 1
    return float(rounds * size * (devices - 1) / devices / seconds / 1e9)


def link_gbs(rows: tuple[Row, ...]) -> float | None:
    """GB/s of a large all-gather, one way: the slope between the two largest, without what each costs at any size."""
    gathered = sorted(row[2:] for row in rows if row[0] == "all_gather")
    if len(gathered) < 2:
        return None
    (smaller, less_s), (larger, more_s) = gathered[-2:]
    devices = next(row[1] for row in rows if row[0] == "all_gather")
    if more_s <= less_s:
        return None
    return float((larger - smaller) / (more_s - less_s) * (devices - 1) / devices / 1e9)


def _wait(ranks: mp.ProcessContext, seconds: float) -> None:
    end = time.monotonic() + seconds
    try:
        while not ranks.join(timeout=0.2, grace_period=1.0):
            if time.monotonic() > end:
                raise TransientError(f"the processes did not end within {seconds:.0f} s")
    except mp.ProcessRaisedException as e:
        raise TransientError(str(e).strip().splitlines()[-1]) from None
    except mp.ProcessExitedException as e:
        raise TransientError(str(e)) from None


def _rank(rank: int, world: int, kind: str, folder: str, seconds: float) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # whoever started it handles those for it
        signal.signal(number, signal.SIG_DFL)
    device = torch.device(kind, rank % torch.cuda.device_count()) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        if world > torch.cuda.device_count():
            os.environ.update(shared_gpu.settings(rank))
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
        os.environ["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform == "linux" else "lo0"
    dist.init_process_group(
        "nccl" if kind == "cuda" else "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=START_S),
        device_id=device if kind == "cuda" else None,
    )
    rows = _rows(device, world, seconds)
    if rank == 0:
        (Path(folder) / "rows.json").write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def _rows(device: torch.device, world: int, seconds: float) -> list[Row]:
    sizes = shapes.COLLECTED if device.type == "cuda" else shapes.COLLECTED_CPU
    rows: list[Row] = []
    spent = 0.0
    for size in sizes:
        works = _works(device, world, size)
        # The times are those of the slowest, the same on all: they all stop at the same place.
        if rows and spent + 4 * sum(row[3] for row in rows[-len(works) :]) > seconds:
            break
        for operation, work in works.items():
            taken, all_s = _taken(device, work, seconds / len(sizes) / len(OPERATIONS))
            rows.append((operation, world, size, digits(taken)))
            spent += all_s
    return rows


def _works(device: torch.device, world: int, size: int) -> dict[str, Callable[[], object]]:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    part = size // dtype.itemsize // world
    whole, other = (torch.zeros(part * world, device=device, dtype=dtype) for _ in range(2))
    own = torch.zeros(part, device=device, dtype=dtype)
    works: list[Callable[[], object]] = [
        lambda: _all_gather(whole, own),
        lambda: _reduce_scatter(own, whole),
        lambda: dist.all_reduce(whole),
        lambda: dist.all_to_all_single(other, whole),
    ]
    return dict(zip(OPERATIONS, works, strict=True))


def _taken(device: torch.device, work: Callable[[], object], budget_s: float) -> tuple[float, float]:
    """Seconds of one (the median of rounds, each as long as its slowest rank's), and of all of them."""
    for _ in range(2):
        work()
    once = _slowest(device, [_round(device, work)])[0]
    repeats = REPEATS if device.type == "cuda" else 1
    count = min(max(int(budget_s / once / repeats), 3), 50)
    taken = _slowest(device, [_round(device, work) for _ in range(count)])
    return median(taken), repeats * sum(taken) + 3 * once


def _round(device: torch.device, work: Callable[[], object]) -> float:
    dist.barrier()
    if device.type != "cuda":
        began_s = time.perf_counter()
        work()
        return time.perf_counter() - began_s
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(REPEATS):
        work()
    end.record()
    torch.cuda.synchronize(device)
    return begin.elapsed_time(end) / 1e3 / REPEATS


def _slowest(device: torch.device, taken: list[float]) -> list[float]:
    times = torch.tensor(taken, device=device, dtype=torch.float64)
    dist.all_reduce(times, op=dist.ReduceOp.MAX)
    return [float(t) for t in times.tolist()]
