"""Watches one worker group from its start to its end, and says how it ended.

Every wait ends by an event (a worker's end, a signal) or by a deadline that one of four rules has set:
told to stop → the grace; one worker finished → the others should too, within the grace; a worker died of what looks
like another's death → a moment, for the culprit to show itself; anything else → no deadline.
While all of them live and nobody has said stop, their progress is looked at (`shoal.guard.progress`): a group that
hangs is ended, if that is the policy.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from shoal.errors import DONE, TOLD_TO_STOP
from shoal.guard.classify import Failure, classify, culprit
from shoal.guard.progress import Progress
from shoal.guard.signals import Signals
from shoal.guard.surroundings import Surroundings
from shoal.guard.symptoms import CONSEQUENCES
from shoal.guard.workers import Death, Group

TICK_S = 0.2  # the live line is redrawn this often; events do not wait for it
# Between SIGTERM and SIGKILL for workers whose peer has died. Most wait in a collective and hear nothing, none can save
# without all ranks, and tearing down torch in order would take longer than this for no use.
END_S = 0.5
SETTLE_S = 3.0  # for a culprit that is still unwinding while its peers have already lost it


@dataclass(frozen=True)
class Ended:
    """How a group ended. `failure` is None when it was finished or was told to stop."""

    deaths: tuple[Death, ...]
    stop_signal: int | None = None
    failure: Failure | None = None
    saved: bool = True  # whether every worker that was told to stop could do so in order


def watch(
    workers: Group,
    signals: Signals,
    around: Surroundings,
    grace_s: float,
    stopping: Callable[[int], None],
    tick: Callable[[], None],
    progress: Progress | None = None,
) -> Ended:
    """Returns once no worker is left. `stopping` is called when somebody says stop, before the workers hear of it."""
    deaths: list[Death] = []
    deadline = math.inf
    told = False
    while workers.pids:
        if signals.told_to_stop and not told:
            told = True
            stopping(signals.stops[0])
            workers.tell_to_stop()
            deadline = time.monotonic() + grace_s
        if signals.told_twice:
            workers.kill()
        new = workers.reap()
        deaths += new
        for death in new:
            deadline = min(deadline, time.monotonic() + _patience(death, told, around, grace_s))
        if not workers.pids:
            break
        if time.monotonic() >= deadline:
            finished = not told and all(death.exit_code == DONE for death in deaths)
            if finished and progress and progress.at_work(workers.pids, signals.wait):
                deadline = time.monotonic() + grace_s
                continue
            # Those who were told long ago get no second grace; the others may still flush what they have.
            deaths += workers.end(0.0 if told else END_S, signals.wait)
            break
        if progress and not told and not deaths and (hang := progress.look(time.monotonic())):
            workers.kill()  # in a collective, or stopped: they would not hear anything else
            return Ended(tuple(workers.end(0.0, signals.wait)), None, replace(hang, at=time.time()), saved=False)
        signals.wait(min(TICK_S, deadline - time.monotonic()))
        tick()
    return _ended(tuple(deaths), signals, around, grace_s)


def _patience(death: Death, told: bool, around: Surroundings, grace_s: float) -> float:
    """How long the others may go on after this death."""
    if death.exit_code in (DONE, TOLD_TO_STOP):
        return math.inf if told else grace_s
    if told:
        return END_S  # saving takes every rank, so those left cannot finish it
    return SETTLE_S if classify(death, around.change()).cause in CONSEQUENCES else 0.0


def _ended(deaths: tuple[Death, ...], signals: Signals, around: Surroundings, grace_s: float) -> Ended:
    clean = (DONE, TOLD_TO_STOP)
    stop_signal = signals.stops[0] if signals.stops else None
    alone = [death for death in deaths if death.by_itself]
    # Told to stop, a worker that leaves with an error code (it could not save) has something to say all the same.
    witnesses = alone if stop_signal is None else [d for d in deaths if d.by_itself or d.exit_code is not None]
    change = around.change()
    failure = culprit(classify(death, change) for death in witnesses if death.exit_code not in clean)
    saved = any(death.exit_code == TOLD_TO_STOP for death in witnesses)  # that takes all ranks: one has, so all have
    if saved and (failure is None or failure.cause in CONSEQUENCES):
        # At worst one lost a peer that had left before it. Not told ourselves, a scheduler has signalled the workers.
        failure, stop_signal = None, stop_signal or signal.SIGTERM
    if failure:
        return Ended(deaths, stop_signal, failure, saved=False)
    if all(death.exit_code == DONE for death in deaths):
        return Ended(deaths)
    if stop_signal is not None:
        return Ended(deaths, stop_signal, saved=saved)
    late = next(death for death in deaths if death.told)
    first = next(death for death in alone if death.exit_code == DONE)
    evidence = f"still running {grace_s:g} s after rank {first.rank} had finished"
    return Ended(deaths, None, Failure(late.rank, "hang", evidence, at=late.t))
