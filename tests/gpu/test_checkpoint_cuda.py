"""Saves from a GPU: training does not wait for them, and what is saved is the state at that moment, bit for bit."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from shoal import checkpoint
from shoal.checkpoint.memory import ram
from shoal.checkpoint.saver import Saver
from shoal.checkpoint.setup import Setup

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU here")

MATRIX = 4096


def make_state(seed: int = 0, matrices: int = 16) -> dict[str, torch.Tensor]:
    """1 GB, of a few kinds."""
    torch.manual_seed(seed)
    state = {f"matrix.{i}": torch.randn(MATRIX, MATRIX, device="cuda") for i in range(matrices)}
    state["half"] = torch.randn(1000, 333, device="cuda", dtype=torch.bfloat16)
    state["transposed"] = torch.randn(300, 500, device="cuda").t()
    state["scalar"] = torch.tensor(3.5, device="cuda")
    state["counts"] = torch.arange(7, device="cuda")
    return state


@pytest.fixture
def saver(tmp_path: Path, memory: Path) -> Iterator[Saver]:
    saver = Saver(Setup(0, 1, 1, -1, (str(tmp_path),), str(memory)), make_state())
    yield saver
    saver.close()


@pytest.fixture
def memory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="shoal-test-", dir="/dev/shm") as folder:
        hold = ram.hold(Path(folder) / "run" / "node-0")
        yield hold.folder
        hold.close()


def restored(root: Path, like: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    loaded = {name: torch.zeros_like(t) for name, t in like.items()}
    assert checkpoint.restore(root, loaded) is not None
    return loaded


def test_the_state_may_change_right_after_settle_and_the_host_never_waits(saver: Saver, tmp_path: Path) -> None:
    state = make_state()
    for step in (1, 2, 3):
        wanted = {name: t.clone() for name, t in state.items()}
        saver.begin(step, state, {"step": step})
        saver.settle()
        for t in state.values():  # queued behind the copies, on the stream that training uses
            t.mul_(2).add_(1)
        assert any(e.kind == "saved" for e in saver.wait_for(step, ("saved", "failed"), 120))
        loaded = restored(tmp_path, state)
        assert [n for n in wanted if not torch.equal(loaded[n], wanted[n])] == []


def test_training_is_held_up_for_milliseconds(saver: Saver) -> None:
    state = make_state()
    saver.begin(1, state, {})
    saver.wait_for(1, ("saved",), 120)
    work = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    torch.cuda.synchronize()

    began = time.perf_counter()
    saver.begin(2, state, {})
    asked_s = time.perf_counter() - began
    for _ in range(100):  # a tenth of a second of forward and backward
        work @ work
    torch.cuda.synchronize()
    began = time.perf_counter()
    saver.settle()
    torch.cuda.synchronize()
    waited_s = time.perf_counter() - began

    began = time.perf_counter()
    for t in state.values():
        t.cpu()
    copy_s = time.perf_counter() - began
    print(f"asked {asked_s * 1e3:.2f} ms, waited {waited_s * 1e3:.2f} ms; a plain copy takes {copy_s * 1e3:.0f} ms")
    assert asked_s + waited_s < 0.1 * copy_s
    assert any(e.kind == "saved" for e in saver.wait_for(2, ("saved",), 120))


def test_slices_that_were_cut_otherwise_are_put_together_on_the_gpu(tmp_path: Path) -> None:
    state = make_state(matrices=2)
    checkpoint.save(tmp_path, 5, state, {}, piece_bytes=1 << 20)
    loaded = restored(tmp_path, state)
    assert [n for n in state if not torch.equal(loaded[n], state[n])] == []
