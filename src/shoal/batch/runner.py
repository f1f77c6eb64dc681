"""The runner of one node: it claims blocks of units, runs as many units at once as it may, and writes what becomes of
them. Every launcher starts this one, as often as it has nodes; they need not know of each other.

One thread: the end of a unit wakes it, and so does a signal. Node 0 stays until all units are over, takes over what
other nodes have lost, and leaves with the run's exit code; the others leave with 0 as soon as there is nothing left
that they could take.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

from shoal.batch import leftovers
from shoal.batch.attempt import Attempt, Kills, Work, failure_of, kept_log, not_started, wait_s
from shoal.batch.owned import Owned
from shoal.errors import DONE, TOLD_TO_STOP, TransientError
from shoal.guard.classify import Failure
from shoal.guard.signals import STOPS, Signals
from shoal.guard.workers import Death
from shoal.journal.claims import BEAT_S, FENCE_S, LEASE_S, Claims, Runner, Watch, round_of, runners, write_runner
from shoal.journal.units import Folder, Plan
from shoal.spec.duration import seconds
from shoal.spec.run import Run

LOOK_EVERY_S = 5.0  # at what others do, where there is nothing to do
LONGEST_SLEEP_S = 1.0
TOLD_TOGETHER_S = 0.5
LONG_S = 1e6  # as good as for ever; `select` takes no infinity
KEEPER = Path(leftovers.__file__)


class Batched:
    """One life of it."""

    def __init__(
        self, folder: Folder, plan: Plan, run: Run, work: Work, node: int, nodes: int, job: str | None
    ) -> None:
        self._folder, self._plan, self._run, self._work = folder, plan, run, work
        self._me = Runner.me(node, work.at_once)
        self._round = round_of(folder, job)
        first = plan.blocks * node // max(1, nodes) if node < nodes else 0
        self._watch = Watch(folder, LEASE_S)
        self._claims = Claims(folder, plan.blocks, self._round, self._me, first, self._watch)
        self._blocks: dict[int, Owned] = {}
        self._running: dict[int, Attempt] = {}  # by slot
        self._slots = list(range(work.at_once))[::-1]
        self._kills = Kills(folder.path)
        # Alone there is nobody to take its units over: a laptop that sleeps, or a Ctrl-Z, costs nothing.
        self._fence_s = FENCE_S if nodes > 1 else float("inf")
        self._beaten = self._heard = _now()
        self._limit_s = None if work.batch.timeout is None else seconds(work.batch.timeout)
        self._keeper: subprocess.Popen[bytes] | None = None
        self.lost_before = 0  # processes of a killed runner that were still there
        self.news: list[
            tuple[int, Failure, float | None]
        ] = []  # failed: the unit, why, seconds until it is tried again

    def run(self, signals: Signals, tick: Callable[[Batched], None]) -> int:
        """The exit code. `tick` is called now and then, to show how far it is."""
        with ExitStack() as stack:
            write_runner(self._folder, self._me)  # what cannot be written now is said now
            self._beaten = self._heard = _now()
            stack.callback(self._leave)
            self._end_leftovers()
            self._begin_keeper()
            while True:
                self._beat_if_due()
                self._reap(signals)
                if signals.told_to_stop:
                    self._stop(signals)
                    if not self._running:
                        return self._left(TOLD_TO_STOP)
                else:
                    self._fill()
                    if not self._running and not self._blocks and self._nothing_left():
                        return self._left(DONE)
                tick(self)
                signals.wait(self._sleep_s())

    @property
    def running(self) -> list[int]:
        return sorted(attempt.unit for attempt in self._running.values())

    @property
    def own(self) -> dict[int, Owned]:
        return self._blocks

    def _nothing_left(self) -> bool:
        """Node 0 waits for what the others hold, since they may be lost; the others do not wait."""
        return self._me.node != 0 or self._claims.all_closed

    def _fill(self) -> None:
        while self._slots:
            now = time.monotonic()
            for block in self._blocks.values():
                unit = block.next(now)
                if unit is not None:
                    if not self._start(block, unit):
                        return
                    break
            else:
                claim = self._claims.take(LOOK_EVERY_S)
                if claim is None:
                    return
                self._blocks[claim.block] = Owned(self._folder, self._plan, claim.block, self._round)
                self._close_if_over(self._blocks[claim.block])

    def _start(self, block: Owned, unit: int) -> bool:
        slot = self._slots.pop()
        log = self._folder.logs / f"{self._me.id}.{slot}.log"
        number = block.units[unit].attempts
        block.began(unit, self._me.id, log.name)
        try:
            attempt = Attempt(self._work, unit, number, slot, log)
        except (OSError, ValueError) as e:
            self._slots.append(slot)
            failure = not_started(e if isinstance(e, OSError) else OSError(22, str(e)), unit)
            self._failed(block, unit, failure, 0.0, {})
            return failure.exit_code is not None  # a machine without room: not again at once
        self._running[slot] = attempt
        return True

    def _reap(self, signals: Signals) -> None:
        for slot, attempt in list(self._running.items()):
            death = attempt.ended()
            if death is None:
                continue
            del self._running[slot]
            self._slots.append(slot)
            unit, took_s = attempt.unit, time.monotonic() - attempt.began_at
            block = self._blocks[self._plan.block_of(unit)]
            failure = failure_of(attempt, death, self._work, self._kills)
            log = kept_log(self._folder, block.number, attempt)
            if failure is None:
                block.done(unit, took_s, **log)
                self._close_if_over(block)
            elif attempt.told == "stopped" or (attempt.told is None and _by_a_stop(death, signals)):
                block.stopped(unit, took_s, **log)
            else:
                self._failed(block, unit, failure, took_s, log)

    def _failed(self, block: Owned, unit: int, failure: Failure, took_s: float, log: Mapping[str, str | int]) -> None:
        later_s = None
        if block.failed(unit, failure, self._work.batch, took_s, **log):
            later_s = wait_s(block.units[unit].failures, self._run.guard.backoff_s)
            block.again(unit, time.monotonic() + later_s)
        else:
            self._close_if_over(block)
        self.news.append((unit, failure, later_s))

    def _close_if_over(self, block: Owned) -> None:
        if block.over:
            block.close()
            del self._blocks[block.number]
            self._claims.closed(block.number)

    def _stop(self, signals: Signals) -> None:
        for attempt in self._running.values():
            grace_s = 0.0 if signals.told_twice else self._run.guard.grace_s
            if attempt.told is None or signals.told_twice:
                attempt.tell("stopped", grace_s)

    def _sleep_s(self) -> float:
        now = time.monotonic()
        due = [now + LONGEST_SLEEP_S]
        due += [block.next_at for block in self._blocks.values()] if self._slots else []
        limit_s = self._limit_s
        for attempt in self._running.values():
            if limit_s is not None and attempt.told is None and now - attempt.began_at >= limit_s:
                attempt.tell("timeout", self._run.guard.grace_s)
            due.append(attempt.kill_if_due())
            if limit_s is not None and attempt.told is None:
                due.append(attempt.began_at + limit_s)
        return max(0.0, min(due) - now)

    def _beat_if_due(self) -> None:
        now = _now()
        if now - self._beaten > self._fence_s:
            # Others may have taken its blocks over: nothing more is written, and nothing goes on.
            for attempt in self._running.values():
                attempt.tell("fenced", 0.0)
                attempt.kill_if_due()
            raise TransientError(
                f"the runner of node {self._me.node} could not say for {now - self._beaten:.0f} s that it lives "
                f"({self._folder.runners} could not be written, or it stood still), so it has ended its units."
            )
        if now - max(self._beaten, self._heard) >= BEAT_S:
            self._beat()

    def _beat(self) -> None:
        self._heard = _now()
        self._me = replace(self._me, beat=self._me.beat + 1, running=self.running)
        with suppress(OSError):  # the fence is for those who cannot for long
            write_runner(self._folder, self._me)
            self._beaten = _now()
        if self._keeper is not None and self._keeper.stdin is not None:
            with suppress(OSError):
                self._keeper.stdin.write(b"+")

    def _end_leftovers(self) -> None:
        """Of runners of this machine that were killed: their keepers do it too, but nobody waits for those."""
        dead = [r for r in runners(self._folder) if r.left is None and r.id != self._me.id and r.process_is_gone]
        if dead:
            self.lost_before = leftovers.end_all([runner.id.encode() for runner in dead])
            for runner in dead:
                with suppress(OSError):
                    write_runner(self._folder, replace(runner, left=137))

    def _begin_keeper(self) -> None:
        env = {name: value for name, value in os.environ.items() if name != "SHOAL_BATCH_RUNNER"}
        command = [sys.executable, "-I", "-S", str(KEEPER), self._me.id, str(min(self._fence_s, LONG_S))]
        self._keeper = subprocess.Popen(
            command, env=env, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True, bufsize=0
        )
        self._work = replace(self._work, env={**self._work.env, "SHOAL_BATCH_RUNNER": self._me.id})

    def _left(self, code: int) -> int:
        for block in self._blocks.values():
            block.close()
        self._me = replace(self._me, left=code, running=[])
        return code

    def _leave(self) -> None:
        """However it ended: nothing of it goes on. One that has not said how it left is gone by its process."""
        for attempt in self._running.values():
            attempt.tell("fenced", 0.0)
            attempt.kill_if_due()
        if self._keeper is not None and self._keeper.stdin is not None:
            with suppress(OSError):
                self._keeper.stdin.write(leftovers.DONE if not self._running else b"")
                self._keeper.stdin.close()
            self._keeper.wait()
        for slot in range(self._work.at_once):
            with suppress(OSError):
                (self._folder.logs / f"{self._me.id}.{slot}.log").unlink()
        if self._me.left is not None:
            with suppress(OSError):
                write_runner(self._folder, self._me)


def _by_a_stop(death: Death, signals: Signals) -> bool:
    """Slurm tells all processes of a step to stop, the units too, and a unit may be the first to hear it."""
    if death.signal not in STOPS and (death.exit_code or 0) - 128 not in STOPS:
        return False
    deadline = time.monotonic() + TOLD_TOGETHER_S
    while not signals.told_to_stop and (left_s := deadline - time.monotonic()) > 0:
        signals.wait(left_s)
    return signals.told_to_stop


def _now() -> float:
    """A clock that goes on while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()
