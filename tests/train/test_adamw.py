"""AdamW with moments in 16 bits: the plain twin against torch's, a run that learns as fast, and its resumption."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shoal.train.adamw import adamw_
from tests.train.tiny import digest_of, losses_of, make_data, make_run, train_on


def test_in_float32_it_is_torchs() -> None:
    torch.manual_seed(0)
    p, grad, factor = torch.randn(500), torch.randn(500), torch.tensor(0.3)
    parameter, (m, v) = torch.nn.Parameter(p.clone()), torch.zeros(2, 500)
    optimizer = torch.optim.AdamW([parameter], lr=3e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    for step in (1, 2, 3):
        parameter.grad = grad * step * factor
        optimizer.step()
        adamw_(p, grad * step, m, v, factor, step=step, lr=3e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    torch.testing.assert_close(p, parameter.detach())
    torch.testing.assert_close(m, optimizer.state[parameter]["exp_avg"])


@pytest.mark.parametrize("shard", [1, 2])
def test_moments_in_16_bits_learn_as_fast_and_resume_bit_for_bit(tmp_path: Path, shard: int) -> None:
    data = make_data(tmp_path / "data")
    mesh = {"mesh.dp_shard": shard, "mesh.dp_replicate": 1, "checkpoint.every": 5}
    wide = losses_of(train_on(make_run(data, name="wide", **mesh), tmp_path, shard))
    narrow = {**mesh, "train.optimizer.moments": "bf16"}
    whole = train_on(make_run(data, name="narrow", **narrow), tmp_path, shard)
    assert losses_of(whole)[-1] == pytest.approx(wide[-1], rel=0.01)
    assert losses_of(whole)[-1] != wide[-1]
    calls = iter(range(100))
    part = make_run(data, name="parts", **narrow)
    last = 8 if shard == 1 else 9  # several hear of it during a step, and end after it
    with pytest.raises(AssertionError, match=f"stopped after step {last}"):
        train_on(part, tmp_path, shard, told_to_stop=lambda: next(calls) == 8)
    assert digest_of(train_on(part, tmp_path, shard)) == digest_of(whole)
