"""What rank 0 of a script writes to the run's journal."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from shoal.journal.journal import Journal

# Between two `step` records: a step of a millisecond is not worth a line. The one that is written says how many it
# stands for; its time is that of all of them.
LEAST_S = 0.02


class Recorder:
    def __init__(self, path: Path, attempt: int, each: bool = False) -> None:
        """`each`: every step has a record of its own."""
        self._path, self._attempt, self._least_s = path, attempt, 0.0 if each else LEAST_S
        self._journal: Journal | None = None
        self._file: tuple[int, int] | None = None
        self._left: dict[str, Any] | None = None  # steps without a record of their own
        self._written = 0.0

    def step(self, step: int, loss: float, about: dict[str, Any]) -> None:
        about = {"step": step, "loss": loss, **about}
        if self._left is not None:
            about |= {"begin": self._left["begin"], "steps": self._left.get("steps", 1) + 1}
        self._left = about
        if about["t"] - self._written >= self._least_s:
            self.rest()

    def rest(self) -> None:
        """The steps that have no record yet."""
        if self._left is not None:
            about, self._left = self._left, None
            self._written = about["t"]
            self._note("step", **about)

    def saved(self, step: int, path: str, began: float, keys: list[str]) -> None:
        self.rest()
        try:
            size = os.stat(path).st_size
        except OSError:  # somebody has taken it away already
            return
        self._note("checkpoint", step=step, path=path, bytes=size, begin=began, keys=keys, by="torch.save")

    def _note(self, kind: str, **fields: Any) -> None:
        """A script may close files that it has not opened, and open others under their numbers."""
        if self._journal is None or not self._is_open():
            self._journal = Journal(self._path)
            found = os.fstat(self._journal.fileno())
            self._file = found.st_dev, found.st_ino
        self._journal.note(kind, attempt=self._attempt, **fields)

    def _is_open(self) -> bool:
        assert self._journal
        try:
            found = os.fstat(self._journal.fileno())
        except OSError:
            return False
        return (found.st_dev, found.st_ino) == self._file
