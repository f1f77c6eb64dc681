"""What all callbacks share: records in the run's journal, and whether the run was told to stop."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from shoal.journal.journal import Journal
from shoal.journal.rundir import RunDir
from shoal.script.attach import RUN
from shoal.script.checkpoints import BY_CALLBACK

MOST_VALUES = 1000  # of a step


class Telling:
    """Of one process. Only rank 0 writes; every rank is asked whether to stop, so that all do at the same step."""

    def __init__(self) -> None:
        place = os.environ.get(RUN)
        self._journal = RunDir(Path(place)).journal_file if place and os.environ.get("RANK", "0") == "0" else None
        self._listens = place is not None
        self._attempt = int(os.environ.get("SHOAL_ATTEMPT", "0"))
        self._values: tuple[int, dict[str, float]] = (0, {})  # of the step that is not over
        self._asked = False
        self._before: Any = None  # what SIGTERM did
        self._group: Any = None

    def begin(self) -> None:
        """Every rank, once its group is made: from now on SIGTERM, by which `shoal stop` comes, waits for the step."""
        if not self._listens or self._before is not None or threading.current_thread() is not threading.main_thread():
            return
        self._before = signal.signal(signal.SIGTERM, self._told) or signal.SIG_DFL
        if dist.is_initialized() and dist.get_world_size() > 1:
            self._group = dist.new_group(backend="gloo")

    def end(self) -> None:
        self._flush()
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)
            self._before = None

    def _told(self, number: int, frame: FrameType | None) -> None:
        self._asked = True

    def stop_asked(self) -> bool:
        """Every rank asks after the same step, and hears the same."""
        if self._group is None:
            return self._asked
        asked = torch.tensor([self._asked], dtype=torch.int32)
        dist.all_reduce(asked, dist.ReduceOp.MAX, group=self._group)
        return bool(asked.item())

    def logged(self, step: int, values: Mapping[str, Any]) -> None:
        """Numbers among them are kept; those of one step become one record."""
        if self._journal is None:
            return
        if step != self._values[0]:
            self._flush()
            self._values = (step, {})
        numbers = {str(name): value for name, given in values.items() if (value := _number(given)) is not None}
        self._values[1].update(list(numbers.items())[: MOST_VALUES - len(self._values[1])])

    def evaluated(self, step: int, loss: Any, began: float) -> None:
        value = _number(loss)
        if value is not None:
            self._note("eval", step=step, begin=began, loss=value)

    def saved(self, step: int, path: str, began: float) -> None:
        place = Path(os.path.abspath(path))
        files = [place] if place.is_file() else [file for file in place.rglob("*") if file.is_file()]
        if files:
            size = sum(file.stat().st_size for file in files)
            self._note("checkpoint", step=step, path=str(place), bytes=size, begin=began, by=BY_CALLBACK)

    def _flush(self) -> None:
        step, values = self._values
        self._values = (step, {})
        if values:
            self._note("metrics", step=step, values=values)

    def _note(self, kind: str, **fields: Any) -> None:
        if self._journal is None:
            return
        journal = Journal(self._journal)
        journal.note(kind, attempt=self._attempt, **fields)
        journal.close()


def _number(value: Any) -> float | None:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.detach().item()
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return None
