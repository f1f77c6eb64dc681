"""Signals as events: the supervisor sleeps in `wait` until a worker ends, somebody says stop, or time is up."""

from __future__ import annotations

import select
import signal
import socket
from types import FrameType, TracebackType
from typing import Any

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2)  # USR2: Slurm warns of the time limit with it


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


class Signals:
    """While entered, stop signals are noted instead of obeyed and SIGCHLD wakes `wait`. Main thread only."""

    def __init__(self) -> None:
        self.stops: list[int] = []
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        self._read, self._write = socket.socketpair()
        self._read.setblocking(False)
        self._write.setblocking(False)
        for number in STOPS:
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue  # nohup: the terminal may go away
            self._before[number] = signal.signal(number, self._note)
        # Python only writes to the wake-up socket for signals that have a handler of its own.
        self._before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda *_: None)
        self._wakeup_before = signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False)
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        signal.set_wakeup_fd(self._wakeup_before)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._read.close()
        self._write.close()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.stops.append(number)

    @property
    def told_to_stop(self) -> bool:
        return bool(self.stops)

    @property
    def told_twice(self) -> bool:
        """A Ctrl-C after any stop: now, without saving. A repeated SIGTERM is not that; schedulers send several."""
        return signal.SIGINT in self.stops[1:]

    def wait(self, timeout_s: float) -> None:
        """Until a signal arrives or the time is up. A signal that came before the call counts."""
        ready, _, _ = select.select([self._read], [], [], max(0.0, timeout_s))
        if ready:
            while True:
                try:
                    self._read.recv(4096)
                except BlockingIOError:
                    return
