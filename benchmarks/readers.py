"""Reading what others wrote by type and range, against a tree before: `ps` of 50 runs, a large manifest, a large index.

python benchmarks/readers.py --before PATH     a checkout of the commit to compare with (git worktree add PATH COMMIT)

CPU seconds of one process each, the best of several rounds, taken in turns so that both see the same machine.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parents[1]
MOST = 1.1


def best(work: Callable[[], Any], rounds: int = 7) -> float:
    took = []
    for _ in range(rounds):
        began = time.process_time()
        work()
        took.append(time.process_time() - began)
    return min(took)


def journals(folder: Path, runs: int = 50, steps: int = 400) -> None:
    for i in range(runs):
        run = folder / "runs" / f"run-{i:02d}"
        run.mkdir(parents=True)
        t = 1_700_000_000.0 + 1000 * i
        lines = [{"v": 1, "kind": "open", "t": t, "session": 0}, {"v": 1, "kind": "start", "t": t + 1, "total": steps}]
        for n in range(1, steps + 1):
            about = {"step": n, "loss": 3.0, "tokens": 4096, "begin": t + n, "attempt": 0, "time": {"data_s": 0.01}}
            lines.append({"v": 1, "kind": "step", "t": t + n + 0.9, **about})
        lines.append({"v": 1, "kind": "close", "t": t + 999, "session": 0, "status": "done", "reason": "done"})
        (run / "journal.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def manifest(tensors: int = 20_000, world: int = 64) -> bytes:
    from shoal.checkpoint import manifest as manifests
    from shoal.checkpoint.blocks import file_of
    from shoal.checkpoint.grids import Cut, Grid
    from shoal.checkpoint.names import rank_file
    from shoal.checkpoint.rows import Entry, Layout

    grid = Grid((Cut(0, world),), tuple(range(world)))
    layout = Layout({f"model.layers.{i}.mlp.up.weight": Entry("BF16", (4096, 1024), grid) for i in range(tensors)})
    files = {}
    for rank, size in layout.sizes().items():
        blocks = len(range(8000, size + 8000, layout.block_bytes))
        files[rank_file(rank)] = file_of(size + 8000, 8000, "0" * 32, layout.block_bytes, bytes(16 * blocks))
    return manifests.encode(manifests.Manifest(1, 1, world, 1.0, {"step": 1}, files, layout))


def index(shards: int = 20_000) -> bytes:
    from shoal.data.index import Index, ShardInfo, fingerprint_of

    listed = tuple(
        ShardInfo(f"shard-{i:05d}", 1000, 10, f"{i:032x}", f"{i:032x}", None, f"{i:032x}", 2000) for i in range(shards)
    )
    fingerprint = fingerprint_of(listed, 257, "uint16")
    about = Index("uint16", 257, 256, "byte", 1000 * shards, 10 * shards, False, fingerprint, listed)
    return json.dumps(about.to_json(), indent=1).encode()


def measure() -> dict[str, float]:
    """In a process of its own, with one of the two trees."""
    from shoal.checkpoint.manifest import decode
    from shoal.data.index import parse_index
    from shoal.observe.status import statuses

    with tempfile.TemporaryDirectory() as folder:
        journals(Path(folder))
        ps = best(lambda: statuses(Path(folder)))
    large, listed = manifest(), index()
    return {
        "ps of 50 runs": ps,
        "a manifest of 20,000 tensors": best(lambda: decode(large)),
        "an index of 20,000 shards": best(lambda: parse_index(listed, "data")),
    }


def taken(tree: Path) -> dict[str, float]:
    env = {**os.environ, "PYTHONPATH": str(tree / "src")}
    told = subprocess.run([sys.executable, __file__, "--one"], env=env, capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(told.stdout)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="a checkout of the commit to compare with")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure()))
        return 0
    if args.before is None:
        parser.error("--before names a checkout to compare with")
    both = [(taken(args.before), taken(HERE)) for _ in range(args.rounds)]
    print(f"{'':<32}{'before':>10}{'now':>10}{'ratio':>8}")
    worst = 0.0
    for name in both[0][0]:
        before, now = (min(pair[side][name] for pair in both) for side in (0, 1))
        worst = max(worst, now / before)
        print(f"{name:<32}{1000 * before:>7.1f} ms{1000 * now:>7.1f} ms{now / before:>8.2f}")
    return 0 if worst <= MOST else 1


if __name__ == "__main__":
    sys.exit(main())
