"""What the person at the terminal sees of a batch: a bar with an ETA, and a line for each failure."""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from typing import Any

from shoal.guard.classify import Failure
from shoal.observe.batch import Tally, became

PLAIN_EVERY_S = 10.0
MOST_LINES = 50  # of failures; the report has more


class Screen:
    """A screen that goes away costs the batch nothing."""

    def __init__(self, units: int, node: int) -> None:
        self._units, self._of = units, f"node {node}: " if node else ""
        self._lines, self._plain_at = 0, time.monotonic() + PLAIN_EVERY_S
        self._bar: Any = None
        if sys.stderr.isatty() and os.environ.get("TERM") != "dumb":
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
            self._bar.start()
            self._task = self._bar.add_task("units", total=units)

    def show(self, tally: Tally) -> None:
        if self._bar is not None:
            failed = f", {tally.failed:,} failed" if tally.failed else ""
            self._bar.update(self._task, completed=tally.done + tally.failed, description=f"units{failed}")
        elif time.monotonic() >= self._plain_at:
            self._plain_at = time.monotonic() + PLAIN_EVERY_S
            self._say(tally.sentence())

    def failed(self, unit: int, failure: Failure, again_s: float | None) -> None:
        self._lines += 1
        if self._lines > MOST_LINES:
            return
        then = "it has failed" if again_s is None else f"again in {again_s:.1f} s"
        self._say(f"unit {unit} {became(failure.cause)} ({failure.evidence}); {then}")
        if self._lines == MOST_LINES:
            self._say("further failures are not shown here; `shoal report` has them")

    def close(self) -> None:
        if self._bar is not None:
            with suppress(OSError):
                self._bar.stop()

    def _say(self, text: str) -> None:
        with suppress(OSError):
            if self._bar is not None:
                self._bar.console.print(f"shoal: {self._of}{text}.", markup=False, highlight=False, soft_wrap=True)
            else:
                print(f"shoal: {self._of}{text}.", file=sys.stderr, flush=True)
