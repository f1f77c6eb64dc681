"""Memory that is locked for a GPU: large tensors alone, and a sentence where the system does not allow it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from shoal.errors import SetupError
from shoal.parallel.zero import host

SMALL, LARGE = torch.empty(4), torch.empty(host.LARGE // 4)


def test_large_tensors_are_locked_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int, int]] = []
    system = SimpleNamespace(cudaHostRegister=lambda *about: asked.append(about) or 0)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: system)
    host.lock([SMALL, LARGE])
    assert asked == [(LARGE.data_ptr(), host.LARGE, 0)]


def test_memory_that_may_not_be_locked_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostRegister=lambda *about: 2))
    with pytest.raises(SetupError, match=r"could not be locked for the GPU.*ulimit -l unlimited"):
        host.lock([LARGE])
