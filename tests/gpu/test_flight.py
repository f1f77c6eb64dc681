"""A rank that leaves out a collective of NCCL: the flight record is asked for before the kill, kept, and says which.

SHOAL_TEST_SHARE_GPU=1 pytest -s tests/gpu/test_flight.py
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.gpu.test_slow_gpu import Run

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU here")
SMALL = {"model.dim": 128, "model.layers": 2, "model.heads": 4, "model.kv_heads": 4, "model.ffn_dim": 256}


def test_the_collective_that_a_rank_did_not_come_to_is_in_the_failure(tmp_path: Path) -> None:
    run = Run(tmp_path, **SMALL, **{"data.seq_len": 128, "train.batch": 16, "mesh.micro_batch": 8, "mesh.dp_shard": 2})
    try:
        run.until(lambda: len(run.records("step")) >= 8)
        (run.control / "skip-1").touch()
        run.until(lambda: run.records("failure"))
        (run.control / "skip-1").unlink()
        (hang,), (failure,) = run.records("hang"), run.records("failure")
        print(f"\n{failure['evidence']}")
        assert (failure["cause"], failure["rank"]) == ("hang", 1)
        assert "NCCL: rank 1 had not come to all_reduce" in failure["evidence"]
        kept = json.loads(Path(hang["nccl"]).read_text())
        assert set(kept) == {"0", "1"}
        assert all(kept[rank]["groups"] for rank in kept)
        run.until(lambda: len({r["attempt"] for r in run.records("attempt")}) > 1)  # and it goes on
    finally:
        run.end()
