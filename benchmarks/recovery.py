"""How long a run on a thousand GPUs stands still after a rank was killed, part by part; bar: 90 s for 8B at 1,024.

    python benchmarks/recovery.py [--cases llama3-8b:1024 llama3-70b:4096] [--disk-ms 5] [--node-gbs 2] [--disk-gbs 100]

No cluster is needed, and none was there. Each part says where its seconds come from:

  measured    run here: real processes and supervisor, one rank of so many on torch's fake process group; CPU seconds,
              since the eight processes of a node have cores of their own and this machine is shared
  arithmetic  bytes by a bandwidth, questions by a latency; the figures are options
  taken       from where it was measured: a GPU of ours, or a publication

The steps since the last checkpoint, which are done again, are not in it: that is the interval's choice
(`checkpoint.every`). A hang takes 10 s more until it is named, a lost node 15 s and however long a new one takes.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

BAR_S = {("llama3-8b", 1024): 90.0}
CASES = ["llama3-8b:1024", "llama3-8b:4096", "llama3-70b:1024", "llama3-70b:4096"]
PER_NODE, SHARDS, SHARD_TOKENS = 8, 28_000, 357_000_000  # ten trillion tokens
STATE_BYTES = 12  # a parameter: float32, and AdamW's two moments
STORE_RANKS = (8, 16, 32)  # real processes that meet
COMPILE_S = 25.0  # H200: 15.2 s in step 1 and 9.7 s in step 2, with nothing cached
COMMUNICATOR_S = {1024: 5.0, 4096: 10.0}  # MegaScale (NSDI 2024): below 5 s at 2,048 GPUs, below 30 s at 12,288
JOURNAL_S = 0.93  # a million steps; benchmarks/long_runs.py, decision 052


@dataclass(frozen=True)
class Part:
    what: str
    seconds: float
    by: str  # measured, arithmetic, taken
    how: str


@contextmanager
def cpu(into: list[float]) -> Iterator[None]:
    began = time.process_time()
    yield
    into.append(time.process_time() - began)


def noticed_and_ended() -> Part:
    from restart import restarts

    took = statistics.median(restarts("shoal", "deaf", 3))
    return Part("noticed, others ended, started", took, "measured", "kill -9; survivors deaf as in a collective")


def waited() -> Part:
    from shoal.spec.run import Guard

    return Part("wait before a restart", Guard().backoff_s, "arithmetic", "guard.backoff_s of the first in a row")


def imported() -> Part:
    code = "import resource, shoal.train.worker; r = resource.getrusage(resource.RUSAGE_SELF);"
    code += "print(r.ru_utime + r.ru_stime)"
    told = [float(subprocess.check_output([sys.executable, "-c", code])) for _ in range(3)]
    return Part(
        "Python, torch, Shoal", statistics.median(told), "measured", "CPU of a process; files in the page cache"
    )


def met(ranks: int) -> Part:
    """What rank 0's store spends on all that meet there, drawn on from real processes."""
    spent = [_store_s(n) for n in STORE_RANKS]
    each = max(0.0, (spent[-1] - spent[0]) / (STORE_RANKS[-1] - STORE_RANKS[0]))
    how = f"CPU of rank 0 with {STORE_RANKS[-1]} ranks {spent[-1]:.2f} s, drawn on by {1e3 * each:.2f} ms a rank"
    return Part("ranks meet (host)", spent[-1] + each * (ranks - STORE_RANKS[-1]), "measured", how)


@cache
def _store_s(world: int) -> float:
    """CPU of rank 0, which keeps the store, until all have joined and added a number up (gloo, lazily connected)."""
    code = """
import os, sys, time, torch, torch.distributed as dist
from datetime import timedelta
rank, world, port = map(int, sys.argv[1:])
torch.set_num_threads(1)
store = dist.TCPStore("127.0.0.1", port, world, rank == 0, timedelta(seconds=300))
store.add("here", 1)
while int(store.add("here", 0)) < world:  # imports are not what is asked for
    time.sleep(0.05)
began = time.process_time()
dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
dist.all_reduce(torch.ones(1))
print(time.process_time() - began, flush=True)
dist.all_reduce(torch.ones(1))
"""
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = os.environ | {"TORCH_GLOO_LAZY_INIT": "1", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(world), str(port)], env=env, text=True,
            stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
        )
        for rank in range(world)
    ]  # fmt: skip
    said, _ = ranks[0].communicate()
    for process in ranks:
        process.wait()
    return float(said)


def communicator(ranks: int) -> Part:
    return Part("NCCL's communicator", COMMUNICATOR_S[ranks], "taken", "MegaScale: < 5 s at 2,048, < 30 s at 12,288")


def laid_out(model: str, ranks: int) -> Part:
    """Groups, and the model with a rank's own weights, as one rank of so many: in a process of its own."""
    told = subprocess.check_output([sys.executable, __file__, "--build", f"{model}:{ranks}"], text=True)
    groups_s, build_s = map(float, told.split()[-2:])
    how = f"groups {groups_s:.2f} s, layers, shards and start values {build_s:.1f} s"
    return Part("model laid out", groups_s + build_s, "measured", how)


def _build(model: str, ranks: int) -> None:
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from shoal.parallel.build import build
    from shoal.parallel.place import lay_out
    from shoal.spec.mesh import Sizes
    from shoal.spec.presets import preset
    from shoal.spec.run import Run

    torch.set_num_threads(1)
    asked = {"name": "a", "data": {"train": "d", "seq_len": 4096}, "train": {"steps": 1, "batch": ranks}}
    asked["train"] |= {"precision": "bf16", "compile": False, "kernels": "plain"}
    asked["mesh"] = {"dp_shard": ranks, "dp_replicate": 1, "pp": 1, "cp": 1, "tp": 1, "ep": 1, "micro_batch": 1}
    asked["mesh"] |= {"recompute": "none"}
    asked["model"] = {**preset(model, "--cases").model, "init": "normal"}
    run = Run.model_validate(asked)
    dist.init_process_group("fake", rank=ranks - 1, world_size=ranks, store=FakeStore())
    took: list[float] = []
    with cpu(took):
        place = lay_out(ranks - 1, ranks, torch.device("cpu"), Sizes(dp_shard=ranks))
    with cpu(took):
        build(run, place)
    print(*took)


def data(disk_ms: float) -> list[Part]:
    import numpy as np

    from shoal.data.index import Index, ShardInfo, fingerprint_of
    from shoal.data.local_folder import AT_ONCE, LocalFolder
    from shoal.data.order import Order
    from shoal.data.shards import TokenShards
    from shoal.data.windows import Windows

    sums, size = "0" * 32, SHARD_TOKENS
    shards = tuple(
        ShardInfo(f"shard-{i:05d}", size, size // 1000, sums, sums, None, sums, 4 * size) for i in range(SHARDS)
    )
    whole = Index(
        "uint32", 128_256, 0, "tokenizer.json", size * SHARDS, size // 1000 * SHARDS, False,
        fingerprint_of(shards, 128_256, "uint32"), shards,
    )  # fmt: skip
    text = json.dumps(whole.to_json()).encode()
    took: list[float] = []
    with cpu(took):
        opened = TokenShards.of(LocalFolder("/nowhere"), text)
        Order(Windows([opened], 4096, True).sizes, [1.0], 0)
    files = sum(len(shard.files) for shard in opened.index.shards)
    assert np.all(opened.starts >= 0)
    how = f"{len(text) / 1e6:.0f} MB of index, {SHARDS:,} shards"
    asked = f"{files:,} files, {disk_ms / 10:g} ms a question, {AT_ONCE} at a time, rank 0 alone"
    return [
        Part("data: index understood", took[0], "measured", how),
        Part("data: files looked at", files * disk_ms / 10e3 / AT_ONCE, "arithmetic", asked),
    ]


def metadata(model: str, ranks: int, disk_ms: float) -> list[Part]:
    import checkpoint_metadata

    command = [sys.executable, checkpoint_metadata.__file__, "--one", model, "--ranks", str(ranks)]
    said = subprocess.check_output(command, text=True).split()
    values = dict(zip(checkpoint_metadata.COLUMNS, said, strict=False))
    size = float(values["manifest MB"])
    hops = math.ceil(math.log2(ranks))
    return [
        Part("checkpoint: found", 20 * disk_ms / 1e3, "arithmetic", f"20 questions of {disk_ms:g} ms: ledger, listing"),
        Part("checkpoint: manifest read", float(values["decode s"]), "measured", f"{size} MB, rank 0"),
        Part("checkpoint: manifest sent", hops * size / 1e3, "arithmetic", f"{hops} hops at 1 GB/s"),
        Part("checkpoint: headers", 3 * disk_ms / 1e3, "arithmetic", "a file a rank, 3 questions"),
        Part("checkpoint: a rank's own part", float(values["own s"]), "measured", "what it must read, derived"),
    ]


def read_bytes(model: str, ranks: int, node_gbs: float, disk_gbs: float) -> Part:
    from shoal.spec.model import Model
    from shoal.spec.presets import preset
    from shoal.spec.shape import shape_of

    size = STATE_BYTES * shape_of(Model(**preset(model, "--cases").model)).params / 1e9
    rate = min(disk_gbs, node_gbs * ranks / PER_NODE)
    how = f"{size:,.0f} GB at {rate:,.0f} GB/s of the disk ({1e3 * size / ranks:,.0f} MB a rank; memory tier: less)"
    return Part("checkpoint: bytes", size / rate, "arithmetic", how)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=CASES, metavar="MODEL:RANKS")
    parser.add_argument("--disk-ms", type=float, default=5.0, help="an open and a read on the shared disk")
    parser.add_argument("--node-gbs", type=float, default=2.0, help="that a node reads from it")
    parser.add_argument("--disk-gbs", type=float, default=100.0, help="that it gives to all")
    parser.add_argument("--build", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.build:
        model, _, ranks = args.build.partition(":")
        _build(model, int(ranks))
        return 0
    with tempfile.TemporaryDirectory():
        common = [noticed_and_ended(), waited(), imported()]
        of_data = data(args.disk_ms)
    missed = False
    for case in args.cases:
        model, _, text = case.partition(":")
        ranks = int(text)
        parts = [
            *common, met(ranks), communicator(ranks), *of_data, laid_out(model, ranks),
            *metadata(model, ranks, args.disk_ms), read_bytes(model, ranks, args.node_gbs, args.disk_gbs),
            Part("journal read", JOURNAL_S, "taken", "a million steps, decision 052"),
            Part("first step compiled", COMPILE_S, "taken", "H200, steps 1 and 2, nothing cached"),
        ]  # fmt: skip
        print(f"\n{model} at {ranks:,} ranks")
        for part in parts:
            print(f"  {part.what:<32}{part.seconds:8.2f} s  {part.by:<11}{part.how}")
        total, bar = sum(part.seconds for part in parts), BAR_S.get((model, ranks))
        by = {kind: sum(p.seconds for p in parts if p.by == kind) for kind in ("measured", "arithmetic", "taken")}
        over = bar is not None and total > bar
        missed |= over
        told = "" if bar is None else f"; bar {bar:g} s: {'MISSED' if over else 'met'}"
        split = ", ".join(f"{kind} {seconds:.1f}" for kind, seconds in by.items())
        print(f"  {'in all':<32}{total:8.2f} s  ({split}){told}", flush=True)
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
