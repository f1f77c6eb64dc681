"""What each axis sends, counted in real runs and held against the formula; and what the counting costs.

    python benchmarks/traffic.py [--only TEXT] [--pairs N]

First the same small model is trained on 4 processes (gloo) over every axis, and the third step's `traffic` record is
compared with `shoal.plan.traffic`: calls and bytes must be equal. Then one step under FSDP is timed in turns without
counting, with Shoal's counter, and with its peer, torch's CommDebugMode, which counts calls alone. Exits with 1 when a
count differs from its formula, when the counter costs more than CommDebugMode, or when steps that are not counted are
slower than before anything was counted.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from tests.ranks import run_ranks
from tests.train.tiny import make_data, make_run, train_on
from torch.distributed.tensor.debug import CommDebugMode

from shoal.data.windows import Batch
from shoal.decide.auto import decide
from shoal.journal.journal import records
from shoal.parallel.build import build
from shoal.parallel.count import Counter
from shoal.parallel.laid import Laid
from shoal.parallel.place import join
from shoal.plan.traffic import step_of, traffic
from shoal.spec import load
from shoal.spec.run import Run
from shoal.spec.shape import shape_of

PROCESSES = 4
RESIDUE_BAR = 1.1  # the fastest of ordinary steps between counted ones over ordinary steps before any
MODEL = {
    "model.dim": 128,
    "model.layers": 4,
    "model.heads": 8,
    "model.kv_heads": 4,
    "model.ffn_dim": 384,
    "data.seq_len": 128,
    "train.batch": 16,
    "train.steps": 3,
    "train.schedule.warmup_steps": 1,
}
# All tokens to all experts, so that what travels is known beforehand.
EXPERTS = {"count": 4, "top_k": 4, "ffn_dim": 64}
MESHES: dict[str, dict[str, Any]] = {
    "dp_replicate 4 (DDP)": {"dp_replicate": 4},
    "dp_shard 4 (FSDP)": {"dp_shard": 4},
    "dp_replicate 2, dp_shard 2 (HSDP)": {"dp_replicate": 2, "dp_shard": 2},
    "tp 4": {"tp": 4},
    "cp 4, all_to_all": {"cp": 4, "cp_method": "all_to_all"},
    "cp 4, ring": {"cp": 4, "cp_method": "ring"},
    "pp 4, 1f1b": {"pp": 4, "schedule": "1f1b"},
    "pp 2, zbv, dp_shard 2": {"pp": 2, "dp_shard": 2, "schedule": "zbv"},
    "pp 2, tp 2": {"pp": 2, "tp": 2, "schedule": "1f1b"},
    "dp_shard 4, ep 4": {"dp_shard": 4, "ep": 4, "model.experts": EXPERTS},
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", metavar="TEXT", help="the meshes whose name has this in it")
    parser.add_argument("--pairs", type=int, default=12, help="timed steps of each kind")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        differ = table(Path(folder), [name for name in MESHES if args.only in name])
        slow = cost(Path(folder), args.pairs)
    return int(differ > 0 or slow)


def table(folder: Path, names: list[str]) -> int:
    """How many rows differ from the formula."""
    data = make_data(folder / "data", documents=400)
    differ = rows = 0
    print(f"{'mesh':<36}{'axis':<14}{'operation':<16}{'calls':>6}{'bytes a process':>17}{'over formula':>14}")
    for i, name in enumerate(names):
        mesh = {
            key if "." in key else f"mesh.{key}": value for key, value in {"micro_batch": 2, **MESHES[name]}.items()
        }
        run_dir = train_on(make_run(data, **{**MODEL, **mesh}), folder / str(i), PROCESSES)
        (record,) = [r for r in records(run_dir.journal_file) if r["kind"] == "traffic"]
        run = load(run_dir.spec_file).run
        expected = traffic(step_of(run, shape_of(run.model)))
        for row in record["rows"]:
            calls, size = expected.pop((row["axis"], row["op"]), (0, 0.0))
            same = (calls, size) == (row["calls"], row["bytes"])
            ratio = f"{row['bytes'] / size:.3f}" if size else "none"
            line = f"{row['axis']:<14}{row['op']:<16}{row['calls'] / PROCESSES:>6.3g}{row['bytes'] / PROCESSES:>17,.0f}"
            print(f"{name:<36}{line}{ratio:>14}{'' if same else '  DIFFERS'}", flush=True)
            name, rows, differ = "", rows + 1, differ + (not same)
        differ += len(expected)
        for axis, op in expected:
            print(f"{'':<36}{axis:<14}{op:<16}  NOT SEEN")
    print(f"{rows} rows, {differ} of them not as the formula says")
    return differ


def cost(folder: Path, pairs: int) -> bool:
    """Whether a bar was missed."""
    data = make_data(folder / "more", documents=400)
    changes = {**MODEL, "data.seq_len": 256, "train.batch": 8, "mesh.dp_shard": 2, "mesh.micro_batch": 4}
    run = decide(make_run(data, **changes), folder, 2).run
    before, times = run_ranks(timed, 2, run, pairs, timeout_s=300)[0]
    plain = statistics.median(times["not counted"])
    print(f"\n{'a step of FSDP on 2 processes':<44}{'CPU time':>10}{'ratio':>8}")
    for kind, took in times.items():
        print(f"{kind:<44}{statistics.median(took) * 1e3:>7.1f} ms{statistics.median(took) / plain:>8.2f}")
    pairs_of = zip(times["counted"], times["CommDebugMode"], strict=True)
    ratio = statistics.median(ours / theirs for ours, theirs in pairs_of)
    residue = min(times["not counted"]) / min(before)
    print(f"ratio {ratio:.2f} of counted over CommDebugMode (bar: at most 1)")
    print(f"ratio {residue:.2f} of not counted, afterwards over before (bar: at most {RESIDUE_BAR})")
    return ratio > 1 or residue > RESIDUE_BAR


def timed(rank: int, world: int, run: Run, pairs: int) -> tuple[list[float], dict[str, list[float]]]:
    warnings.simplefilter("ignore")  # the peer's hooks make torch say things about backward passes
    place = join(run)
    model, counter = build(run, place), Counter(place)
    tokens = torch.randint(0, 96, (4, run.data.seq_len)).numpy()
    zeros = tokens * 0
    batch = Batch(tokens, tokens, zeros + range(run.data.seq_len), zeros)
    kinds: dict[str, Callable[[], AbstractContextManager[Any]]] = {
        "counted": counter.counting,
        "CommDebugMode": CommDebugMode,
    }
    before = [took(contextlib.nullcontext, model, batch) for _ in range(3 + pairs)][3:]
    times: dict[str, list[float]] = {"not counted": [], **{kind: [] for kind in kinds}}
    for _ in range(pairs):
        for kind, watch in kinds.items():
            times[kind].append(took(watch, model, batch))
            if kind == "counted":  # what it may leave behind falls on the step after it, not on the peer's
                times["not counted"].append(took(contextlib.nullcontext, model, batch))
    return before, times


def took(watch: Callable[[], AbstractContextManager[Any]], model: Laid, batch: Batch) -> float:
    began = time.process_time()  # of all threads: what counting costs is computing, and other processes do not disturb
    with watch():
        loss = model.total(model.backward([batch]))
        model.norm(1.0, 1.0)
        float(loss)
    spent = time.process_time() - began
    for _, parameter in model.named_parameters():
        parameter.grad = None
    return spent


if __name__ == "__main__":
    sys.exit(main())
