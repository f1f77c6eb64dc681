"""`shoal data prepare` with bounded readers is no slower than before: at least 0.97 of its speed, for each format.

Before is a working tree of an older commit (`--before PATH`; by default the last commit with unbounded readers, taken
out of git). Both prepare the same text with the same tokenizer in one worker, in turns; what is compared is processor
time of the command with all of its processes, as other programs on the machine disturb it less. The shards must be
equal.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import zstandard

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from benchmarks.data_prepare import make_corpus  # noqa: E402

UNBOUNDED = "25f241f"
BAR = 0.97
FORMATS = ("jsonl", "jsonl.gz", "jsonl.zst", "parquet")
VOCAB = 8192


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="a working tree with the older code")
    parser.add_argument("--mb", type=float, default=16.0, help="size of the text")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--formats", nargs="+", default=FORMATS, choices=FORMATS)
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="shoal-bench-"))
    try:
        return compare(folder, args.before or taken_out(folder / "before"), args.mb, args.repeat, args.formats)
    finally:
        shutil.rmtree(folder)


def compare(folder: Path, before: Path, mb: float, repeat: int, formats: Sequence[str]) -> int:
    inputs = written(folder, mb * 1e6)
    tokenizer = folder / "tokenizer.json"
    run(ROOT, "tokenizer", inputs["jsonl"], "--vocab-size", VOCAB, "--max-mb", 4, "--out", tokenizer)
    print(f"{mb:.0f} MB of text, BPE of {VOCAB:,}, one worker; processor seconds of all processes, in turns\n")
    print(f"{'':<12} {'before':>8} {'after':>8} {'speed':>7}")
    slow = []
    for name in formats:
        path = inputs[name]
        times: dict[Path, list[float]] = {before: [], ROOT: []}
        shards: set[bytes] = set()
        for _ in range(repeat):
            for tree, seconds in times.items():
                out = folder / "out"
                shutil.rmtree(out, ignore_errors=True)
                seconds.append(run(tree, "prepare", path, "--tokenizer", tokenizer, "--workers", 1, "--out", out))
                shards.add(b"".join(p.read_bytes() for p in sorted(out.glob("shard-*.tokens"))))
        if len(shards) != 1:
            print(f"{name}: the shards differ")
            return 1
        old, new = min(times[before]), min(times[ROOT])  # what others do on the machine only ever adds time
        print(f"{name:<12} {old:>8.2f} {new:>8.2f} {old / new:>6.2f}x", flush=True)
        if old / new < BAR:
            slow.append(name)
    print(f"\nbar {BAR}x: " + (f"missed by {', '.join(slow)}" if slow else "held"))
    return int(bool(slow))


def written(folder: Path, size_bytes: float) -> dict[str, Path]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    paths = {name: folder / f"a.{name}" for name in FORMATS}
    make_corpus(paths["jsonl"], size_bytes)
    data = paths["jsonl"].read_bytes()
    paths["jsonl.gz"].write_bytes(gzip.compress(data))
    paths["jsonl.zst"].write_bytes(zstandard.ZstdCompressor(level=9).compress(data))
    texts = [json.loads(line)["text"] for line in data.splitlines()]
    pq.write_table(pa.table({"text": texts}), paths["parquet"])
    return paths


def run(tree: Path, *arguments: object) -> float:
    """Processor seconds."""
    env = os.environ | {"PYTHONPATH": str(tree / "src")}
    began = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "shoal", "data", *map(str, arguments)]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{tree}: `{' '.join(command[2:])}` ended with {done.returncode}: {done.stderr[-2000:]}")
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return ended.ru_utime + ended.ru_stime - began.ru_utime - began.ru_stime


def taken_out(folder: Path) -> Path:
    folder.mkdir()
    archive = subprocess.run(["git", "archive", UNBOUNDED, "src"], cwd=ROOT, check=True, capture_output=True).stdout
    subprocess.run(["tar", "-x", "-C", str(folder)], input=archive, check=True)
    return folder


if __name__ == "__main__":
    sys.exit(main())
