"""What the processes of a run do, as far as their supervisor has to know: Shoal's own training here, or a script
(`shoal.guard.script_work`). Never imports torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from shoal.errors import TRANSIENT
from shoal.guard.classify import Failure
from shoal.guard.history import History, newest_checkpoint_step
from shoal.guard.workers import Start
from shoal.journal.rundir import RunDir
from shoal.spec.run import Run


class Work(Protocol):
    def start(self, attempt: int, world: int, note: Callable[..., Any]) -> Start:
        """Of the next attempt. `note` writes a journal record."""
        ...

    def started(self, attempt: int, world: int, note: Callable[..., Any]) -> None:
        """The group runs."""
        ...

    def goes_on_from(self) -> str:
        """Of the next restart: `from step 12`."""
        ...

    def done(self) -> str: ...
    def stopped(self, history: History, saved: bool) -> str:
        """What has become of it, after it was told to stop."""
        ...

    def retried(self, failure: Failure) -> bool: ...
    def exit_code(self, failure: Failure) -> int:
        """Of a run that is given up."""
        ...

    def advice(self, failure: Failure) -> str: ...
    def close(self) -> None: ...


class Training:
    """Shoal's own."""

    def __init__(self, run_dir: RunDir, run: Run, command: Sequence[str]) -> None:
        self._run_dir, self._run, self._command = run_dir, run, command

    def start(self, attempt: int, world: int, note: Callable[..., Any]) -> Start:
        return Start(self._command)

    def started(self, attempt: int, world: int, note: Callable[..., Any]) -> None:
        pass  # rank 0 says it

    def goes_on_from(self) -> str:
        return f"from step {newest_checkpoint_step(self._run_dir)}"

    def done(self) -> str:
        return f"all {self._run.steps} steps are done"

    def stopped(self, history: History, saved: bool) -> str:
        step = newest_checkpoint_step(self._run_dir)
        if step == history.at == 0:
            return "nothing to save yet"
        return f"saved at step {step}" if saved else f"not every worker could save, so it goes on from step {step}"

    def retried(self, failure: Failure) -> bool:
        return failure.retry

    def exit_code(self, failure: Failure) -> int:
        return TRANSIENT if failure.retry or failure.exit_code is None else failure.exit_code

    def advice(self, failure: Failure) -> str:
        return failure.advice

    def close(self) -> None:
        pass
