"""The agents of all islands of a run, as the supervisor sees them. Never imports torch.

They are not tied to it: when it dies they go on, and those of its machine hold the run's lock until the last of them
has ended. Those of other nodes are started and watched by the agents there (shoal.guard.nodes.island_agents).
"""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Protocol

from shoal.errors import DONE, TOLD_TO_STOP, TRANSIENT, WRONG_ENVIRONMENT, WRONG_USAGE, TransientError
from shoal.guard.budget import Budget
from shoal.guard.classify import Failure, classify
from shoal.guard.history import History
from shoal.guard.island import command, logs_of
from shoal.guard.signals import Signals
from shoal.guard.watch import TICK_S, Ended
from shoal.guard.workers import Death
from shoal.journal.rundir import RunDir
from shoal.spec.run import Guard

SAID = (DONE, WRONG_USAGE, TRANSIENT, WRONG_ENVIRONMENT, TOLD_TO_STOP)  # an agent that ends so has told why
LOOK_S = 0.5  # for a node that is not here
FINISH_S = 5.0  # for the other islands, when one has ended the run
MARGIN_S = 10.0  # on top of the grace that the agents give their islands


class Handle(Protocol):
    """One agent that was started, as subprocess has it."""

    @property
    def pid(self) -> int: ...
    def poll(self) -> int | None: ...
    def send_signal(self, sig: int) -> None: ...
    def wait(self) -> int: ...


class Hands(Protocol):
    """Who starts the agents of islands."""

    def start(self, island: int) -> Handle | None:
        """None: its node is not here."""
        ...

    def left(self, island: int) -> bool:
        """Whether it has ended because its node went away or was told to: then it waits for another one."""
        ...


class Agents:
    def __init__(
        self,
        run_dir: RunDir,
        islands: int,
        guard: Guard,
        failed: Callable[[int, Failure, str], None],
        lock_fd: int | None = None,
        hands: Hands | None = None,
    ) -> None:
        """`failed` is told of an agent that has died without a word: the island, what it was, and what is done."""
        self._run_dir, self._failed = run_dir, failed
        self._hands = hands or HandsHere(run_dir, lock_fd)
        self._history = History.of(run_dir)
        self._budgets = {island: Budget(guard.restarts, guard.backoff_s) for island in range(islands)}
        self._furthest = dict(self._history.by_island)
        self._alive: dict[int, Handle] = {}
        self._again: dict[int, float] = {}
        self.codes: dict[int, int] = {}
        try:
            for island in range(islands):
                self._start_or_wait(island)
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> dict[int, int]:
        return {island: process.pid for island, process in self._alive.items()}

    def watch(
        self, signals: Signals, grace_s: float, stopping: Callable[[int], None], tick: Callable[[], None]
    ) -> Ended:
        """Returns once no island is left."""
        told, deadline, finish = False, float("inf"), float("inf")
        while self._alive or self._again:
            if DONE in self.codes.values():  # all is trained and saved: whoever comes back now has nothing to do
                finish = min(finish, time.monotonic() + FINISH_S)
                self._again.clear()
            if time.monotonic() > finish:
                self._signal(signal.SIGKILL)
            if signals.told_to_stop and not told:
                told, deadline = True, time.monotonic() + grace_s + MARGIN_S
                stopping(signals.stops[0])
                self._again.clear()
                self._signal(signal.SIGTERM)
            if signals.told_twice or time.monotonic() > deadline:
                self._signal(signal.SIGTERM)
                self._signal(signal.SIGINT)  # after any stop this means: at once
                deadline = float("inf")
            self._reap(told)
            signals.wait(TICK_S)
            tick()
        return self._ended(signals)

    def close(self) -> None:
        self._signal(signal.SIGKILL)  # their workers are tied to them
        for process in self._alive.values():
            process.wait()

    def _reap(self, told: bool) -> None:
        for island, process in list(self._alive.items()):
            code = process.poll()
            if code is None:
                continue
            del self._alive[island]
            if told or DONE in self.codes.values():
                self.codes[island] = code
            elif self._hands.left(island):
                self._again[island] = time.monotonic()  # the others go on; there is nothing to hold against it
            elif code in SAID:
                self.codes[island] = code
            else:
                self._died(island, process.pid, code)
        for island in [island for island, at in self._again.items() if time.monotonic() > at]:
            del self._again[island]
            try:
                self._start_or_wait(island)
            except OSError as e:  # no reason to end the others
                cause = "disk-full" if e.errno in (errno.ENOSPC, errno.EDQUOT) else "environment"
                self._again_if_allowed(
                    island, Failure(None, cause, f"its agent cannot be started: {e}", at=time.time())
                )

    def _start_or_wait(self, island: int) -> None:
        handle = self._hands.start(island)
        if handle is not None:
            self._alive[island] = handle
        elif self._alive:
            self._again[island] = time.monotonic() + LOOK_S
        else:  # nobody trains, and nobody is there to
            raise TransientError(f"the node of island {island} is gone and no other island is left.")

    def _died(self, island: int, pid: int, code: int) -> None:
        """Somebody has killed the agent, or it has failed; its island went with it."""
        exit_code, number = (None, -code) if code < 0 else (code, None)
        log = logs_of(self._run_dir, island).with_suffix(".log")
        failure = classify(Death(0, pid, exit_code, number, told=False, t=time.time(), log=log))
        self._again_if_allowed(island, replace(failure, rank=None, evidence=f"its agent: {failure.evidence}"))

    def _again_if_allowed(self, island: int, failure: Failure) -> None:
        self._history.refresh()
        step, budget = self._history.by_island.get(island, 0), self._budgets[island]
        wait_s = budget.spend(progressed=step > self._furthest.get(island, 0))
        self._furthest[island] = step
        if wait_s is None:
            self.codes[island] = TRANSIENT
            self._failed(island, failure, f"give up this island: {budget.restarts} restarts in a row made no progress")
        else:
            self._again[island] = time.monotonic() + wait_s
            self._failed(island, failure, f"restart island {island} in {wait_s:g} s; the others go on")

    def _ended(self, signals: Signals) -> Ended:
        codes = set(self.codes.values())
        if DONE in codes:
            return Ended(())
        if signals.told_to_stop or codes <= {TOLD_TO_STOP}:
            number = signals.stops[0] if signals.stops else signal.SIGTERM
            return Ended((), number, saved=TOLD_TO_STOP in codes)
        island, code = next((i, c) for i, c in sorted(self.codes.items()) if c != TOLD_TO_STOP)
        evidence = f"all islands have ended; island {island} with exit code {code} (its own failure is above)"
        return Ended((), None, Failure(None, "unknown", evidence, code, at=time.time()))

    def _signal(self, number: signal.Signals) -> None:
        for process in self._alive.values():
            process.send_signal(number)


class HandsHere:
    """Of this machine."""

    def __init__(self, run_dir: RunDir, lock_fd: int | None, env: Mapping[str, str] | None = None) -> None:
        self._run_dir, self._lock, self._env = run_dir, [] if lock_fd is None else [lock_fd], dict(env or {})

    def start(self, island: int) -> subprocess.Popen[bytes]:
        logs = logs_of(self._run_dir, island)
        logs.parent.mkdir(parents=True, exist_ok=True)
        with open(logs.with_suffix(".log"), "ab", buffering=0) as out:
            return subprocess.Popen(
                command(self._run_dir, island),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
                pass_fds=self._lock,
                env=os.environ | self._env | {"PYTHONUNBUFFERED": "1"},
            )

    def left(self, island: int) -> bool:
        return False
