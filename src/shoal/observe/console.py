"""The live line of a run: one line that updates itself on a terminal, a plain line now and then anywhere else."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections import deque
from collections.abc import Mapping
from typing import Any, TextIO

from shoal import readable
from shoal.observe.throughput import CONVENTION, FIRST, RECENT, Rate, recent

REDRAW_EVERY_S = 0.25  # more often is not read, and each write to a terminal costs
PLAIN_EVERY_S = 10.0


class Console:
    def __init__(self, total_steps: int | None, stream: TextIO | None = None) -> None:
        self._total = total_steps
        self._stream = stream or sys.stderr
        self._live = self._stream.isatty() and os.environ.get("TERM") != "dumb"
        self._window: deque[Mapping[str, Any]] = deque(maxlen=RECENT + FIRST)
        self._start: Mapping[str, Any] | None = None
        self._drawn_at = float("-inf")
        self._shown = ""  # the live line on the screen now
        self._fresh = False  # whether a step has come since the last drawing

    def start(self, record: Mapping[str, Any]) -> None:
        """A new attempt: its `start` record carries what MFU is measured against."""
        self._start = record
        self._total = int(record.get("total") or 0) or self._total
        self._window.clear()
        self._fresh = False

    def step(self, record: Mapping[str, Any]) -> None:
        self._window.append(record)
        self._fresh = True
        self.refresh()

    def refresh(self) -> None:
        """Draws what has come since the last time, if it is time."""
        every_s = REDRAW_EVERY_S if self._live else PLAIN_EVERY_S
        if self._fresh and time.monotonic() - self._drawn_at >= every_s:
            self._draw()

    def say(self, text: str, to: TextIO | None = None) -> None:
        """A line of its own, above the live line; `to` another stream."""
        shown = self._shown
        self._erase()
        if to is not None:
            self._stream.flush()
            print(text, file=to, flush=True)
        else:
            self._stream.write(text + "\n")
        if shown:
            self._show(shown)
        self._stream.flush()

    def close(self) -> None:
        """Leaves the last line on the screen."""
        if self._fresh:
            self._draw()
        if self._shown:
            self._stream.write("\n")
            self._shown = ""
        self._stream.flush()

    def line(self, columns: int | None = None) -> str:
        """The line for the steps seen last; what does not fit is left out whole, the least important first."""
        parts = self._parts()
        while columns is not None and len(parts) > 1 and len("  ".join(parts)) > columns:
            parts.pop()
        return "  ".join(parts)[:columns]

    def _parts(self) -> list[str]:
        """The most important first."""
        last = self._window[-1]
        parts = [f"step {last['step']}" + (f"/{self._total}" if self._total else "")]
        parts.append(f"loss {readable.number(last.get('loss'))}")
        rate = recent(tuple(self._window), () if self._start is None else (self._start,))
        if rate is not None:
            parts.append(_speed(rate))
            if rate.mfu is not None:
                parts.append(f"MFU {readable.percent(rate.mfu)} ({CONVENTION})")
            if self._total and int(last["step"]) < self._total:
                left_s = rate.step_s * (self._total - int(last["step"]))
                parts.append(f"ETA {readable.duration(left_s).replace(' ', '')}")
            if rate.tokens_per_s:
                parts.append(f"wait {readable.percent(rate.data_wait)}")
        if last.get("lr") is not None:
            parts.append(f"lr {float(last['lr']):.1e}")
        return parts

    def _draw(self) -> None:
        self._drawn_at, self._fresh = time.monotonic(), False
        if self._live:
            self._erase()
            # One that reaches the last column would wrap, and \r could not go back to its start.
            self._show(self.line(shutil.get_terminal_size().columns - 1))
        else:
            self._stream.write(self.line() + "\n")
        self._stream.flush()

    def _show(self, text: str) -> None:
        self._shown = text
        self._stream.write(text)

    def _erase(self) -> None:
        if self._shown:
            self._stream.write("\r\x1b[2K")
            self._shown = ""


def _speed(rate: Rate) -> str:
    """Nobody counts the tokens of a script."""
    return f"{readable.count(rate.tokens_per_s)} tok/s" if rate.tokens_per_s else f"{readable.short(rate.step_s)}/step"
