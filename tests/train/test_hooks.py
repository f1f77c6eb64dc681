"""Events come in their order, at every step, also where a batch is left out or a run stops."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shoal.data.windows import Batch
from shoal.decide.auto import decide
from shoal.errors import Stopped
from shoal.journal.rundir import RunDir
from shoal.parallel.place import join
from shoal.spec import dump
from shoal.train import builtin_hooks
from shoal.train.hooks import Hook, Moment
from shoal.train.worker import work
from tests.train.tiny import make_data, make_run


class Seen(Hook):
    """Notes the events. It stands in the place of a hook of Shoal's that nothing depends on."""

    events: list[tuple[Any, ...]]

    def __init__(self) -> None:
        Seen.events = []

    def start(self, model: Any, step: int) -> None:
        self._model = model
        self.events.append(("start", step))

    def batch(self, at: Moment, batches: list[Batch]) -> list[Batch]:
        self.events.append(("batch", *at, sum(len(b.tokens) for b in batches), self._gradients()))
        return batches

    def backward(self, at: Moment) -> None:
        self.events.append(("backward", *at, self._gradients()))

    def update(self, at: Moment, targets: float) -> None:
        self.events.append(("update", *at, self._gradients()))

    def step(self, at: Moment, record: dict[str, Any]) -> None:
        assert record["step"] == at.step
        self.events.append(("step", *at, self._gradients()))

    def save(self, step: int) -> None:
        self.events.append(("save", step))

    def end(self, step: int) -> None:
        self.events.append(("end", step))

    def close(self) -> None:
        self.events.append(("close",))

    def _gradients(self) -> bool:
        """Whether all parameters have one."""
        return all(p.grad is not None for _, p in self._model.named_parameters())


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(builtin_hooks, "Garbage", Seen)
    return make_data(tmp_path / "data")


def train(data: Path, steps: int, stop: Callable[[], bool] = lambda: False) -> int:
    """In this process; how many samples a batch has."""
    workspace = data.parent
    run = decide(make_run(data, **{"train.steps": steps}), workspace, 1).run
    run_dir = RunDir.of(run.name, workspace)
    run_dir.path.mkdir(parents=True)
    run_dir.spec_file.write_text(dump(run))
    work(run_dir, run, join(run), stop)
    return run.train.batch


def a_step(step: int, batch: int, rows: int) -> list[tuple[Any, ...]]:
    return [("batch", step, batch, rows, False), ("backward", step, batch, True), ("update", step, batch, True)]


def test_the_events_of_a_run(data: Path) -> None:
    rows = train(data, 2)
    first = [*a_step(0, 0, rows), ("step", 1, 0, False), ("save", 1)]
    second = [*a_step(1, 1, rows), ("step", 2, 1, False), ("save", 2)]
    assert Seen.events == [("start", 0), *first, *second, ("end", 2), ("close",)]


def test_a_batch_that_is_left_out_has_no_step(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_POISON", "nan:1")
    rows = train(data, 2)
    first = [*a_step(0, 0, rows), ("step", 1, 0, False), ("save", 1)]
    second = [*a_step(1, 1, rows), *a_step(1, 2, rows), ("step", 2, 2, False), ("save", 2)]
    assert Seen.events == [("start", 0), *first, *second, ("end", 2), ("close",)]


def test_a_run_that_is_told_to_stop_is_closed_without_an_end(data: Path) -> None:
    with pytest.raises(Stopped):
        train(data, 4, lambda: sum(event[0] == "step" for event in Seen.events) == 2)
    assert Seen.events[-1] == ("close",)
    assert ("end", 4) not in Seen.events
