"""What a GPU user is told, against what the GPU does: `pytest -s tests/gpu/test_figures_cuda.py` prints the tables.

Four claims: phases are the device's, no wait is added for them, packed long windows are counted and planned as they are
computed, and `mesh.micro_batch: auto` fills the card as far as that makes it faster.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from shoal.data.documents import documents_of
from shoal.data.feed import Feed
from shoal.data.index import write_index
from shoal.data.writer import ShardWriter
from shoal.decide.auto import decide
from shoal.journal.journal import records
from shoal.journal.rundir import RunDir
from shoal.observe.history import history, speed
from shoal.observe.phases import parts
from shoal.observe.throughput import duration_s, peak_flops, settled
from shoal.parallel.place import join
from shoal.plan.expect import expected
from shoal.spec.run import Run
from shoal.spec.shape import shape_of
from shoal.train.clock import Clock, timeline_of
from shoal.train.loop import Training, train_step
from shoal.train.numerics import Numerics
from shoal.train.parts import prepare
from shoal.train.saves import Saves
from shoal.train.worker import work
from shoal.train.writers import unsaved
from tests.train.tiny import make_run

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU here")

VOCAB = 8192
SMALL = {"dim": 1024, "layers": 8, "heads": 8, "kv_heads": 4, "ffn_dim": 2816, "vocab_size": VOCAB}
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cuStreamSynchronize")


def make_documents(folder: Path, mean: int, tokens: int) -> Path:
    """Documents whose lengths fall off exponentially."""
    rng = np.random.default_rng(0)
    folder.mkdir(parents=True)
    with ShardWriter(folder, "shard-00000", "uint16") as writer:
        written = 0
        while written < tokens:
            ids = rng.integers(0, VOCAB - 1, 1 + int(rng.exponential(mean)))
            writer.add(np.append(ids, VOCAB - 1))
            written += len(ids) + 1
        info = writer.close()
    write_index(folder, [info], dtype="uint16", vocab_size=VOCAB, eos_id=VOCAB - 1, tokenizer="byte", source={})
    return folder


def asked(data: Path, name: str, **changes: Any) -> Run:
    model = {f"model.{key}": value for key, value in SMALL.items()}
    return make_run(data, **{"name": name, **model, "resources.device": "cuda", **changes})


def train(run: Run, workspace: Path) -> list[dict[str, Any]]:
    decided = decide(run, workspace, 1)
    run_dir = RunDir.of(run.name, workspace)
    run_dir.path.mkdir(parents=True)
    work(run_dir, decided.run, join(decided.run), lambda: False)
    torch.cuda.empty_cache()
    return records(run_dir.journal_file)


@contextmanager
def step_of(run: Run, workspace: Path, timeline: bool) -> Iterator[Any]:
    """A function that takes one step of the loop."""
    closed = decide(run, workspace, 1).run
    place = join(closed)
    built = prepare(RunDir.of(run.name, workspace), closed, place)
    built.load_weights()
    micro = int(closed.mesh.micro_batch)
    with Feed(built.windows, built.order, closed.train.batch, 0, 1, micro) as feed:
        training = Training(
            closed,
            place,
            built.model,
            built.optimizers,
            feed,
            lambda *_, **__: None,
            lambda: False,
            lambda step: None,
            unsaved(),
            numerics=Numerics(closed.guard, built.state.skips),
            timeline=timeline_of(place.device) if timeline else None,
        )
        yield lambda step: train_step(training, step)


@pytest.fixture(autouse=True)
def no_saves(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would be a gigabyte each."""
    monkeypatch.setattr(Saves, "now", lambda *args, **kwargs: None)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_documents(tmp_path_factory.mktemp("figures") / "data", mean=1000, tokens=4_000_000)


def test_phases_are_the_devices_and_add_up_to_the_step(data: Path, tmp_path: Path) -> None:
    run = asked(data, "phases", **{"data.seq_len": 2048, "train.batch": 32, "train.steps": 16, "mesh.micro_batch": 8})
    told = train(run, tmp_path)
    steps = [r for r in told if r["kind"] == "step"]
    counted = settled(steps, [r for r in told if r["kind"] == "start"])
    device, host = parts(counted), {}
    for name in ("data_s", "compute_s", "optimizer_s"):
        host[name] = median(float(r["time"].get(name, 0.0)) for r in counted)
    whole = median(duration_s(r) for r in counted)
    print(f"\na step takes {1e3 * whole:.1f} ms")
    for name in device:
        print(f"  {name:<12} device {1e3 * device[name]:7.2f} ms   host {1e3 * host.get(name, 0.0):7.2f} ms")
    assert sum(device.values()) == pytest.approx(whole, rel=0.05)
    with step_of(run, tmp_path, timeline=True) as step:
        for number in range(3):
            step(number)
        # What the optimizer takes, with the device waited for on both sides.
        spent = []
        for number in range(3, 8):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            marks = _around_the_optimizer(begin, end)
            with marks:
                step(number)
            torch.cuda.synchronize()
            spent.append(begin.elapsed_time(end) / 1e3)
    print(f"  the optimizer, measured by itself: {1e3 * median(spent):.2f} ms")
    assert device["optimizer_s"] == pytest.approx(median(spent), rel=0.25, abs=1e-3)
    assert device["optimizer_s"] < 0.25 * whole


@contextmanager
def _around_the_optimizer(begin: torch.cuda.Event, end: torch.cuda.Event) -> Iterator[None]:
    plain = Clock.lap

    def lap(clock: Clock, name: str, then: str | None = None) -> None:
        if then == "optimizer":
            torch.cuda.synchronize()
            begin.record()
        elif then == "record":
            end.record()
        plain(clock, name, then)

    Clock.lap = lap  # type: ignore[method-assign]
    try:
        yield
    finally:
        Clock.lap = plain  # type: ignore[method-assign]


def test_no_wait_is_added(data: Path, tmp_path: Path) -> None:
    waits = {}
    for timeline in (False, True):
        changes = {"data.seq_len": 1024, "train.batch": 16, "mesh.micro_batch": 4, "train.compile": False}
        with step_of(asked(data, f"waits-{timeline}", **changes), tmp_path, timeline) as step:
            for number in range(4):
                step(number)
            with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
                for number in range(4, 12):
                    assert ("device" in step(number)) == timeline
            found = Counter(event.name for event in profiler.events())
            waits[timeline] = {name: found[name] for name in WAITS if found[name]}
    print(f"\nwaits of the host in 8 steps: without marks {waits[False]}, with them {waits[True]}")
    # The profiler waits for the device itself when it stops; both have that.
    assert sum(waits[True].values()) <= sum(waits[False].values())


def test_long_windows_of_packed_documents_are_counted_and_planned_as_computed(data: Path, tmp_path: Path) -> None:
    """A window of 131,072 tokens, documents of 1,000: counted as one document, it would use more than the card has."""
    changes = {"data.seq_len": 131_072, "train.batch": 2, "train.steps": 10, "mesh.micro_batch": 1}
    run = asked(data, "long", **changes, **{"mesh.recompute": "selective"})
    closed = decide(run, tmp_path, 1).run
    shape = shape_of(closed.model)
    plans = {
        "documents": expected(closed, shape, [], documents_of(closed, shape, tmp_path)),
        "one document": expected(closed, shape),
    }
    told = history(train(run, tmp_path))
    found = speed(told)
    assert found is not None
    assert found.mfu is not None
    whole = shape.flops_per_token(131_072, causal=True) * 2 * 131_072
    peak = peak_flops(torch.cuda.get_device_name(0), "bf16")
    assert peak is not None
    print(f"\na step took {found.step_s:.3f} s; planned by documents {plans['documents']['step_s']:.3f} s, ", end="")
    print(f"as one document {plans['one document']['step_s']:.3f} s")
    print(f"  MFU {found.mfu:.1%}, HFU {found.hfu:.1%}, memory {found.memory_share:.0%} of the bandwidth; ", end="")
    print(f"counted as one document the MFU would be {whole / found.step_s / peak:.1%}")
    print(f"  device: {json.dumps({name: round(s, 4) for name, s in found.device_s.items()})}")
    assert 0 < found.mfu < found.hfu < 1
    assert 0 < found.memory_share < 1
    off = {name: abs(np.log(plan["step_s"] / found.step_s)) for name, plan in plans.items()}
    assert off["documents"] < np.log(1.5) < off["one document"]


def test_as_many_windows_at_once_as_speed_asks_for(data: Path, tmp_path: Path) -> None:
    """What `auto` takes is at least as fast as 16,384 tokens at once, and no more than the card holds."""
    base = {"data.seq_len": 2048, "train.batch": 128, "train.steps": 9}
    decided = decide(asked(data, "auto", **base), tmp_path, 1)
    chosen = int(decided.run.mesh.micro_batch)
    print(f"\nmesh.micro_batch {chosen}: {next(d.why for d in decided.decisions if d.key == 'mesh.micro_batch')}")
    rates = {}
    for micro in sorted({8, chosen, min(128, 4 * chosen)}):
        torch.cuda.reset_peak_memory_stats()
        found = speed(history(train(asked(data, f"micro-{micro}", **base, **{"mesh.micro_batch": micro}), tmp_path)))
        assert found is not None
        rates[micro] = found.tokens_per_s
        gb = torch.cuda.max_memory_allocated() / 1e9
        print(f"  {micro:>4} windows ({micro * 2048:>7,} tokens): {found.tokens_per_s:>9,.0f} tokens/s, {gb:6.1f} GB")
    assert chosen * 2048 >= 16_384
    assert rates[chosen] > 0.97 * max(rates.values())
