"""TensorBoard: event files in the run directory, written by the `tensorboard` package alone: no torch, no TensorFlow.

TensorBoard can take points back: a session that starts at step N makes it drop what it had from N on. So redone steps
replace the lost ones, and a batch that was written twice after a crash shows once.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.errors import needs_extra
from shoal.journal.rundir import RunDir
from shoal.track.about import About
from shoal.track.cursor import Cursor
from shoal.track.events import Event

if TYPE_CHECKING:
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

TAGS = {
    "loss": "train/loss",
    "eval_loss": "eval/loss",
    "grad_norm": "train/grad_norm",
    "lr": "train/lr",
    "tokens_per_s": "speed/tokens_per_s",
    "mfu": "speed/mfu_causal",
    "data_wait_s": "speed/data_wait_s",
    "expert_imbalance": "router/expert_imbalance",
    "expert_dead": "router/expert_dead",
    "ep_imbalance": "router/ep_imbalance",
    "attempt": "run/attempt",
}


def _tag(key: str) -> str:
    """Of one set of an evaluation, beside that of their mean."""
    kind, _, name = key.partition("/")
    return TAGS[kind] + f"/{name}" * bool(name)


class ToTensorboard:
    name = "tensorboard"
    durable = True
    most_values = 10_000

    def __init__(self, run_dir: RunDir) -> None:
        self._folder = run_dir.path / "tensorboard"
        self._grouped = run_dir.workspace / "tensorboard"
        self._name = run_dir.name
        self.address = str(self._folder)
        self.label = f"TensorBoard files in {self._folder}"
        self._writer: EventFileWriter | None = None

    def open(self, about: About, cursor: Cursor) -> None:
        try:
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError:
            raise needs_extra("tensorboard", "tensorboard", "writing TensorBoard files") from None
        if self._writer is not None:
            self._writer.close()
        if not any(self._folder.glob("events.out.*")):
            cursor.forget()  # somebody deleted them: write them all again
        if about.track.group is not None:
            self._link(self._grouped / about.track.group / self._name)
        self._writer = EventFileWriter(str(self._folder), max_queue_size=1000, flush_secs=3600)
        self._restart(int(cursor.remote.get("step", 0)), about.started)

    def send(self, events: list[Event], cursor: Cursor) -> None:
        assert self._writer is not None
        step = int(cursor.remote.get("step", 0))
        for event in events:
            if event.kind == "start":
                self._restart(event.step, event.t)
            if event.values:
                self._add(event)
                step = event.step
        self._writer.flush()
        cursor.remote["step"] = step

    def finish(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _link(self, place: Path) -> None:
        """`tensorboard --logdir tensorboard/GROUP` shows the runs that belong together, and no others."""
        place.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            place.symlink_to(os.path.relpath(self._folder, place.parent))

    def _restart(self, steps_done: int, t: float) -> None:
        from tensorboard.compat.proto.event_pb2 import SessionLog

        self._write(t, steps_done + 1, session_log=SessionLog(status=SessionLog.START))

    def _add(self, event: Event) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=_tag(key), simple_value=value) for key, value in event.values.items()]
        self._write(event.t, event.step, summary=Summary(value=values))

    def _write(self, t: float, step: int, **what: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event as Proto

        assert self._writer is not None
        self._writer.add_event(Proto(wall_time=t, step=step, **what))
