"""What Shoal's loop costs over a bare PyTorch loop on the same model: at most 3%, with tracking on.

Peer: a plain loop (forward, backward, clip_grad_norm_, fused AdamW, zero_grad) over the same `Decoder` and the same
batches, already in memory. Shoal: the real `train_step` with feed, masks, global normalisation and journal, while the
tracking mirror uploads the journal to MLflow (SQLite) from its own process. Both run in this process in turns, a step
each, so that the noise of the machine falls on both; the ratio is the median over the pairs of steps.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from shoal.data.feed import Feed
from shoal.data.index import write_index
from shoal.data.order import Order
from shoal.data.shards import TokenShards
from shoal.data.windows import Windows
from shoal.data.writer import ShardWriter
from shoal.decide.auto import decide
from shoal.journal.journal import Journal
from shoal.journal.rundir import RunDir
from shoal.parallel.build import build
from shoal.parallel.place import Place
from shoal.spec import dump
from shoal.spec.run import Run
from shoal.train.loop import Training, train_step
from shoal.train.optim import Optimizers
from shoal.train.writers import unsaved

BAR = 1.03
WARM_UP = 5


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=60)
    parser.add_argument("--dim", type=int, default=192)
    parser.add_argument("--layers", type=int, default=4)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        bare, shoal = measure(Path(folder), args)
    ratio = statistics.median(ours / theirs for ours, theirs in zip(shoal, bare, strict=True))
    print(f"{'loop':<34}{'median step':>14}{'steps':>8}")
    print(f"{'bare PyTorch ' + torch.__version__:<34}{statistics.median(bare) * 1e3:>11.1f} ms{len(bare):>8}")
    print(f"{'Shoal, journal and MLflow mirror':<34}{statistics.median(shoal) * 1e3:>11.1f} ms{len(shoal):>8}")
    print(f"ratio {ratio:.3f} (bar: at most {BAR})")
    return int(ratio > BAR)


def measure(folder: Path, args: argparse.Namespace) -> tuple[list[float], list[float]]:
    run = make_run(folder, args)
    run_dir = RunDir.of(run.name, folder)
    run_dir.path.mkdir(parents=True)
    run_dir.spec_file.write_text(dump(run))
    journal = Journal(run_dir.journal_file)
    journal.append("open", session=0, pid=os.getpid(), host="bench", argv=[], resumed=False)
    mirror = subprocess.Popen(
        [sys.executable, "-m", "shoal.track.mirror", str(run_dir.path), "--until-closed"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        windows = Windows([TokenShards.open(folder / "data")], run.data.seq_len, run.data.mask_documents)
        bare_step = bare_loop(run, windows)
        shoal_step, feed = shoal_loop(run, windows, journal)
        journal.append("start", attempt=0, step=0, world=1, mesh={}, device="cpu", params=0, total=run.train.steps)
        time.sleep(15)  # the mirror's start-up (importing MLflow, creating the data base) is no cost of a step
        bare, shoal = [], []
        sides = [(bare_step, bare), (shoal_step, shoal)]
        for i in range(WARM_UP + args.pairs):
            for step, times in sides if i % 2 else reversed(sides):
                began = time.perf_counter()
                step(i)
                if i >= WARM_UP:
                    times.append(time.perf_counter() - began)
        feed.close()
        journal.append("close", session=0, status="done", exit_code=0, reason="")
        mirror.wait(60)
        return bare, shoal
    finally:
        mirror.kill()


def make_run(folder: Path, args: argparse.Namespace) -> Run:
    (folder / "data").mkdir()
    rng = np.random.default_rng(0)
    with ShardWriter(folder / "data", "shard-00000", "uint16") as writer:
        for _ in range(400):
            writer.add(np.append(rng.integers(0, 2047, int(rng.integers(20, 2000))), 2047))
        shard = writer.close()
    write_index(folder / "data", [shard], vocab_size=2048, eos_id=2047, tokenizer="byte")
    spec = {
        "name": "overhead",
        "model": {"dim": args.dim, "layers": args.layers, "heads": 4},
        "data": {"train": str(folder / "data"), "seq_len": 256},
        "train": {"steps": 10_000, "batch": 8},
        "resources": {"device": "cpu", "processes": 1, "threads": 1},
        "mesh": {"micro_batch": 8},
    }
    return decide(Run.model_validate(spec), folder).run


def bare_loop(run: Run, windows: Windows):
    """What one writes by hand: the batches are at hand, nothing is counted, nothing is written down."""
    (model,) = build(run, Place(0, 1, torch.device("cpu"))).decoders
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    order = Order(windows.sizes, [1.0], run.seed)
    batches = [windows.batch(*order.at(i * run.train.batch, run.train.batch)) for i in range(200)]

    def step(i: int) -> float:
        batch = batches[i % len(batches)]
        tokens, positions, documents, targets = (
            torch.from_numpy(a) for a in (batch.tokens, batch.positions, batch.documents, batch.targets)
        )
        loss = model(tokens, positions, documents, targets) / batch.target_count
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    return step


def shoal_loop(run: Run, windows: Windows, journal: Journal):
    place = Place(0, 1, torch.device("cpu"))
    model = build(run, place)
    feed = Feed(windows, Order(windows.sizes, [1.0], run.seed), run.train.batch, 0, 1, int(run.mesh.micro_batch))
    training = Training(
        run,
        place,
        model,
        Optimizers(run.train.optimizer, model.named_parameters()),
        feed,
        tell=lambda kind, **fields: journal.append(kind, attempt=0, **fields),
        told_to_stop=lambda: False,
        evaluate=lambda step: None,
        saves=unsaved(),
    )

    def step(i: int) -> None:
        record = train_step(training, i)
        assert record is not None
        training.tell("step", **record)

    return step, feed


if __name__ == "__main__":
    sys.exit(main())
