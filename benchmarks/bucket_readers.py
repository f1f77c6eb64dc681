"""Claim: 64 processes that read a data set from a bucket, with their cache on a disk with 5 ms a call, wait for at most
5% of their time.

Real processes, real files, the real feed; only the disk is made slow, by a library that each process is started with
(latency/slow_calls.c), and a step's computing is a sleep. The data set is ten times as large as the cache: nearly every
window is in a piece that nobody has. The bucket is a folder (file://).
Peer: the same with `--one-lock`, the cache as it was before: each piece is written and counted under one lock.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

BAR = 0.05
SEQ_LEN = 8192
SHARDS, SHARD_TOKENS = 10, 8_000_000  # of two bytes: 610 pieces
CACHE_BYTES = 16_000_000


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--readers", type=int, default=64)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--windows", type=int, default=4, help="of a reader in a step")
    parser.add_argument("--step-s", type=float, default=2.0, help="what a step computes")
    parser.add_argument("--ms", type=int, default=5, help="of each call of the disk")
    parser.add_argument("--one-lock", action="store_true", help="each piece written and counted under one lock")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        return readers(args)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        library = compiled(place)
        write(place / "bucket")
        shares = {
            way: run(place, library, args, way)
            for way in (("one lock", "shared") if not args.one_lock else ("one lock",))
        }
    for way, share in shares.items():
        print(f"{way:>10}: {share:6.1%} of the time waiting for data")
    share = shares.get("shared", 1.0)
    print(f"bar: at most {BAR:.0%}: {'held' if share <= BAR else 'MISSED'}")
    return int(share > BAR)


def run(place: Path, library: Path, args: argparse.Namespace, way: str) -> float:
    (place / "slow").mkdir(exist_ok=True)
    env = os.environ | {"SLOW_UNDER": str(place / "slow"), "SLOW_MS": str(args.ms), "LD_PRELOAD": str(library)}
    more = ["--one-lock"] if way == "one lock" else []
    for name in ("readers", "steps", "windows", "step_s"):
        more += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
    told = subprocess.run(
        [sys.executable, __file__, "--child", str(place), *more], env=env, check=True, stdout=subprocess.PIPE, text=True
    )
    shutil.rmtree(place / "slow")
    found = json.loads(told.stdout.splitlines()[-1])
    print(f"{way}: {args.readers} readers, {found['pieces']} pieces kept, {found['seconds']:.0f} s", flush=True)
    return float(found["share"])


def readers(args: argparse.Namespace) -> int:
    """All of them, forked from one process that has imported everything."""
    import shoal.data.feed
    import shoal.data.remote  # noqa: F401  # before the fork

    if args.one_lock:
        as_before()
    context = multiprocessing.get_context("fork")
    told: multiprocessing.Queue[tuple[float, float]] = context.Queue()
    gate = context.Barrier(args.readers)
    began = time.monotonic()
    children = [context.Process(target=read, args=(args, rank, gate, told)) for rank in range(args.readers)]
    for child in children:
        child.start()
    waits = [told.get() for _ in children]
    for child in children:
        child.join()
    share = sum(waited for waited, _ in waits) / sum(total for _, total in waits)
    pieces = sum(1 for _ in (args.child / "slow").glob("*/*-*"))
    print(json.dumps({"share": share, "pieces": pieces, "seconds": time.monotonic() - began}))
    return 0


def read(args: argparse.Namespace, rank: int, gate: Any, told: Any) -> None:
    from shoal.data.feed import Feed
    from shoal.data.order import Order
    from shoal.data.shards import TokenShards
    from shoal.data.windows import Windows

    data = TokenShards.open(f"file://{args.child / 'bucket'}", args.child / "slow", CACHE_BYTES)
    windows = Windows([data], SEQ_LEN, True)
    feed = Feed(windows, Order(windows.sizes, [1.0], 0), args.windows * args.readers, rank, args.readers)
    feed.step(0)  # what is done once is not counted: borders of documents, sums
    gate.wait()
    began, waited = time.monotonic(), 0.0
    for step in range(1, args.steps + 1):
        time.sleep(args.step_s)
        feed.step(step)
        waited += feed.wait_s
    told.put((waited, time.monotonic() - began))
    feed.close()


def as_before() -> None:
    """Writes under the lock, one piece at a time; keeps the newest of all pieces."""
    from shoal.data.cache import Cache
    from shoal.data.remote import RemoteFolder

    def put(self: Cache, key: str, data: bytes | memoryview) -> None:
        path = self.path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        with self._locked() as lock:
            count = self._count(lock)
            if count.used + len(data) > self.limit_bytes:
                count.used = self._evict(int(self.limit_bytes * 0.9) - len(data))
            count.used += len(data)
            self._set_count(lock, count)
            temporary = path.with_name(f"{key}.0.{os.getpid()}.tmp")
            temporary.write_bytes(data)
            os.replace(temporary, path)

    Cache.put = put  # type: ignore[method-assign]
    RemoteFolder.holds = lambda self, size_bytes: None  # type: ignore[method-assign, assignment]


def compiled(place: Path) -> Path:
    library = place / "slow_calls.so"
    source = REPOSITORY / "benchmarks" / "latency" / "slow_calls.c"
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"], check=True)
    return library


def write(folder: Path) -> None:
    import numpy as np

    from shoal.data.shards import ShardWriter, write_index

    folder.mkdir()
    rng, infos = np.random.default_rng(0), []
    for i in range(SHARDS):
        writer = ShardWriter(folder, f"shard-{i:05d}", "uint16", with_mask=False)
        for _ in range(SHARD_TOKENS // 4000):
            writer.add([*rng.integers(0, 256, 3999).tolist(), 256])
        infos.append(writer.close())
    write_index(folder, infos, vocab_size=257, eos_id=256, tokenizer="byte")


if __name__ == "__main__":
    sys.exit(main())
