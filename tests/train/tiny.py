"""A tiny run for the tests of the loop: random documents of uneven length, a two-block model, ranks forked warm."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from shoal.data.index import write_index
from shoal.data.writer import ShardWriter
from shoal.decide.auto import decide
from shoal.journal import journal
from shoal.journal.rundir import RunDir
from shoal.own.carry import carry
from shoal.parallel.place import join
from shoal.spec.run import Run
from shoal.train.worker import work
from tests.ranks import run_ranks

VOCAB, EOS = 96, 95


def make_data(folder: Path, documents: int = 120, masked: bool = False, seed: int = 0, hidden: float = 1 / 3) -> Path:
    """Documents of 3 to 60 tokens that a model can learn something from: each walks around the vocabulary.
    Masks hide the beginning of each, a third of it unless told otherwise."""
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    with ShardWriter(folder, "shard-00000", "uint16", with_mask=masked) as writer:
        for _ in range(documents):
            n = int(rng.integers(3, 60))
            ids = np.append((rng.integers(0, EOS) + np.cumsum(rng.integers(0, 4, n))) % EOS, EOS)
            mask = (np.arange(n + 1) >= int(n * hidden + 1e-9)).astype(np.uint8) if masked else None
            writer.add(ids, mask)
        info = writer.close()
    write_index(folder, [info], dtype="uint16", vocab_size=VOCAB, eos_id=EOS, tokenizer="byte", source={})
    return folder


def make_run(data: Path, **changes: Any) -> Run:
    """A run file as a dict, with dotted changes: `make_run(data, **{"train.steps": 5})`."""
    spec: dict[str, Any] = {
        "name": "tiny",
        # `normal`: 20 steps teach a toy more from small values; other rules are for models that are trained for longer.
        "model": {"dim": 32, "layers": 2, "heads": 4, "kv_heads": 2, "ffn_dim": 64, "init": "normal"},
        "data": {"train": str(data), "seq_len": 32},
        "train": {"steps": 20, "batch": 16, "optimizer": {"lr": 3e-3}, "schedule": {"warmup_steps": 3}},
        "checkpoint": {"every": 0, "background": False},  # tests about saves ask for it; a process less for the others
        "track": {"mlflow": False},
        # One thread, however many there are: for numbers this small a second one only waits, and takes a core for it.
        "resources": {"device": "cpu", "threads": 1},
    }
    for dotted, value in changes.items():
        section = spec
        *path, last = dotted.split(".")
        for key in path:
            section = section.setdefault(key, {})
        section[last] = value
    return Run.model_validate(spec)


def train_on(
    run: Run, workspace: Path, world: int, told_to_stop: Callable[[], bool] = lambda: False, timeout_s: float = 120
) -> RunDir:
    """Runs the real worker on `world` ranks; the journal in the returned directory says what it did."""
    from shoal.spec import dump

    decided = decide(run, workspace, world)
    run_dir = RunDir.of(run.name, workspace)
    run_dir.path.mkdir(parents=True, exist_ok=True)
    run_dir.spec_file.write_text(dump(decided.run))
    carry(decided.run, run_dir)

    def rank(rank: int, world: int) -> None:
        os.environ["SHOAL_ATTEMPT"] = str(sum(r["kind"] == "start" for r in _records(run_dir)))
        work(run_dir, decided.run, join(decided.run), told_to_stop)

    run_ranks(rank, world, timeout_s=timeout_s)
    return run_dir


def steps_of(run_dir: RunDir) -> list[dict[str, Any]]:
    return [r for r in _records(run_dir) if r["kind"] == "step"]


def losses_of(run_dir: RunDir) -> np.ndarray:
    return np.array([r["loss"] for r in steps_of(run_dir)])


def digest_of(run_dir: RunDir) -> str:
    return next(str(r["digest"]) for r in reversed(_records(run_dir)) if r["kind"] == "finished")


def _records(run_dir: RunDir) -> list[dict[str, Any]]:
    return journal.records(run_dir.journal_file) if run_dir.journal_file.exists() else []
