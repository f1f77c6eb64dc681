"""Checkpoint files to an object store and back: at least 0.9 times boto3's upload_fileobj and download_fileobj.

Both talk to one SeaweedFS server on this machine, in turns, so that noise falls on both; compared are the medians of
the rounds. The server does most of the work here and is the limit, which is why the bar is not higher: what tells more
is the processor time of the client, which the training process beside it does not get. Both sides send a checksum with
every part (boto3: CRC-32, Shoal: CRC-64), and read with 16 (boto3: its default of 10) requests at a time.
"""

from __future__ import annotations

import argparse
import io
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.services import s3_server

BAR = 0.9
CHUNK_BYTES = 8 << 20


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    data = np.random.default_rng(0).integers(0, 256, args.mib << 20, dtype=np.uint8)
    with tempfile.TemporaryDirectory() as folder, s3_server(Path(folder) / "seaweed") as server:
        server.make_bucket("checkpoints")
        os.environ.update(server.environment)
        taken = measure(sides(server.client(), memoryview(data)), args.rounds)
    print(f"{'':<12}{'GB/s':>8}{'client CPU s/GB':>18}")
    for name, rounds in taken.items():
        wall, cpu = (statistics.median(column) for column in zip(*rounds, strict=True))
        print(f"{name:<12}{data.nbytes / wall / 1e9:>8.3f}{cpu * 1e9 / data.nbytes:>18.2f}")
    ratios = []
    for what in ("upload", "download"):
        ours, peer = taken[f"{what}, Shoal"], taken[f"{what}, boto3"]
        ratios.append(statistics.median(b[0] / a[0] for a, b in zip(ours, peer, strict=True)))
        cpu = statistics.median(b[1] / a[1] for a, b in zip(ours, peer, strict=True))
        print(f"{what}: ratio {ratios[-1]:.2f} (bar: at least {BAR:g}); boto3 takes {cpu:.1f} times the processor time")
    return int(min(ratios) < BAR)


def sides(client: object, data: memoryview) -> dict[str, Callable[[], object]]:
    from shoal.checkpoint.bucket import Bucket

    bucket, into = Bucket("s3://checkpoints/ours"), memoryview(bytearray(data.nbytes))

    def chunks() -> Iterator[memoryview]:
        for at in range(0, data.nbytes, CHUNK_BYTES):
            yield data[at : at + CHUNK_BYTES]

    def read() -> None:
        with ThreadPoolExecutor(bucket.readers) as pool:
            places = range(0, data.nbytes, CHUNK_BYTES)
            list(pool.map(lambda at: bucket.read_into("file", at, into[at : at + CHUNK_BYTES]), places))

    return {
        "upload, Shoal": lambda: bucket.write("file", chunks()),
        "upload, boto3": lambda: client.upload_fileobj(io.BytesIO(data), "checkpoints", "theirs/file"),
        "download, Shoal": read,
        "download, boto3": lambda: client.download_fileobj("checkpoints", "theirs/file", io.BytesIO()),
    }


def measure(sides: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[tuple[float, float]]]:
    """(seconds, seconds of this process's processor time) of each round, after one that does not count."""
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    for count in range(rounds + 1):
        for name, work in sides.items():
            wall, cpu = time.perf_counter(), time.process_time()
            work()
            if count:
                taken[name].append((time.perf_counter() - wall, time.process_time() - cpu))
    return taken


if __name__ == "__main__":
    sys.exit(main())
