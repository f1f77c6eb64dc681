"""Who runs a run's workers: this machine alone, or several (shoal.guard.nodes.crew). Asked anew for each attempt."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from shoal.guard.flights import Flight, ask
from shoal.guard.island_agents import Hands, HandsHere
from shoal.guard.ranks import Pulses
from shoal.guard.signals import Signals
from shoal.guard.signs import Families, Kernel
from shoal.guard.workers import Group, Start, Workers, threads_for
from shoal.journal.pulse_file import PulseFolder
from shoal.journal.rundir import RunDir
from shoal.spec.run import Run


class Decision(Protocol):
    @property
    def key(self) -> str: ...
    @property
    def value(self) -> Any: ...
    @property
    def why(self) -> str: ...


@dataclass(frozen=True)
class Ready:
    """All who take part are here: how many processes there will be, and the run as it is laid over them."""

    run: Run
    world: int
    decisions: tuple[Decision, ...] = ()  # made because their number has changed


class Team(Group, Protocol):
    """A group that was started."""

    @property
    def pulses(self) -> Path: ...
    @property
    def watched(self) -> Pulses: ...
    @property
    def kernel(self) -> Kernel: ...
    @property
    def left(self) -> str | None:
        """Why it was ended to be put together anew, if it was."""
        ...

    @property
    def nodes(self) -> list[dict[str, object]]: ...
    def look(self) -> None:
        """Asked a few times a second while it runs."""
        ...

    def flights(self) -> dict[int, Flight]:
        """What NCCL's flight recorder says, of those ranks that answer within a few seconds."""
        ...

    def close(self) -> None: ...


class Crew(Protocol):
    def gather(self, run: Run, signals: Signals, say: Callable[[str], None]) -> Ready | None:
        """Waits until there are enough of them. None: told to stop meanwhile. TransientError: they do not come."""
        ...

    def start(self, start: Start, ready: Ready, attempt: int, logs: Path) -> Team: ...
    def hands(self, run_dir: RunDir, lock_fd: int | None) -> Hands:
        """Who starts the agents of islands."""
        ...

    def over(self, code: int, why: str) -> None:
        """The run has ended with that exit code; `why`, if it has failed."""
        ...


class LocalTeam(Workers):
    """Workers of this machine."""

    left: str | None = None
    nodes: list[dict[str, object]] = []  # noqa: RUF012  # never written to

    @cached_property
    def watched(self) -> PulseFolder:
        return PulseFolder(self.pulses)

    @cached_property
    def kernel(self) -> Kernel:
        return Families() if self.started.script else Kernel()

    def look(self) -> None:
        pass

    def flights(self) -> dict[int, Flight]:
        return ask(list(self.pids), self.pulses)


@dataclass(frozen=True)
class Alone:
    """This machine."""

    world: int

    def gather(self, run: Run, signals: Signals, say: Callable[[str], None]) -> Ready:
        return Ready(run, self.world)

    def start(self, start: Start, ready: Ready, attempt: int, logs: Path) -> LocalTeam:
        threads = threads_for(ready.run.resources.threads, ready.world)
        return LocalTeam(start.command, ready.world, attempt, logs, threads, start=start)

    def hands(self, run_dir: RunDir, lock_fd: int | None) -> HandsHere:
        return HandsHere(run_dir, lock_fd)

    def over(self, code: int, why: str) -> None:
        pass
