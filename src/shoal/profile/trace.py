"""Reads a Chrome trace of torch's profiler: steps, phases, operators nested as they ran, what the GPU did. No torch.

Times are whole nanoseconds. Written for torch 2.11 to 2.13; what a trace lacks (ranges, steps, shapes) is done without.
"""

from __future__ import annotations

import gzip
import io
import re
import zlib
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal.errors import DataError, UsageError
from shoal.plain_file import NotPlain, read_plain
from shoal.profile import trace_fields
from shoal.values import BadValue, read_large

MOST_BYTES = 4 << 30  # of a trace, unpacked
MOST_PARTS = 1 << 27
PREFIX = "shoal:"  # of the ranges that a profile of ours has
GPU = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCHES = ("cuda_runtime", "cuda_driver")
_STEP = re.compile(r"^ProfilerStep#(\d+)$")
_PHASES_OF_OTHERS = (("Optimizer.step#", "optimizer"), ("Optimizer.zero_grad#", "optimizer"))


@dataclass(slots=True, eq=False)
class Event:
    name: str
    cat: str
    begin: int
    end: int
    tid: Any
    args: dict[str, Any]
    parent: Event | None = None  # the host event around this one, on its thread

    @property
    def length(self) -> int:
        return self.end - self.begin

    def around(self) -> Iterator[Event]:
        """Itself, then each event around it, outwards."""
        event: Event | None = self
        while event is not None:
            yield event
            event = event.parent


@dataclass(frozen=True)
class Span:
    begin: int
    end: int
    name: str = ""


@dataclass(frozen=True)
class Trace:
    about: dict[str, Any]  # what a profile of ours says of itself; empty in others' traces
    device: str  # as the driver says it; "cpu" without one
    steps: tuple[Span, ...]  # on the host
    phases: tuple[Span, ...]  # of the main thread, in order
    main: Any  # the thread that has the steps
    threads: dict[Any, list[Event]]  # operators and annotations of each thread, by their begin
    gpu: list[Event]
    launches: dict[int, Event]  # by correlation id
    by_id: dict[int, Event]  # operators by external id
    forward: dict[int, Event]  # by sequence number: the operator that autograd recorded
    phase_begins: list[int] = field(repr=False)

    def phase_at(self, t: int) -> str | None:
        i = bisect_right(self.phase_begins, t) - 1
        return self.phases[i].name if i >= 0 and t < self.phases[i].end else None

    def phases_in(self, begin: int, end: int) -> Iterator[tuple[int, int, str | None]]:
        """Cuts [begin, end) where phases change."""
        i = max(0, bisect_right(self.phase_begins, begin) - 1)
        while begin < end:
            phase = self.phases[i] if i < len(self.phases) else None
            if phase is not None and phase.end <= begin:
                i += 1
                continue
            inside = phase is not None and phase.begin <= begin
            until = end if phase is None else min(end, phase.end if inside else phase.begin)
            yield begin, until, phase.name if phase is not None and inside else None
            begin = until


def read(file: Path) -> Trace:
    content = _content(file)
    events = content.get("traceEvents") if isinstance(content, dict) else None
    if not isinstance(events, list):
        raise DataError(f"{file} is no trace of torch's profiler: it has no traceEvents.")
    try:
        return _trace(content, [e for e in events if isinstance(e, dict) and e.get("ph") == "X" and "dur" in e])
    except BadValue as e:
        raise DataError(f"{file} is no trace of torch's profiler ({e}).") from None
    except (KeyError, TypeError, ValueError) as e:
        raise DataError(f"{file} is no trace of torch's profiler ({type(e).__name__}).") from e


def _content(file: Path) -> Any:
    try:
        raw = read_plain(file, MOST_BYTES)
        return read_large(_unpacked(raw) if raw[:2] == b"\x1f\x8b" else raw, MOST_PARTS, none_for_nan=True)
    except FileNotFoundError:
        raise UsageError(f"{file} does not exist; --trace takes the trace of an earlier profile.") from None
    except NotPlain as e:
        if file.is_dir():
            raise UsageError(
                f"{file} is a folder; --trace takes one trace in it, such as rank-00000.json.gz."
            ) from None
        raise DataError(f"{e}; profile again.") from None
    except (BadValue, EOFError, zlib.error, gzip.BadGzipFile) as e:
        raise DataError(f"{file} is cut off or no trace ({e}); profile again.") from None


def _unpacked(data: bytes) -> bytes:
    parts, left = list[bytes](), MOST_BYTES
    with gzip.GzipFile(fileobj=io.BytesIO(data)) as file:
        while part := file.read(1 << 20):  # all at once would take memory for the most that there may be
            parts.append(part)
            left -= len(part)
            if left < 0:
                raise BadValue(f"it has more than {MOST_BYTES:,} bytes unpacked")
    return b"".join(parts)


def _trace(content: dict[str, Any], raw: Sequence[dict[str, Any]]) -> Trace:
    host: dict[Any, list[Event]] = defaultdict(list)
    gpu: list[Event] = []
    launches: dict[int, Event] = {}
    for e in raw:
        cat = str(e.get("cat", ""))
        if cat not in (*GPU, *LAUNCHES, "cpu_op", "user_annotation"):
            continue
        begin = trace_fields.nanoseconds(e["ts"])
        end = begin + max(0, trace_fields.nanoseconds(e["dur"]))
        event = Event(str(e["name"]), cat, begin, end, _named(e.get("tid")), trace_fields.args(e.get("args")))
        if cat in GPU:
            gpu.append(event)
        elif cat in LAUNCHES:
            launches[event.args.get("correlation", 0)] = event
        if cat not in GPU:
            host[_named(e.get("pid")), event.tid].append(event)
    for thread in host.values():
        _nest(thread)
    steps, main = _steps(host)
    phases = tuple(_phases(host.get(main, ())))
    gpu = sorted(_one_device(gpu), key=lambda e: e.begin)
    operators = [e for thread in host.values() for e in thread if e.cat == "cpu_op"]
    return Trace(
        about=trace_fields.about(content.get("shoal")),
        device=_device(content, bool(gpu)),
        steps=steps or (_whole(gpu, host),),
        phases=phases,
        main=main,
        threads=dict(host),
        gpu=gpu,
        launches=launches,
        by_id={e.args["External id"]: e for e in operators if "External id" in e.args},
        forward=_recorded(operators),
        phase_begins=[p.begin for p in phases],
    )


def _named(thread: Any) -> Any:
    """A number or a name; of something else, what it looks like."""
    return thread if isinstance(thread, int | float | str | None) else repr(thread)[:80]


def _nest(thread: list[Event]) -> None:
    """Sorts events of one thread and tells each which one is around it."""
    thread.sort(key=lambda e: (e.begin, -e.end))
    open_: list[Event] = []
    for event in thread:
        while open_ and open_[-1].end <= event.begin:
            open_.pop()
        # Rounding can let a child end a nanosecond after its parent; one that ends much later is no child.
        while open_ and event.end > open_[-1].end + 1000:
            open_.pop()
        event.parent = open_[-1] if open_ else None
        open_.append(event)


def _steps(host: dict[Any, list[Event]]) -> tuple[tuple[Span, ...], Any]:
    for thread, events in host.items():
        found = [Span(e.begin, e.end, e.name) for e in events if _STEP.match(e.name)]
        if found:
            return tuple(found), thread
    return (), max(host, key=lambda thread: len(host[thread]), default=None)


def _phases(main: Iterable[Event]) -> Iterator[Span]:
    ours, others = [], []
    for e in main:
        if e.name.startswith(PREFIX):
            ours.append(Span(e.begin, e.end, e.name.removeprefix(PREFIX)))
        else:
            others += [Span(e.begin, e.end, phase) for start, phase in _PHASES_OF_OTHERS if e.name.startswith(start)]
    yield from ours or others


def _one_device(gpu: list[Event]) -> list[Event]:
    """A process computes on one GPU; what others show in its trace (peers' copies) is not its time."""
    busy: dict[Any, int] = defaultdict(int)
    for e in gpu:
        busy[e.args.get("device")] += e.length
    most = max(busy, key=lambda device: busy[device], default=None)
    return [e for e in gpu if e.args.get("device") == most]


def _device(content: dict[str, Any], gpu: bool) -> str:
    if not gpu:
        return "cpu"
    if device := trace_fields.about(content.get("shoal")).get("device"):
        return str(device)
    properties = content.get("deviceProperties")
    first = properties[0] if isinstance(properties, list) and properties else None
    return str(first.get("name", "GPU"))[:200] if isinstance(first, dict) else "GPU"


def _whole(gpu: list[Event], host: dict[Any, list[Event]]) -> Span:
    events = gpu or [e for thread in host.values() for e in thread]
    if not events:
        raise DataError("the trace is empty: nothing ran while it was taken; profile again.")
    return Span(min(e.begin for e in events), max(e.end for e in events), "all")


def _recorded(operators: Iterable[Event]) -> dict[int, Event]:
    """Of each sequence number, the operator that recorded it. Operators around it show the same number, and so do views
    before it: as in torch's own arrows, the last one to begin is meant."""
    found: dict[int, Event] = {}
    for e in operators:
        number = e.args.get("Sequence number")
        if number is None or e.args.get("Fwd thread id"):
            continue
        if number not in found or found[number].begin <= e.begin:
            found[number] = e
    return found
