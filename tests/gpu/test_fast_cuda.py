"""The fast path on a GPU against torch's own kernels: packed documents, windows, the loss, the update, fp8."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shoal.data.windows import Batch
from shoal.model import fp8_rows
from shoal.parallel.build import build
from shoal.parallel.place import Place
from shoal.train.optim import Optimizers
from tests.train.tiny import make_run

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU here")

BATCH, SEQ, VOCAB = 4, 1000, 5000  # no multiples of anything


def losses(**changes: Any) -> list[float]:
    """Of three steps on windows of several documents, with some tokens that are no targets."""
    shape = {"dim": 512, "layers": 2, "heads": 8, "kv_heads": 2, "ffn_dim": 1024, "vocab_size": VOCAB}
    axes = dict.fromkeys(("dp_replicate", "dp_shard", "tp", "pp", "cp", "ep"), 1)
    settings = {
        **{f"model.{name}": value for name, value in shape.items()},
        **{f"mesh.{name}": value for name, value in {**axes, "micro_batch": BATCH, "recompute": "none"}.items()},
        "resources.device": "cuda",
        "resources.processes": 1,
        "resources.threads": 1,
        "data.seq_len": SEQ,
        "train.batch": BATCH,
        "train.precision": "bf16",
        "train.compile": False,
    }
    run = make_run(Path("x"), **{**settings, **changes})
    model = build(run, Place(0, 1, torch.device("cuda", 0)))
    optimizers = Optimizers(run.train.optimizer, model.named_parameters())
    rng, told = np.random.default_rng(0), []
    for _ in range(3):
        row = rng.integers(0, VOCAB, (BATCH, SEQ + 1))
        documents = (rng.random((BATCH, SEQ)) < 1 / 150).cumsum(1).astype(np.int32)
        targets = row[:, 1:].copy()
        targets[:, ::17] = -100
        positions = np.broadcast_to(np.arange(SEQ), (BATCH, SEQ)).copy()
        count = int((targets >= 0).sum())
        loss = model.backward([Batch(row[:, :-1].copy(), targets, positions, documents)]) / count
        norm, factor = model.norm(1 / count, 1.0)
        told += [float(loss), float(norm)]
        optimizers.step(1.0, factor)
    return told


@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("compiled", [False, True])
def test_the_fast_path_takes_the_steps_of_the_plain_one(compiled: bool, window: int | None) -> None:
    plain = losses(**{"train.kernels": "plain", "model.sliding_window": window})
    fast = losses(**{"train.compile": compiled, "model.sliding_window": window})
    assert fast == pytest.approx(plain, rel=5e-3)


@pytest.mark.parametrize(("compiled", "recompute"), [(False, "none"), (True, "none"), (True, "selective")])
@pytest.mark.parametrize("scaling", ["tensor", "row"])
def test_fp8_takes_nearly_the_steps_of_bf16(compiled: bool, recompute: str, scaling: str) -> None:
    way = {"train.precision": "fp8", "train.fp8_scaling": scaling}
    eight = losses(**way, **{"train.compile": compiled, "mesh.recompute": recompute})
    assert eight == pytest.approx(losses(), rel=5e-2)


def test_fp8_by_rows_takes_the_steps_of_its_plain_twin() -> None:
    way = {"train.precision": "fp8", "train.fp8_scaling": "row"}
    assert losses(**way) == pytest.approx(losses(**way, **{"train.kernels": "plain"}), rel=1e-2)


@pytest.mark.parametrize("rough", [True, False])
def test_fp8_products_by_rows_are_those_that_a_processor_emulates(rough: bool) -> None:
    """Rows of very unlike size, one of zeros; no side a multiple of a tile."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(n, 1008, generator=generator).mul(torch.logspace(-4, 4, n)[:, None]) for n in (400, 208))
    a[3] = 0
    (a8, _, a_units, _), (b8, _, b_units, _) = (fp8_rows.cast([x.bfloat16()], 0) for x in (a, b))
    emulated = fp8_rows.multiply(a8, b8, a_units, b_units).float()
    taken = fp8_rows.multiply(*(t.cuda() for t in (a8, b8, a_units, b_units)), rough=rough).float().cpu()
    assert not taken[3].any()
    off = (taken - emulated).norm(dim=1) / emulated.norm(dim=1).clamp(min=1e-30)
    # Few columns make most of a row's length, and sums that differ little may round a last digit of bfloat16 apart.
    assert off.max() < (2e-2 if rough else 2**-7), off.max()


def test_every_kernel_gives_what_its_plain_twin_gives() -> None:
    done = subprocess.run([sys.executable, "-m", "tests.kernels.compare"], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1:] == ["equal"], done.stderr
