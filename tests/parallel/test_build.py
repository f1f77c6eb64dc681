"""How a model is laid out before its first step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch._inductor.config as inductor

from shoal.parallel.build import build
from shoal.parallel.place import Place
from tests.train.tiny import make_run


def test_the_compiler_chooses_no_kernel_by_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process, or this one after a restart, could find another one faster, and sum in another order."""
    monkeypatch.setattr(inductor, "deterministic", False)
    settled = {"model.vocab_size": 64, "mesh.recompute": "none", "mesh.micro_batch": 1, "train.precision": "fp32"}
    build(make_run(Path("data"), **settled, **{"train.compile": True}), Place(0, 1, torch.device("cpu")))
    assert inductor.deterministic
