"""Reading shuffled training windows: at least 5 times a torch DataLoader over the same windows in a HF dataset.

Both sides hand over what a step on packed documents needs: tokens, targets, positions and document numbers, as tensors.
Peer: a `datasets.Dataset` on disk (memory-mapped Arrow) that has them as columns of int32, one row a window, with
`with_format("torch")` and `DataLoader(shuffle=True)`; 0 and 2 workers, the better counts, and starting its workers is
not counted. Shoal: `Feed`, which reads the tokens and makes the rest. For information, without a bar: the same
DataLoader when it reads `input_ids` alone, a quarter of what Shoal hands over.
Each side is a process of its own that reads for a while when it is told to, in turns, so that the noise of the machine
falls on all; compared are the medians. Memory is what a process and its workers grew by, from after the imports, mapped
pages included.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

BAR = 5.0
BATCH = 32
SHOAL = "Shoal Feed"
PEERS = ("DataLoader, 0 workers", "DataLoader, 2 workers")
PARTLY = ("input_ids alone, 0 workers", "input_ids alone, 2 workers")
READERS = (*PEERS, *PARTLY, SHOAL)
COLUMNS = {"input_ids": "tokens", "labels": "targets", "position_ids": "positions", "document_ids": "documents"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=8_000_000)
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.7, help="of reading, each side a round")
    parser.add_argument("--reader", choices=READERS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.reader:
        return serve(args)
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), args)
        results = measure(Path(folder), args)
    print(f"{'reader':<30}{'windows/s':>12}{'tokens/s':>16}{'peak memory':>16}")
    rates = {name: statistics.median(r["rates"]) for name, r in results.items()}
    for name, rate in rates.items():
        memory = f"+{results[name]['peak_bytes'] / 1e6:,.0f} MB"
        print(f"{name:<30}{rate:>12,.0f}{rate * args.seq_len:>16,.0f}{memory:>16}")
    ratio, partly = (rates[SHOAL] / max(rates[name] for name in names) for names in (PEERS, PARTLY))
    print(f"ratio {ratio:.1f} (bar: at least {BAR:g}); {partly:.1f} of a DataLoader that reads input_ids alone")
    return int(ratio < BAR)


def write(folder: Path, args: argparse.Namespace) -> None:
    """The same windows twice: token shards with documents of 50 to 2,000 tokens, and rows of a Hugging Face dataset."""
    import datasets
    import pyarrow as pa

    from shoal.data.shards import ShardWriter, TokenShards, write_index
    from shoal.data.windows import Windows

    rng = np.random.default_rng(0)
    shards = []
    (folder / "shoal").mkdir()
    for i in range(4):
        lengths = rng.integers(50, 2000, args.tokens // 4 // 1025)
        ids = rng.integers(0, 49_151, int(lengths.sum()))
        ids[np.cumsum(lengths) - 1] = 49_151
        writer = ShardWriter(folder / "shoal", f"shard-{i:05d}", "uint16")
        writer.add_many(ids, np.cumsum(lengths))
        shards.append(writer.close())
    write_index(folder / "shoal", shards, vocab_size=49_152, eos_id=49_151, tokenizer="tokenizer.json")
    windows = Windows([TokenShards.open(folder / "shoal")], args.seq_len, mask_documents=True)
    count = windows.sizes[0]
    batch = windows.batch(np.zeros(count, np.int64), np.arange(count))
    offsets = pa.array(np.arange(count + 1, dtype=np.int32) * args.seq_len)
    columns = {
        column: pa.ListArray.from_arrays(offsets, pa.array(getattr(batch, field).reshape(-1).astype(np.int32)))
        for column, field in COLUMNS.items()
    }
    datasets.disable_progress_bars()
    datasets.Dataset(pa.table(columns)).save_to_disk(str(folder / "hf"))


def measure(folder: Path, args: argparse.Namespace) -> dict[str, dict]:
    readers = {}
    for name in READERS:
        command = [sys.executable, __file__, "--reader", name, "--folder", str(folder)]
        command += ["--seq-len", str(args.seq_len), "--seconds", str(args.seconds)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        readers[name] = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
    results: dict[str, dict] = {name: {"rates": []} for name in readers}
    try:
        for _ in range(args.rounds):
            for name, reader in readers.items():
                answer = ask(reader)
                results[name]["rates"].append(answer["windows_per_s"])
                results[name]["peak_bytes"] = answer["peak_bytes"]
    finally:
        for reader in readers.values():
            reader.stdin.close()
            reader.wait(30)
            reader.stdout.close()
    return results


def ask(reader: subprocess.Popen) -> dict:
    reader.stdin.write("go\n")
    reader.stdin.flush()
    return json.loads(reader.stdout.readline())


def serve(args: argparse.Namespace) -> int:
    """One side: for every line on standard input, read for a while and answer with the rate."""
    batches = shoal_batches(args) if args.reader == SHOAL else peer_batches(args)
    next(batches)
    before = peak = memory_bytes()
    next(batches)  # the first batch waits for the workers of a DataLoader to start: not counted
    for _ in sys.stdin:
        windows = 0
        began = time.perf_counter()
        while (elapsed := time.perf_counter() - began) < args.seconds:
            windows += next(batches)
        peak = max(peak, memory_bytes())  # outside the clock: it takes longer than many batches
        print(json.dumps({"windows_per_s": windows / elapsed, "peak_bytes": peak - before}), flush=True)
    return 0


def shoal_batches(args: argparse.Namespace) -> Iterator[int]:
    import torch

    from shoal.data.feed import Feed
    from shoal.data.order import Order
    from shoal.data.shards import TokenShards
    from shoal.data.windows import Windows

    yield 0  # imported
    windows = Windows([TokenShards.open(args.folder / "shoal")], args.seq_len, mask_documents=True)
    with Feed(windows, Order(windows.sizes, [1.0], 0), BATCH) as feed:
        step = 0
        while True:
            (batch,) = feed.step(step)
            arrays = (batch.tokens, batch.targets, batch.positions, batch.documents)
            tensors = [torch.from_numpy(a) for a in arrays]
            yield tensors[0].shape[0]
            step += 1


def peer_batches(args: argparse.Namespace) -> Iterator[int]:
    import datasets
    from torch.utils.data import DataLoader

    yield 0  # imported
    rows = datasets.load_from_disk(str(args.folder / "hf"))
    if args.reader in PARTLY:
        rows = rows.select_columns(["input_ids"])
    rows = rows.with_format("torch")
    workers = 2 if args.reader.endswith("2 workers") else 0
    loader = DataLoader(
        rows, batch_size=BATCH, shuffle=True, drop_last=True, num_workers=workers, persistent_workers=workers > 0
    )
    while True:
        for batch in loader:
            yield batch["input_ids"].shape[0]


def memory_bytes() -> int:
    """Of this process and its children, pages of mapped files included; a page that they share counts once."""
    import psutil

    me = psutil.Process()
    return sum(process.memory_full_info().pss for process in [me, *me.children(recursive=True)])


if __name__ == "__main__":
    sys.exit(main())
