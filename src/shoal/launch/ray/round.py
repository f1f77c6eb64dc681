"""One round of a job on Ray: agents on all its nodes, from their start until node 0's has left or is lost.

Another node that is lost gets a new actor, and the others go on meanwhile: node 0's agent decides what becomes of the
group, as it does everywhere. When node 0 is lost the round is over, since the next one may stand on another machine.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from shoal.errors import DONE, TOLD_TO_STOP, TRANSIENT, WRONG_ENVIRONMENT, WRONG_USAGE
from shoal.guard.budget import Budget
from shoal.launch.ray import node as node_module
from shoal.launch.ray.order import order
from shoal.launch.ray.places import Places, bundle, words
from shoal.launch.request import Request

TICK_S = 0.5
POLL_S = 1.0  # a call of an actor waits so long for something to tell; a stop waits behind it
SETTLE_S = 5.0  # between the end of one agent and that of node 0, when all of them leave
FIRST_WAITING_S, WAITING_EVERY_S = 10.0, 60.0  # a job that waits for nodes says so
KNOWN = (DONE, WRONG_USAGE, TRANSIENT, WRONG_ENVIRONMENT, TOLD_TO_STOP)
NEVER_AGAIN = (WRONG_USAGE, WRONG_ENVIRONMENT)


class Stop(Protocol):
    """Whether somebody wants the job to end: guard.signals.Signals, or nobody."""

    @property
    def told_to_stop(self) -> bool: ...
    @property
    def told_twice(self) -> bool: ...
    def wait(self, timeout_s: float) -> None: ...


@dataclass(frozen=True)
class Ended:
    code: int
    lost: bool = False  # node 0 went away without a word, and the code is ours
    time_is_up: bool = False


@dataclass
class Progress:
    """How far the run has come, over all rounds."""

    step: int = 0
    spent_at: int = 0  # when a restart was paid for last

    def made(self) -> bool:
        progressed, self.spent_at = self.step > self.spent_at, max(self.step, self.spent_at)
        return progressed


@dataclass(eq=False)
class Seat:
    """A node of the job, wherever it stands now."""

    number: int
    actor: Any
    answer: Any  # what is awaited of it
    question: Literal["where", "start", "poll"] = "where"
    at: tuple[str, int] | None = None
    host: str = ""
    running: bool = False
    code: int | None = None  # how its agent left
    lost: bool = False
    again_at: float | None = None  # when it gets another actor
    paid: bool = False  # out of the budget, for that


@dataclass
class Job:
    """What stays the same from round to round."""

    request: Request
    id: str
    tar: Any  # a reference to the bundle's bytes, which Ray brings to every node once
    secrets: Mapping[str, str] = field(repr=False)
    stop: Stop
    at_once: Callable[[], bool]  # whether a stop must not wait for a save
    losses: Budget
    progress: Progress = field(default_factory=Progress)


def say(sentence: str) -> None:
    print(f"shoal: {sentence}.", file=sys.stderr, flush=True)


class Round:
    def __init__(self, job: Job, places: Places) -> None:
        import ray

        self._job, self._places = job, places
        ray.cloudpickle.register_pickle_by_value(node_module)
        self._actor = ray.remote(max_restarts=0, max_task_retries=0)(node_module.Node)
        self._seats = [self._seat(number) for number in range(job.request.launch.nodes)]
        self._verdict: tuple[float, int] | None = None  # when it counts, unless node 0 says something else before
        self._stopping_until: float | None = None
        self._time_is_up = self._at_once = False
        limit = job.request.time_limit_s
        self._limit_s = None if limit is None else limit - job.request.warning_s
        self._began: float | None = None  # when node 0 was started
        self._say_waiting_at = time.monotonic() + FIRST_WAITING_S

    def run(self) -> Ended:
        while (ended := self._over()) is None:
            self._listen()
            self._stop_if_told()
            self._bring_back()
            self._say_what_it_waits_for()
        if not ended.lost:
            self._last_words()
        return ended

    def close(self) -> None:
        import ray

        for seat in self._seats:
            ray.kill(seat.actor)  # its agent and that one's workers go with it

    def _seat(self, number: int) -> Seat:
        actor = self._actor.options(**self._places.actor_options(number)).remote(number)
        return Seat(number, actor, actor.where.remote())

    def _over(self) -> Ended | None:
        head, now = self._seats[0], time.monotonic()
        if head.lost:
            return Ended(TRANSIENT, lost=True)
        if head.code is not None:
            if head.code in KNOWN:
                return Ended(head.code, time_is_up=self._time_is_up and head.code == TOLD_TO_STOP)
            say(f"the agent of node 0 on {head.host} {_how(head.code)}")
            return Ended(TRANSIENT, lost=True)
        if self._verdict is not None and now > self._verdict[0]:
            return Ended(self._verdict[1])
        if self._stopping_until is not None:
            if not head.running:
                return Ended(TOLD_TO_STOP)
            if now > self._stopping_until:
                say("it was told to stop and did not save in time; it goes on from its newest checkpoint")
                return Ended(TRANSIENT)
            if self._hurry():
                say("ended at once, without saving")
                return Ended(TRANSIENT)
        return None

    def _listen(self) -> None:
        import ray

        asked = {seat.answer: seat for seat in self._seats if seat.answer is not None}
        if not asked:
            self._job.stop.wait(TICK_S)
            return
        ray.wait(list(asked), num_returns=1, timeout=TICK_S)
        ready, _ = ray.wait(list(asked), num_returns=len(asked), timeout=0)
        for answer in ready:
            seat = asked[answer]
            seat.answer = None
            try:
                self._heard(seat, ray.get(answer))
            except ray.exceptions.ActorUnavailableError:  # the network: it is lost for good only when Ray says so
                self._ask(seat, seat.question)
            except ray.exceptions.RayError as e:
                self._lost(seat, str(e).strip().splitlines()[0])

    def _heard(self, seat: Seat, said: Any) -> None:
        match seat.question:
            case "where":
                seat.at, seat.host = (said["ip"], said["port"]), said["host"]
                say(f"node {seat.number} is on {seat.host} ({said['ip']})")
                self._start(*([seat] if seat.number else self._seats))
            case "start" if said is not None:
                say(str(said))
                self._give_up(WRONG_ENVIRONMENT, at_once=True)
            case "start":
                seat.running = True
                self._ask(seat, "poll")
            case "poll":
                for line in said["lines"]:
                    print(f"[{seat.number}] {line}", flush=True)
                if said["dropped"]:
                    say(f"{said['dropped']} lines of node {seat.number} came too fast and are not here")
                self._job.progress.step = max(self._job.progress.step, said["step"])
                if said["code"] is None:
                    self._ask(seat, "poll")
                else:
                    self._left(seat, said["code"])

    def _ask(self, seat: Seat, question: Literal["where", "start", "poll"]) -> None:
        seat.question = question
        match question:
            case "where":
                seat.answer = seat.actor.where.remote()
            case "poll":
                seat.answer = seat.actor.poll.remote(POLL_S)
            case "start":
                job, head = self._job, self._seats[0].at
                assert head is not None
                told = order(job.request, job.secrets, job.id, seat.number, head)
                seat.answer = seat.actor.start.remote(told, job.tar)

    def _start(self, *seats: Seat) -> None:
        """Those that have a place, once it is known where node 0 stands: it is the one they connect to."""
        if self._seats[0].at is None or self._stopping_until is not None:
            return
        for seat in seats:
            if seat.at is not None and seat.question == "where" and seat.answer is None:
                self._ask(seat, "start")
        self._began = self._began or time.monotonic()

    def _left(self, seat: Seat, code: int) -> None:
        """An agent has ended. All leave as node 0's does; one that leaves alone is brought back."""
        code = WRONG_ENVIRONMENT if code in (126, 127) else code  # the shell's: there is no such program
        seat.answer, seat.running, seat.code = None, False, code
        if seat.number == 0 or self._stopping_until is not None or code == DONE:
            return
        if code in NEVER_AGAIN:
            self._give_up(code)
            return
        if code not in KNOWN:
            say(f"the agent of node {seat.number} on {seat.host} {_how(code)}")
        seat.again_at = time.monotonic() + SETTLE_S

    def _lost(self, seat: Seat, why: str) -> None:
        say(f"node {seat.number}{f' on {seat.host}' if seat.host else ''} is lost: {why.rstrip('.')}")
        seat.answer, seat.running, seat.at, seat.lost = None, False, None, True
        seat.again_at = time.monotonic()

    def _bring_back(self) -> None:
        import ray

        if self._stopping_until is not None:
            return
        for seat in self._seats:
            if seat.number == 0 or seat.again_at is None or time.monotonic() < seat.again_at:
                continue
            if not seat.paid:
                wait_s = self._job.losses.spend(self._job.progress.made())
                if wait_s is None:
                    say(f"gave up: {self._job.losses.restarts} nodes in a row were lost without progress")
                    self._give_up(TRANSIENT, at_once=True)
                    return
                seat.paid, seat.again_at = True, time.monotonic() + wait_s
                continue
            ray.kill(seat.actor)
            self._seats[seat.number] = self._seat(seat.number)
            say(f"another node {seat.number} is asked for; the others go on")

    def _give_up(self, code: int, at_once: bool = False) -> None:
        """Node 0 may say it better: it is heard for a moment."""
        if self._verdict is None:
            self._verdict = (time.monotonic() + (0.0 if at_once else SETTLE_S), code)

    def _stop_if_told(self) -> None:
        if self._stopping_until is not None:
            return
        up = self._began is not None and self._limit_s is not None and time.monotonic() - self._began > self._limit_s
        if up and not self._job.stop.told_to_stop:
            self._time_is_up = True
            say(f"launch.time_limit {self._job.request.launch.time_limit} is near: it saves and asks for nodes again")
        elif not self._job.stop.told_to_stop:
            return
        else:
            say("told to stop: it saves and leaves")
        self._stopping_until = time.monotonic() + self._job.request.warning_s
        if self._hurry():
            return
        for seat in self._seats:
            if seat.running:
                seat.actor.tell.remote(signal.SIGTERM)

    def _hurry(self) -> bool:
        """Whether it must end without saving; asked for once, that stays."""
        self._at_once = self._at_once or self._job.stop.told_twice or self._job.at_once()
        return self._at_once

    def _say_what_it_waits_for(self) -> None:
        now, missing = time.monotonic(), [seat.number for seat in self._seats if seat.at is None]
        if not missing or now < self._say_waiting_at:
            return
        self._say_waiting_at = now + WAITING_EVERY_S
        each = words(bundle(self._job.request))
        say(f"waits for {len(missing)} of {len(self._seats)} nodes; each needs {each} free on one machine")

    def _last_words(self) -> None:
        """The others hear from node 0 that it is over; what they still say is shown."""
        deadline = time.monotonic() + SETTLE_S
        while any(seat.running for seat in self._seats[1:]) and time.monotonic() < deadline:
            self._listen()


def _how(code: int) -> str:
    return f"was ended by signal {-code}" if code < 0 else f"left with {code}, which is none of Shoal's codes"
