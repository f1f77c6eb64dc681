"""Claim: reading another node's memory costs hardly more than the network, and sending it a copy little more.

One file of the size given (a rank's snapshot) in a node's memory, over loopback. Peer: a plain socket copy, `sendall`
from memory in one process and `recv_into` memory in another, nothing checked. In the same run, interleaved: the median
of each. Reading is timed without the checksums that a load takes (it takes them from a disk as well); sending includes
them, since the keeper looks at every byte before it counts the copy.
"""

from __future__ import annotations

import argparse
import itertools
import mmap
import os
import secrets
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from shoal.checkpoint.grids import alone
from shoal.checkpoint.memory import keeper
from shoal.checkpoint.memory.generations import remember
from shoal.checkpoint.memory.neighbour import Peer, replicate
from shoal.checkpoint.memory.ram import forget, hold, memory_folder
from shoal.checkpoint.names import Name, rank_file
from shoal.checkpoint.part import Contents, encode_part, write_part
from shoal.checkpoint.rows import Entry, Layout
from shoal.checkpoint.store import Folder

SLICE_BYTES = 64 << 20  # as a save cuts them
NAME = Name(1, 1)


def make(folder: Path, rank: int, size: int) -> tuple[memoryview, bytes]:
    """(the rank's file, its part), which lie in the folder then."""
    store, rows = Folder(folder), size // SLICE_BYTES
    contents = Contents(Layout({"w": Entry("U8", (rows, SLICE_BYTES), alone(rank))}), rank)
    noise = memoryview(os.urandom(SLICE_BYTES))
    part = write_part(store, NAME, rank, 1, contents, (noise for _ in range(rows)))
    home = folder / str(NAME)
    home.mkdir(exist_ok=True)
    (folder / store.staging(str(NAME)) / rank_file(rank)).rename(home / rank_file(rank))
    remember(folder, NAME, rank, encode_part(part), b"{}" if rank == 0 else None)
    return memoryview((home / rank_file(rank)).read_bytes()), encode_part(part)


def plain(data: memoryview, into: memoryview) -> float:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        pid = os.fork()
        if pid == 0:
            sender, _ = listener.accept()
            sender.sendall(data)
            os._exit(0)
        with socket.create_connection(listener.getsockname()) as sock:
            began, done = time.perf_counter(), 0
            while done < len(into):
                done += sock.recv_into(into[done:])
            seconds = time.perf_counter() - began
        os.waitpid(pid, 0)
    return seconds


def fetch(peer: Peer, into: memoryview, connections: int) -> float:
    began = time.perf_counter()
    with ThreadPoolExecutor(connections) as pool:
        places = range(0, len(into), SLICE_BYTES)
        list(pool.map(lambda at: peer.read_into(NAME, 0, at, into[at : at + SLICE_BYTES]), places))
    return time.perf_counter() - began


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=int, default=512)
    parser.add_argument("--repetitions", type=int, default=5)
    args = parser.parse_args()
    size, token = max(1, (args.mb << 20) // SLICE_BYTES) * SLICE_BYTES, secrets.token_bytes(32)
    with tempfile.TemporaryDirectory() as run:
        here, away = (memory_folder(run, node) for node in (0, 1))
        holds = [hold(folder) for folder in (here, away)]
        started = [keeper.start(folder, token) for folder in (here, away)]
        try:
            data, part = make(here, 0, size)
            into = memoryview(mmap.mmap(-1, len(data)))  # shared, so that a fork copies no page of it
            into[:] = data  # its pages are there
            peer = Peer(started[0].address, token)

            steps = itertools.count(1)

            def copy() -> float:
                began = time.perf_counter()
                replicate(started[1].address, token, Name(next(steps), 1), 0, 1, data, part, b"{}")
                return time.perf_counter() - began

            for _ in range(3):
                copy()  # the keeper keeps two, and the pages of a third: from now on no page is new

            ways: dict[str, Callable[[], float]] = {
                "plain socket": lambda: plain(data, into),
                "read, 1 connection": lambda: fetch(peer, into, 1),
                "read, 4 connections": lambda: fetch(peer, into, 4),
                "copy, checked": copy,
            }
            seconds: dict[str, list[float]] = {way: [] for way in ways}
            for _ in range(args.repetitions):
                for way, measure in ways.items():
                    seconds[way].append(measure())
            same = bytes(into[:4096]) == bytes(data[:4096]) and into == data
        finally:
            for one in started:
                one.stop()
            for one in holds:
                forget(one.folder)
                one.close()
    base = statistics.median(seconds["plain socket"])
    print(f"{len(data) / 1e6:.0f} MB over loopback, median of {args.repetitions}")
    print(f"{'way':<22} {'GB/s':>6} {'of plain':>9}")
    for way, times in seconds.items():
        median = statistics.median(times)
        print(f"{way:<22} {len(data) / median / 1e9:>6.2f} {base / median:>9.2f}")
    read = min(statistics.median(seconds[way]) for way in seconds if way.startswith("read"))
    held = same and base / read >= 0.8 and base / statistics.median(seconds["copy, checked"]) >= 0.5
    print("bar: reading at 0.8 of a plain socket or more, a checked copy at 0.5:", "held" if held else "MISSED")
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
