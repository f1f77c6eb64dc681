"""Supervises a run from start to end, and writes the supervisor's half of its journal. Never imports torch.

Attempts follow one another, each from the newest checkpoint, until the run is done, told to stop, beyond help, or out
of restarts.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, replace
from typing import Any

from shoal.checkpoint.memory.give_back import give_back_saved
from shoal.checkpoint.store import Folder
from shoal.errors import DONE, TOLD_TO_STOP, TRANSIENT, ShoalError
from shoal.guard import mirroring
from shoal.guard.began import began
from shoal.guard.begin import other_code, write_spec
from shoal.guard.budget import Budget
from shoal.guard.classify import Failure
from shoal.guard.console import Console
from shoal.guard.crew import Alone, Crew, Decision, Team
from shoal.guard.history import History
from shoal.guard.island_agents import Agents
from shoal.guard.progress import Progress, kin_of, of_attempt
from shoal.guard.signals import Signals, signal_name
from shoal.guard.smaller import smaller
from shoal.guard.surroundings import Surroundings
from shoal.guard.symptoms import CONSEQUENCES
from shoal.guard.watch import TICK_S, Ended, watch
from shoal.guard.work import Training, Work
from shoal.guard.workers import log_file
from shoal.journal import lock
from shoal.journal.journal import Journal
from shoal.journal.keep import Keeper
from shoal.journal.rundir import RunDir
from shoal.journal.suggested import command as suggested
from shoal.masking import mask_arguments
from shoal.spec.run import Run

MIRROR_WAIT_S = 20.0  # after a finished run; a stopped one waits less, since a scheduler is counting
MIRROR_WAIT_STOPPED_S = 5.0
MEMORY_WAIT_S = 2.0  # for a persister that ends after its worker


@dataclass(frozen=True)
class End:
    """How a session ended: its `close` record."""

    status: str  # done, stopped, failed
    exit_code: int
    reason: str


def worker_command(run_dir: RunDir) -> list[str]:
    return [sys.executable, "-m", "shoal.train", "--worker", str(run_dir.path)]


def supervise(
    run_dir: RunDir,
    run: Run,
    world: int,
    *,
    decisions: Iterable[Decision] = (),
    asked: Iterable[Decision] = (),
    held: bool = False,
    command: Sequence[str] | None = None,
    mirror_command: Sequence[str] | None = None,
    crew: Crew | None = None,
    job: str | None = None,
) -> int:
    """Runs the run to its end and returns the exit code. `decisions` were made by Shoal and `asked` by the person who
    resumed it; both are journaled. `held` says that the caller holds the run's lock. The commands are for tests.
    `crew` is who runs the workers where it is not this machine alone; `job` names what a scheduler starts again and
    again, which shares one budget of restarts."""
    with ExitStack() as stack:
        if not held:
            stack.enter_context(lock.hold(run_dir))
        signals = stack.enter_context(Signals())
        console = stack.enter_context(closing(Console(run_dir, run)))
        work = stack.enter_context(closing(_work(run_dir, run, command)))
        session = Session(run_dir, run, crew or Alone(world), work, signals, console, job)
        session.open(decisions, asked)
        stack.callback(session.leave)
        mirror = None
        if mirroring.wanted(run.track):
            mirror = mirroring.Mirror(run_dir, mirror_command or mirroring.default_command(run_dir))
        end: End | None = None
        try:
            end = session.attempts()
        except BaseException as e:
            code = e.exit_code if isinstance(e, ShoalError) else TRANSIENT
            how = str(e).rstrip(".") if isinstance(e, ShoalError) else f"the supervisor failed: {type(e).__name__}: {e}"
            end = End("failed", code, how)
            session.close(end)
            raise
        finally:
            if end is not None:
                session.crew.over(end.exit_code, end.reason if end.status == "failed" else "")
        session.console.tick()
        session.console.close()
        stops = len(signals.stops)  # before it is told that the run has ended: a Ctrl-C from then on is about the wait
        session.close(end)
        session.give_back_memory()
        session.console.summary(end.status, end.reason, session.history)
        if mirror:
            patience = MIRROR_WAIT_STOPPED_S if end.status == "stopped" else MIRROR_WAIT_S
            if not mirror.caught_up(patience, signals.wait, hurry=lambda: len(signals.stops) > stops):
                session.console.say(f"tracking is behind; {suggested('track sync', run_dir)} uploads the rest.")
        return end.exit_code


def _work(run_dir: RunDir, run: Run, command: Sequence[str] | None) -> Work:
    if run.script is None:
        return Training(run_dir, run, command or worker_command(run_dir))
    from shoal.guard.script_work import Scripted  # most runs are none

    return Scripted(run_dir, run, run.script)


class Session:
    """One life of the supervisor: from `open` to `close` in the journal."""

    def __init__(
        self,
        run_dir: RunDir,
        run: Run,
        crew: Crew,
        work: Work,
        signals: Signals,
        console: Console,
        job: str | None = None,
    ) -> None:
        self.run_dir, self.run, self.crew, self.signals, self.console = run_dir, run, crew, signals, console
        self.work, self.job = work, job
        self.history = History.of(run_dir)
        self.number = self.history.sessions
        self._next_attempt = self.history.attempts
        self._said_stopping = False
        self._said_unwritten = False  # that the journal cannot be written
        self._left: str | None = None  # why the last group was put apart
        self._journal = Journal(run_dir.journal_file)
        self._index = Keeper(run_dir.journal_file)

    def open(self, decisions: Iterable[Decision], asked: Iterable[Decision]) -> None:
        before = self.history.open
        self._note(
            "open",
            session=self.number,
            pid=os.getpid(),
            host=socket.gethostname(),
            argv=mask_arguments(sys.argv),
            resumed=self.number > 0,
            began=began(),
            **({} if self.job is None else {"job": self.job}),
        )
        if before:  # nobody was left to say how that session ended
            who = f"pid {before.get('pid')} on {before.get('host')}"
            evidence = f"session {before['session']} ({who}) ended without closing the journal"
            lost = Failure(None, "supervisor-lost", evidence)
            self._fail(lost, max(0, self._next_attempt - 1), "go on from the newest checkpoint")
        if self.number > 0 and (other := other_code(self.run_dir, self.run)):
            self._note("warning", text=f"{other}.")
        for decision in decisions:
            self._note("decision", key=decision.key, value=decision.value, why=decision.why)
        for decision in asked:
            self._note("decision", key=decision.key, value=decision.value, why=decision.why, asked=True)

    def attempts(self) -> End:
        self.history.refresh()
        budget = Budget(self.run.guard.restarts, self.run.guard.backoff_s, self.history.failed_in_a_row)
        furthest = self.history.step
        while True:
            ended = self._attempt()
            self.history.refresh()
            attempt = self._next_attempt - 1
            if ended is None:
                return self._stopped(self.signals.stops[0], saved=True)
            if self._left and not self.signals.told_to_stop and (ended.failure is None or _was_told(ended.failure)):
                self._note("warning", text=f"{self._left}: the group is put together anew")
                continue
            end = self._if_over(ended, attempt)
            if end:
                return end
            failure = ended.failure
            assert failure is not None  # neither over nor failed cannot be
            fewer = smaller(self.run, failure, self.history)
            wait_s = budget.spend(progressed=self.history.step > furthest or fewer is not None)
            furthest = self.history.step
            if wait_s is None:
                return self._give_up(failure, attempt)
            action = f"restart {budget.used} of {budget.restarts} {self.work.goes_on_from()} in {wait_s:g} s"
            self._fail(failure, attempt, action if fewer is None else f"{action}, with {fewer.key} {fewer.value}")
            if fewer is not None:
                self.run = fewer.run
                self._note("decision", key=fewer.key, value=fewer.value, why=fewer.why)
                write_spec(self.run_dir, fewer.run)
            self._wait(wait_s)
            if self.signals.told_to_stop:
                return self._stopped(self.signals.stops[0], saved=True)

    def close(self, end: End) -> None:
        self._note("close", session=self.number, status=end.status, exit_code=end.exit_code, reason=end.reason)
        self.history.refresh()

    def give_back_memory(self) -> None:
        """What killed workers have left in this machine's memory and the disk has as well. On several nodes the job's
        own end does that, and workers that end in order have done it."""
        if isinstance(self.crew, Alone) and self.run.checkpoint.local and self.run.fleet.islands == 1:
            with suppress(OSError, ShoalError):  # the run is over, and said what there was to say
                give_back_saved(self.run_dir.path, Folder(self.run_dir.checkpoints), MEMORY_WAIT_S)

    def leave(self) -> None:
        """Its last act: until here it has cost its machine, for after `close` the tracking mirror is waited for."""
        with suppress(OSError):  # a full disk, which was said before
            self._journal.append("exit", session=self.number)
        self._journal.close()

    def _attempt(self) -> Ended | None:
        """How it ended; None: told to stop before it could begin."""
        self._left = None
        ready = self.crew.gather(self.run, self.signals, self.console.say)
        if ready is None:
            return None
        self.run = ready.run
        for decision in ready.decisions:
            self._note("decision", key=decision.key, value=decision.value, why=decision.why)
        attempt, self._next_attempt = self._next_attempt, self._next_attempt + 1
        if self.run.fleet.islands > 1:
            return self._islands(attempt, ready.world)
        around = Surroundings.now(self.run_dir.path)
        start = self.work.start(attempt, ready.world, self._note)
        with closing(self.crew.start(start, ready, attempt, self.run_dir.logs)) as team:
            nodes = {"nodes": team.nodes} if team.nodes else {}
            self._note("attempt", attempt=attempt, world=ready.world, pids=list(team.pids.values()), **nodes)
            self.work.started(attempt, ready.world, self._note)
            note = of_attempt(self._note, attempt=attempt)
            logs = log_file(self.run_dir.logs, attempt, 0).parent
            self.console.attempt(log_file(self.run_dir.logs, attempt, 0))
            kin, count = kin_of(self.run.mesh), len(team.nodes) + 1
            progress = Progress(
                team.pids, team.pulses, logs, self.run.guard, note, team.kernel, team.watched, kin, count, team.flights,
                script=start.script,
            )  # fmt: skip
            grace_s = self.run.guard.grace_s
            ended = watch(team, self.signals, around, grace_s, self._stopping, self._tick(team), progress)
            self._left = team.left
            if start.script and self.signals.told_to_stop and any(death.told for death in ended.deaths):
                # A script that was told to stop and leaves with code 0 has saved, and not come to its end.
                return replace(ended, stop_signal=self.signals.stops[0])
            return ended

    def _tick(self, team: Team) -> Callable[[], None]:
        def tick() -> None:
            team.look()
            self._look()

        return tick

    def _look(self) -> None:
        """Follows the journal, a few times a second."""
        self.console.tick()
        self._index.look()

    def _islands(self, attempt: int, world: int) -> Ended:
        def failed(island: int, failure: Failure, action: str) -> None:
            self._note("failure", island=island, **failure.fields(), action=action)

        fleet, guard = self.run.fleet, self.run.guard
        hands = self.crew.hands(self.run_dir, lock.fd_of(self.run_dir))
        with closing(Agents(self.run_dir, fleet.islands, guard, failed, hands=hands)) as agents:
            self._note("attempt", attempt=attempt, world=world, agents=list(agents.pids.values()), pids=[])
            return agents.watch(self.signals, guard.grace_s, self._stopping, self._look)

    def _if_over(self, ended: Ended, attempt: int) -> End | None:
        """The end of the run, if this was it."""
        if ended.stop_signal is not None:
            if ended.failure:
                self._fail(ended.failure, attempt, "stop")
            return self._stopped(ended.stop_signal, ended.saved)
        if ended.failure is None:
            return End("done", DONE, self.work.done())
        if not self.work.retried(ended.failure):
            self._fail(ended.failure, attempt, "give up: a retry cannot help")
            return End("failed", self.work.exit_code(ended.failure), _sentence(ended.failure))
        return None

    def _give_up(self, failure: Failure, attempt: int) -> End:
        restarts = self.run.guard.restarts
        self._fail(failure, attempt, f"give up: {restarts} restarts in a row made no progress")
        after = f"after {restarts} restarts in a row without progress" if restarts else "(guard.restarts is 0)"
        return End(
            "failed",
            self.work.exit_code(failure),
            f"gave up {after}: {_sentence(failure)}; {self.work.advice(failure)}",
        )

    def _stopped(self, number: int, saved: bool) -> End:
        if not self._said_stopping:  # it came while no worker was there to be told, or only the workers heard it
            self._stopping(number)
        self.history.refresh()
        how = self.work.stopped(self.history, saved)
        return End("stopped", TOLD_TO_STOP, f"told to stop ({signal_name(number)}); {how}")

    def _stopping(self, number: int) -> None:
        self._said_stopping = True
        self._note("stopping", signal=signal_name(number), **({"script": True} if self.run.script else {}))
        self.console.tick()
        self.console.say(
            f"this takes at most {self.run.guard.grace_s:g} s; Ctrl-C now ends it at once, without saving."
        )

    def _fail(self, failure: Failure, attempt: int, action: str) -> None:
        self._note("failure", attempt=attempt, **failure.fields(), action=action)

    def _wait(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not self.signals.told_to_stop and (left := deadline - time.monotonic()) > 0:
            self.signals.wait(min(left, TICK_S))
            self.console.tick()

    def _note(self, kind: str, **fields: Any) -> None:
        """A journal that cannot be written (a full disk) must not take the workers with it."""
        try:
            self._journal.append(kind, **fields)
            self._said_unwritten = False
        except OSError as e:
            if self._said_unwritten:
                return
            self._said_unwritten = True
            self.console.say(f"cannot write {self.run_dir.journal_file} ({e.strerror}); free space, the run goes on.")


def _was_told(failure: Failure) -> bool:
    """A node that was told to leave and has gone before all could save, or one that others lost with it."""
    return failure.cause in ("node-lost", *CONSEQUENCES)


def _sentence(failure: Failure) -> str:
    return f"rank {failure.rank} failed ({failure.cause}): {failure.evidence.rstrip('.')}"
