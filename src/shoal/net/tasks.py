"""Work that goes on beside: none of it ends unheard.

A task of asyncio that raises is remembered by nobody until it is collected, so a node would go on without the part of
it that has died. Here whatever runs for ever is started again, and is told of each time; one that fails again and again
at once, or that is not to be started again, ends the node with a sentence.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

AGAIN_S = (0.2, 10.0)  # before it is started again: at first, at most
CALM_S = 60.0  # after so long without a failure the earlier ones are forgotten
MOST_FAILURES = 5
FOR_EVER = 1 << 30  # failures: it is always started again

Work = Callable[[], Coroutine[Any, Any, None]]
Told = Callable[..., None]  # (kind, **fields)
Fail = Callable[[str, Exception], None]  # which work, and what went wrong


class Tasks:
    def __init__(self, event: Told, fail: Fail) -> None:
        """`event` hears of each failure; `fail` of those that are not to be borne."""
        self._event, self._fail = event, fail
        self._kept: dict[str, asyncio.Task[None]] = {}
        self._once: set[asyncio.Task[None]] = set()

    @property
    def kept(self) -> dict[str, asyncio.Task[None]]:
        """By their names; those that run for ever."""
        return dict(self._kept)

    def keep(self, name: str, work: Work, *, borne: int = MOST_FAILURES) -> None:
        """For ever, or until it returns. `borne`: failures in a row after which it is not started again."""
        task = asyncio.create_task(self._keep(name, work, borne), name=name)
        self._kept[name] = task

    def spawn(self, work: Coroutine[Any, Any, None], name: str = "") -> asyncio.Task[None]:
        """Once. What it raises is not borne: nobody else would do what it has left undone."""
        task = asyncio.create_task(self._guard(work, name or getattr(work, "__qualname__", "work")))
        self._once.add(task)
        task.add_done_callback(self._once.discard)
        task.add_done_callback(lambda _: work.close())  # one that was cancelled before it began
        return task

    async def end(self, name: str) -> None:
        """One of those that run for ever."""
        task = self._kept.pop(name, None)
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def close(self, patience_s: float = 0.0) -> None:
        """Ends them all, but not the one that says so; `patience_s`: for them to end by themselves."""
        tasks = [t for t in (*self._kept.values(), *self._once) if t is not asyncio.current_task()]
        if tasks and patience_s:
            await asyncio.wait(tasks, timeout=patience_s)
        for task in tasks:
            task.cancel()
        self._kept.clear()  # one that was cancelled holds on to all that it has used, such as sockets
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _keep(self, name: str, work: Work, borne: int) -> None:
        failures = 0
        while True:
            began = time.monotonic()
            try:
                await work()
                return
            except Exception as e:
                failures = 1 if time.monotonic() - began > CALM_S else failures + 1
                if failures > borne:
                    self._fail(name, e)
                    return
                self._tell(name, e, failures)
            await asyncio.sleep(min(AGAIN_S[0] * 2 ** (failures - 1), AGAIN_S[1]))

    async def _guard(self, work: Coroutine[Any, Any, None], name: str) -> None:
        try:
            await work
        except Exception as e:
            self._fail(name, e)

    def _tell(self, name: str, e: Exception, failures: int) -> None:
        text = f"{name} of this node has failed and is started again ({words(e)})"
        self._event("task-failed", task=name, failures=failures, text=text)


def words(e: BaseException) -> str:
    """A failure in one line."""
    return f"{type(e).__name__}: {e}".splitlines()[0][:200]
