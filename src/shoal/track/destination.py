"""What a tracker must be able to do, and which ones a run file asks for."""

from __future__ import annotations

from typing import Protocol

from shoal.journal.rundir import RunDir
from shoal.spec.run import Track
from shoal.track.about import About
from shoal.track.cursor import Cursor
from shoal.track.events import Event


class Destination(Protocol):
    name: str  # of its cursor file
    label: str  # for people; no secrets
    address: str  # another address has its own cursor; no secrets
    most_values: int  # numbers in one `send`
    durable: bool  # whether what `send` took has arrived; if not, only `finish` says so

    def open(self, about: About, cursor: Cursor) -> None:
        """Connects, and finds or makes the run over there. May move the cursor back: the destination knows best."""

    def send(self, events: list[Event], cursor: Cursor) -> None:
        """Uploads; sending the same events again must do no harm."""

    def finish(self) -> None:
        """Everything sent has arrived, or an exception says that it has not."""


def destinations(run_dir: RunDir, track: Track) -> list[Destination]:
    found: list[Destination] = []
    if track.mlflow:
        from shoal.track.to_mlflow import ToMlflow

        found.append(ToMlflow(run_dir, track.mlflow))
    if track.wandb != "off":
        from shoal.track.to_wandb import ToWandb

        found.append(ToWandb(run_dir, offline=track.wandb == "offline"))
    if track.tensorboard:
        from shoal.track.to_tensorboard import ToTensorboard

        found.append(ToTensorboard(run_dir))
    return found
