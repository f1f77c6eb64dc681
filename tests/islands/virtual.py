"""Time that passes only when nobody has anything to do: a swarm's minutes in a second, the same way each time.

    with virtual_time(monkeypatch) as run:
        run(main())

Timers of the loop, `time.monotonic` and `time.time` follow one clock, and what would go to a thread is done at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import selectors
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

BEGIN_S, DAY_S = 1000.0, 1.7e9


class _Selector(selectors.SelectSelector):
    """Instead of waiting for so long it lets that time pass."""

    now = BEGIN_S

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        found = super().select(0)
        if not found and timeout is None:
            raise AssertionError("everybody waits for somebody else, for ever")
        if not found:
            self.now += timeout or 0.0
        return found


class Loop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._clock = _Selector()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now


async def _at_once(do: Callable[..., Any], *args: Any, **named: Any) -> Any:
    return do(*args, **named)


@contextlib.contextmanager
def virtual_time(monkeypatch: pytest.MonkeyPatch, seed: int = 0) -> Iterator[Callable[[Coroutine[Any, Any, Any]], Any]]:
    loop = Loop()
    with monkeypatch.context() as patch:
        patch.setattr(time, "monotonic", loop.time)
        patch.setattr(time, "time", lambda: DAY_S + loop.time())
        patch.setattr(asyncio, "to_thread", _at_once)
        patch.setattr(os, "fsync", lambda fd: None)  # no power is cut here
        state = random.getstate()
        random.seed(seed)
        try:
            with asyncio.Runner(loop_factory=lambda: loop) as runner:
                yield runner.run
        finally:
            random.setstate(state)
