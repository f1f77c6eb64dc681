"""Shoal's own worker, as `shoal train` starts it on each rank: its loop, its feed, its journal. Argument: Asked."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from benchmarks.beside.asked import STEPS, Asked
from benchmarks.beside.turns import Turns

from shoal.decide.auto import decide
from shoal.journal.rundir import RunDir
from shoal.parallel.place import join
from shoal.spec import dump
from shoal.spec.run import Run
from shoal.train.worker import work


def main(asked: Asked) -> None:
    size, folder = asked.of, Path(asked.folder)
    shape = {"layers": size.layers, "dim": size.dim, "heads": size.heads, "kv_heads": size.kv_heads}
    mesh = {"dp_shard": asked.dp, "tp": asked.tp, "dp_replicate": 1, "pp": 1, "cp": 1, "ep": 1}
    run = Run.model_validate(
        {
            "name": "beside",
            "model": {**shape, "ffn_dim": size.ffn_dim, "vocab_size": size.vocab, "tie_embeddings": False},
            "data": {"train": asked.data, "seq_len": size.seq},
            "train": {
                "steps": STEPS,
                "batch": asked.dp * size.batch,
                "precision": asked.precision,
                "compile": asked.compiled,
            },
            "mesh": {**mesh, "micro_batch": size.batch, "recompute": "none"},
            "resources": {"device": asked.device, "processes": asked.world, "threads": 1},
            "checkpoint": {"every": 0, "background": False},
            "track": {"mlflow": False},
        }
    )
    run = decide(run, folder, asked.world).run
    run_dir = RunDir.of(run.name, folder)
    run_dir.path.mkdir(parents=True, exist_ok=True)
    if os.environ["RANK"] == "0":
        run_dir.spec_file.write_text(dump(run))
    work(run_dir, run, join(run), Turns(asked.device, asked.folder))


if __name__ == "__main__":
    main(Asked.load(sys.argv[1]))
