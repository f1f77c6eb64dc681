"""The timeline of a GPU: each instant of a step is somebody's, over all streams.

Something computes, else something is sent, else something is copied, else it is a gap. Where several kernels compute at
once they share the time. What is sent or copied while something computes costs nothing that can be seen: it is hidden.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shoal.profile.classify import classify
from shoal.profile.intervals import sweep
from shoal.profile.kinds import COMMUNICATION, COPY, DATA, IDLE
from shoal.profile.tally import Call, Tally
from shoal.profile.trace import LAUNCHES, Event, Trace

BETWEEN = "between two kernels"  # the next one had been launched already: the device's own pause
_WAITS = ("Synchronize", "cudaMemcpy", "cuMemcpy")  # of the runtime's calls; those that are asynchronous are named so
_READS = ("aten::item", "aten::_local_scalar_dense", "aten::nonzero", "aten::to", "aten::copy_")


@dataclass(frozen=True)
class Busy:
    """One piece of work of the GPU, and where it came from."""

    event: Event
    kind: str
    phase: str | None
    launched: int  # when the host had handed it over
    operator: Event | None

    @property
    def begin(self) -> int:
        return self.event.begin

    @property
    def end(self) -> int:
        return self.event.end


def timeline(trace: Trace, steps: int | None) -> Tally:
    """`steps`: how many of the trace's count; the one after them ends the last."""
    work = [_busy(trace, event) for event in trace.gpu]
    count = min(steps or len(trace.steps), len(trace.steps))
    begin, end = _window(trace, work, count)
    tally = Tally(begin, end, count)
    late = _Late(work)
    for since, until, active in sweep(work, begin, end):
        _spend(tally, trace, late, since, until, active)
    inside = [busy for busy in work if begin <= busy.begin < end]
    leads = _leading(inside)
    tally.calls += [
        Call(b.event.name, b.kind, b.event.length, b.operator, leads=b.event in leads)
        for b in inside
        if b.kind not in (COMMUNICATION, COPY, DATA)
    ]
    for call in _calls_that_wait(trace, count):
        reads = next((e.name for e in call.around() if e.name in _READS), None)
        tally.waits[f"{reads or call.name} in {trace.phase_at(call.begin) or 'no phase'}"] += 1
    return tally


def _busy(trace: Trace, event: Event) -> Busy:
    launch = trace.launches.get(int(event.args.get("correlation", -1)))
    operator = trace.by_id.get(int(event.args.get("External id", -1)))
    if operator is None and launch is not None:
        operator = next((e for e in launch.around() if e.cat == "cpu_op"), None)
    launched = launch.begin if launch else event.begin
    phase = trace.phase_at(launched)
    if launch is not None and "GraphLaunch" in launch.name:
        operator = None  # the one around the launch of a graph is not the one that a kernel in it belongs to
    names = [event.name, *([operator.name] if operator else [])]
    kind = classify(trace, names, operator, phase)
    if kind == COPY and "htod" in event.name.lower() and phase in ("data", "exchange", "forward", "compute"):
        kind = DATA  # the batch on its way
    return Busy(event, kind, phase, launched, operator)


def _window(trace: Trace, work: Sequence[Busy], count: int) -> tuple[int, int]:
    """From the first work that step 0 launched to the first that the step after the last one did.

    On the busiest stream alone: where the host is ahead, a batch may be copied beside the step before its own."""
    begins = [step.begin for step in trace.steps]
    first: dict[int, int] = {}
    stream = _busiest(trace.gpu)
    for busy in (b for b in work if _stream(b.event) == stream):
        step = bisect_right(begins, busy.launched) - 1
        if step >= 0:
            first[step] = min(first.get(step, busy.begin), busy.begin)
    last = max((b.end for b in work), default=trace.steps[-1].end)
    begin = first.get(0, trace.steps[0].begin)
    return begin, max(first.get(count, last), begin + 1)


def _stream(event: Event) -> object:
    return event.args.get("stream", event.tid)


def _busiest(events: Sequence[Event]) -> object:
    spent: dict[object, int] = {}
    for event in events:
        spent[_stream(event)] = spent.get(_stream(event), 0) + event.length
    return max(spent, key=lambda stream: spent[stream], default=None)


class _Late:
    """Which work comes next after an instant."""

    def __init__(self, work: Sequence[Busy]) -> None:
        self._work = sorted(work, key=lambda busy: busy.begin)
        self._begins = [busy.begin for busy in self._work]

    def next(self, t: int) -> Busy | None:
        i = bisect_right(self._begins, t - 1)
        return self._work[i] if i < len(self._work) else None


def _spend(tally: Tally, trace: Trace, late: _Late, since: int, until: int, active: Sequence[Busy]) -> None:
    length = until - since
    computes = [b for b in active if b.kind not in (COMMUNICATION, COPY, DATA)]
    sends = [b for b in active if b.kind == COMMUNICATION]
    copies = [b for b in active if b.kind in (COPY, DATA)]
    shown = computes or sends or copies
    for busy in shown:
        tally.spend(busy.kind, busy.phase, length / len(shown), busy.event.name)
    for waiting in (sends, copies):
        if waiting and waiting is not shown:
            tally.hide(waiting[0].kind, length)
    if not active:
        _gap(tally, trace, late, since, until)


def _gap(tally: Tally, trace: Trace, late: _Late, since: int, until: int) -> None:
    """The host was late until it launched what came next; what is left of the gap is the device's own."""
    following = late.next(until)
    launched = min(max(following.launched, since), until) if following else until
    for begin, end, phase in trace.phases_in(since, launched):
        if phase == "data":
            tally.spend(DATA, phase, end - begin, "waiting for the batch")
        else:
            tally.spend(IDLE, phase, end - begin, "gap")
            tally.idle[f"waiting for the host in {phase or 'no phase'}"] += end - begin
    if until > launched:
        phase = following.phase if following else None
        tally.spend(IDLE, phase, until - launched, "gap")
        tally.idle[BETWEEN] += until - launched


def _leading(work: Sequence[Busy]) -> set[Event]:
    """Of each operator's kernels the longest."""
    longest: dict[int, Busy] = {}
    alone: set[Event] = set()
    for busy in work:
        if busy.operator is None:
            alone.add(busy.event)
        elif id(busy.operator) not in longest or longest[id(busy.operator)].event.length < busy.event.length:
            longest[id(busy.operator)] = busy
    return alone | {busy.event for busy in longest.values()}


def _calls_that_wait(trace: Trace, count: int) -> Iterator[Event]:
    begin = trace.steps[0].begin
    end = trace.steps[count].begin if count < len(trace.steps) else trace.steps[-1].end
    for event in (e for thread in trace.threads.values() for e in thread if e.cat in LAUNCHES):
        waits = any(word in event.name for word in _WAITS) and "Async" not in event.name
        if waits and begin <= event.begin < end:
            yield event
