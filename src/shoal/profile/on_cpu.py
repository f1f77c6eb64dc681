"""The timeline of a processor: the innermost operator of the main thread, at each instant of a step.

Where the main thread is in no operator, but other threads send, that is exposed communication (it waits for them);
where others compute, theirs counts; else it is Python. Threads inside an operator (OpenMP) are that operator's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shoal.profile.classify import classify
from shoal.profile.intervals import sweep
from shoal.profile.kinds import COMMUNICATION, DATA, IDLE, UNACCOUNTED, is_around, kind_of_name
from shoal.profile.tally import Call, Tally
from shoal.profile.trace import Event, Trace

HOST = "Python and autograd"


@dataclass(frozen=True)
class Piece:
    """A stretch in which `event` was the innermost of its thread; None: the thread was in none."""

    begin: int
    end: int
    event: Event | None


def timeline(trace: Trace, steps: int | None) -> Tally:
    count = min(steps or len(trace.steps), len(trace.steps))
    begin = trace.steps[0].begin
    end = trace.steps[count].begin if count < len(trace.steps) else trace.steps[count - 1].end
    tally = Tally(begin, end, count)
    kinds: dict[Event, str] = {}
    alone: dict[Event, float] = {}
    beside = [e for thread, events in trace.threads.items() if thread != trace.main for e in _outermost(events)]
    main = list(_pieces(trace.threads.get(trace.main, []), begin, end))
    everybody: list[Piece | Event] = [*main, *beside]
    for since, until, active in sweep(everybody, begin, end):
        mine = next((p.event for p in active if isinstance(p, Piece)), None)
        others = [e for e in active if isinstance(e, Event)]
        _spend(tally, trace, since, until, mine, others, kinds, alone)
    tally.calls += [
        Call(event.name, kinds[event], ns, event) for event, ns in alone.items() if kinds[event] != COMMUNICATION
    ]
    return tally


def _spend(
    tally: Tally,
    trace: Trace,
    since: int,
    until: int,
    mine: Event | None,
    others: Sequence[Event],
    kinds: dict[Event, str],
    alone: dict[Event, float],
) -> None:
    length, phase = until - since, trace.phase_at(since)
    sends = [e for e in others if kind_of_name(e.name) == COMMUNICATION]
    if mine is None or _is_host(mine):
        computes = [e for e in others if e not in sends]
        if computes:
            for event in computes:
                _work(tally, trace, event, phase, length / len(computes), kinds, alone)
        elif sends:
            tally.spend(COMMUNICATION, phase, length, sends[0].name)
        elif phase == "data":
            tally.spend(DATA, phase, length, "waiting for the batch")
        elif phase is None and trace.phases:
            tally.spend(UNACCOUNTED, phase, length, "between phases")
        else:
            tally.spend(IDLE, phase, length, "gap")
            tally.idle[f"{HOST} in {phase or 'no phase'}"] += length
        if computes and sends:
            tally.hide(COMMUNICATION, length)
        return
    _work(tally, trace, mine, phase, length, kinds, alone)
    if sends and kinds[mine] != COMMUNICATION:
        tally.hide(COMMUNICATION, length)


def _work(
    tally: Tally,
    trace: Trace,
    event: Event,
    phase: str | None,
    ns: float,
    kinds: dict[Event, str],
    alone: dict[Event, float],
) -> None:
    if event not in kinds:
        kinds[event] = classify(trace, [event.name], event, phase)
    alone[event] = alone.get(event, 0.0) + ns
    tally.spend(kinds[event], phase, ns, event.name)


def _pieces(events: Sequence[Event], begin: int, end: int) -> Iterator[Piece]:
    """The thread's time cut where its innermost event changes. `events` are nested and by their begin."""
    at, open_ = begin, list[Event]()

    def up_to(t: int) -> Iterator[Piece]:
        nonlocal at
        t = min(max(t, begin), end)
        if t > at:
            yield Piece(at, t, open_[-1] if open_ else None)
            at = t

    for event in events:
        while open_ and open_[-1].end <= event.begin:
            yield from up_to(open_[-1].end)
            open_.pop()
        yield from up_to(event.begin)
        open_.append(event)
    while open_:
        yield from up_to(open_[-1].end)
        open_.pop()
    yield from up_to(end)


def _is_host(event: Event) -> bool:
    named_by_somebody = event.cat == "user_annotation" and kind_of_name(event.name) != COMMUNICATION
    return named_by_somebody or is_around(event.name)


def _outermost(events: Sequence[Event]) -> Iterator[Event]:
    return (event for event in events if event.parent is None)
