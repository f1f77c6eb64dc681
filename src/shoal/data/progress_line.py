"""One line on stderr that says how far a long job is: redrawn on a terminal, printed now and then elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TextIO

from shoal.readable import count, duration

REDRAW_S = 0.2
PRINT_S = 10.0
BAR = 24


class ProgressLine:
    """`total` and `done` are in any unit; rates count what was done since the start, not what a rerun found done."""

    def __init__(
        self, label: str, total: float, done: float = 0, quiet: bool = False, stream: TextIO | None = None
    ) -> None:
        self._label = label
        self._total = max(total, 1)
        self._done = self._found_done = done
        self._text_bytes = 0
        self._tokens = 0
        self._stream = stream or sys.stderr
        self._terminal = self._stream.isatty()
        self._quiet = quiet
        self._began_s = time.monotonic()
        self._shown_s = 0.0 if self._terminal else self._began_s  # a terminal sees the first result at once

    def add(self, done: float = 0, text_bytes: int = 0, tokens: int = 0) -> None:
        self._done += done
        self._text_bytes += text_bytes
        self._tokens += tokens
        if not self._quiet and time.monotonic() - self._shown_s >= (REDRAW_S if self._terminal else PRINT_S):
            self._show()

    def say(self, text: str) -> None:
        """A line of its own, above the one that is redrawn."""
        if not self._quiet:
            self._clear()
            print(text, file=self._stream, flush=True)

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._began_s

    def line(self) -> str:
        elapsed_s = max(self.elapsed_s, 1e-6)
        share = min(self._done / self._total, 1.0)
        new = (self._done - self._found_done) / self._total
        parts = [f"{100 * share:3.0f}%"]
        if self._terminal:
            full = round(BAR * share)
            parts.insert(0, "█" * full + "░" * (BAR - full))
        if self._text_bytes:
            parts.append(f"{self._text_bytes / elapsed_s / 1e6:.1f} MB/s")
        if self._tokens:
            parts.append(f"{count(self._tokens / elapsed_s)} tokens/s")
        if new > 0 and share < 1:
            parts.append(f"{duration((1 - share) * elapsed_s / new)} left")
        return f"{self._label}  " + "  ".join(parts)

    def _show(self) -> None:
        self._shown_s = time.monotonic()
        if self._terminal:
            self._stream.write(f"\r\x1b[K{self.line()}")
            self._stream.flush()
        else:
            print(self.line(), file=self._stream, flush=True)

    def _clear(self) -> None:
        if self._terminal:
            self._stream.write("\r\x1b[K")
            self._stream.flush()

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        if not self._quiet:
            self._clear()
