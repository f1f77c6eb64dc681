"""What a process is doing, written where another can read it while this one hangs. Never imports torch.

One small file a rank, in memory (tmpfs) and mapped, so that a mark costs a microsecond or two and cannot block. It has
two parts. The head is written by the training itself: the phase, the step, how many marks it has made, the time spent
in each phase. The sample is written once a second by a thread: the Python stacks, and how many collectives each group
has begun; it is there also when the process has been stopped. Beside it lies what `faulthandler` writes on SIGUSR1,
which works even when a thread holds the interpreter for ever.

Both parts carry their number in front and behind: a reader that sees two different ones has met the writer at work, and
asks again. All ranks mark the same phases in the same order, so their counts of marks compare.
"""

from __future__ import annotations

import faulthandler
import json
import mmap
import os
import signal
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

FOLDER = "SHOAL_PULSE"  # the environment variable that names the folder; without it nothing is written
PHASES = (
    "start",  # imports
    "join",  # rendezvous
    "load",  # data, model, checkpoint
    "data",
    "exchange",  # the numbers that all ranks agree on before a step
    "forward",
    "backward",  # with the collectives of the gradients
    "compute",  # both, where a pipeline mixes them
    "clip",  # the sums over all ranks after it: loss, gradient norm
    "trade",  # with other islands, and waiting for them
    "optimizer",
    "record",  # the journal, and what else is between two steps
    "evaluate",
    "save",
    "finish",
)
OUTSIDE_STEPS = ("trade", "record", "evaluate", "save")  # take as long as they take; the others are what a step is
SAMPLE_S = 1.0
DECAY = 0.95  # of the slowest step, with each step: after 20 a third is left
LAZY_STEPS = 2  # of an attempt; they set things up and say nothing about the others
MOST_FRAMES = 48

_NUMBER = {name: i for i, name in enumerate(PHASES)}
# number, pid, step, steps taken, marks, phase, since, slowest step, spent in each phase, number
_HEAD = struct.Struct(f"<QQqQQQdd{len(PHASES)}dQ")
_SAMPLE = struct.Struct("<QdQ")  # number, time, bytes; then the text, then the number
_SAMPLE_AT = 512
SIZE = 16 * 1024
_MOST_TEXT = SIZE - _SAMPLE_AT - _SAMPLE.size - 8
# A frame in one of these files says what takes so long, and that it may.
EXCUSES = {
    "torch/_dynamo/convert_frame.py": "compile",
    "torch/_inductor/compile_fx.py": "compile",
    "shoal/data/remote.py": "download",
}

Groups = Mapping[str, int]  # name of a group of processes → collectives begun in it


@dataclass(frozen=True)
class Beat:
    """The head of a pulse, as read."""

    pid: int
    step: int  # counted from 0: the one under way, or the last
    steps: int  # begun in this attempt
    marks: int
    phase: str
    since: float  # monotonic, of this machine
    slowest_s: float  # recent step, without what is between steps
    spent_s: Mapping[str, float]  # in each phase since the start, the present one excluded


@dataclass(frozen=True)
class Sample:
    """What the thread saw last."""

    t: float  # monotonic
    stack: tuple[str, ...] = ()  # of the main thread, innermost first
    reader: tuple[str, ...] = ()  # of the thread that reads the data
    excuse: str | None = None
    groups: Groups = field(default_factory=dict)


class Pulse:
    """One process's. `begin` it as early as possible; without a folder it does nothing."""

    def __init__(self, folder: Path | None, rank: int) -> None:
        self._number = self._marks = self._steps = 0
        self._step, self._pid = -1, os.getpid()
        self._phase = 0
        self._slowest_s = self._this_step_s = 0.0
        self._spent = [0.0] * len(PHASES)
        self._since = time.monotonic()
        self._look: Callable[[], Groups] | None = None
        self._map: mmap.mmap | None = None
        if folder is None:
            return
        try:
            self._dump = open(dump_file(folder, rank), "w")  # noqa: SIM115  # faulthandler writes to it at any time
            with open(pulse_file(folder, rank), "w+b") as file:
                file.truncate(SIZE)
                self._map = mmap.mmap(file.fileno(), SIZE)
        except OSError as e:  # a full memory; the run matters more than its watch
            print(f"shoal: nobody can see whether this rank hangs: {e}", file=sys.stderr)
            return
        faulthandler.register(signal.SIGUSR1, self._dump, all_threads=True)
        self._write()  # from here on others may send that signal
        threading.Thread(target=self._sampling, name="shoal-pulse", daemon=True).start()

    @classmethod
    def begin(cls) -> Pulse:
        folder = os.environ.get(FOLDER)
        return cls(Path(folder) if folder else None, int(os.environ.get("RANK", "0")))

    def mark(self, phase: str, step: int | None = None) -> None:
        """From now on it is doing that. `step`: a step begins."""
        if self._map is None:
            return
        now = time.monotonic()
        spent_s = now - self._since
        self._spent[self._phase] += spent_s
        if PHASES[self._phase] not in OUTSIDE_STEPS:
            self._this_step_s += spent_s
        if step is not None:
            if self._steps > LAZY_STEPS:
                self._slowest_s = max(self._this_step_s, self._slowest_s * DECAY)
            self._step, self._steps, self._this_step_s = step, self._steps + 1, 0.0
        self._phase, self._since = _NUMBER[phase], now
        self._marks += 1
        self._write()

    def watch_groups(self, look: Callable[[], Groups]) -> None:
        """`look` tells how many collectives each group of processes has begun; asked once a second, by the thread."""
        self._look = look

    def _write(self) -> None:
        assert self._map is not None
        self._number += 1
        _HEAD.pack_into(
            self._map,
            0,
            self._number,
            self._pid,
            self._step,
            self._steps,
            self._marks,
            self._phase,
            self._since,
            self._slowest_s,
            *self._spent,
            self._number,
        )

    def _sampling(self) -> None:
        number = 0
        while True:
            number += 1
            self._write_sample(number)
            time.sleep(SAMPLE_S)

    def _write_sample(self, number: int) -> None:
        assert self._map is not None
        text = json.dumps(self._sample()).encode()
        if len(text) > _MOST_TEXT:
            text = b"{}"
        t = time.monotonic()
        _SAMPLE.pack_into(self._map, _SAMPLE_AT, number, t, len(text))
        end = _SAMPLE_AT + _SAMPLE.size + len(text)
        self._map[end - len(text) : end + 8] = text + struct.pack("<Q", number)

    def _sample(self) -> dict[str, Any]:
        frames = sys._current_frames()
        names = {t.ident: t.name for t in threading.enumerate()}
        main = _frames(frames.get(threading.main_thread().ident or 0))
        reader = _frames(next((f for ident, f in frames.items() if names.get(ident) == "shoal-feed"), None))
        phase = PHASES[self._phase]
        found: dict[str, Any] = {"stack": _words(main), "excuse": _excuse(main)}
        if phase == "data":
            found |= {"reader": _words(reader), "excuse": found["excuse"] or _excuse(reader)}
        if self._look is not None:
            try:
                found["groups"] = dict(self._look())
            except Exception:  # groups come and go while this thread looks; the next second is soon enough
                found["groups"] = {}
        return found


SILENT = Pulse(None, 0)  # for those who take steps without a run


def pulse_file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05d}.pulse"


def dump_file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05d}.stacks"


def read_beat(folder: Path, rank: int) -> Beat | None:
    """None when the process has not begun one, or stands still in the midst of writing: what was read before holds."""
    data = _bytes(pulse_file(folder, rank), 0, _HEAD.size)
    if len(data) < _HEAD.size:
        return None
    number, pid, step, steps, marks, phase, since, slowest_s, *spent, again = _HEAD.unpack(data)
    if number != again or not number or phase >= len(PHASES):
        return None
    return Beat(pid, step, steps, marks, PHASES[phase], since, slowest_s, dict(zip(PHASES, spent, strict=True)))


def read_sample(folder: Path, rank: int) -> Sample | None:
    data = _bytes(pulse_file(folder, rank), _SAMPLE_AT, SIZE - _SAMPLE_AT)
    if len(data) < _SAMPLE.size:
        return None
    number, t, size = _SAMPLE.unpack_from(data)
    end = _SAMPLE.size + size
    if not number or size > _MOST_TEXT or data[end : end + 8] != struct.pack("<Q", number):
        return None
    try:
        found = json.loads(data[_SAMPLE.size : end])
        lists = {name: tuple(map(str, found.get(name) or ())) for name in ("stack", "reader")}
        return Sample(t, **lists, excuse=found.get("excuse"), groups=dict(found.get("groups") or {}))
    except (ValueError, AttributeError, TypeError):
        return None


def news(data: bytes, before: tuple[int, int]) -> tuple[bytes, tuple[int, int]]:
    """What another machine has to be told of a pulse: its head where that has changed, else its sample where that has,
    each without the empty rest. `before` is what this gave for the one that was told last, (0, 0) at first."""
    if len(data) < SIZE:
        return b"", before
    (head,) = struct.unpack_from("<Q", data)
    number, _, size = _SAMPLE.unpack_from(data, _SAMPLE_AT)
    if head != before[0]:
        return data[: _HEAD.size], (head, before[1])
    if number != before[1]:
        return data[: _SAMPLE_AT + _SAMPLE.size + size + 8], (head, number)
    return b"", before


def moved(data: bytes, later_s: float) -> bytes:
    """A pulse of another machine with its times on this one's clock."""
    whole = bytearray(data)
    head = list(_HEAD.unpack_from(whole))
    head[6] += later_s
    _HEAD.pack_into(whole, 0, *head)
    if len(whole) > _SAMPLE_AT:
        number, t, size = _SAMPLE.unpack_from(whole, _SAMPLE_AT)
        _SAMPLE.pack_into(whole, _SAMPLE_AT, number, t + later_s, size)
    return bytes(whole)


def _bytes(path: Path, at: int, size: int) -> bytes:
    try:
        with open(path, "rb", buffering=0) as file:
            return os.pread(file.fileno(), size, at)
    except OSError:
        return b""


def _frames(frame: FrameType | None) -> list[tuple[str, int, str]]:
    """(file, line, function), innermost first."""
    found = []
    while frame is not None:
        found.append((frame.f_code.co_filename, frame.f_lineno or 0, frame.f_code.co_name))
        frame = frame.f_back
    return found


def _words(frames: Iterable[tuple[str, int, str]]) -> list[str]:
    return [f"{short(file)}:{line} {name}" for file, line, name in list(frames)[:MOST_FRAMES]]


def short(file: str) -> str:
    """From the package on: site-packages/torch/… is torch/…"""
    for mark in ("/site-packages/", "/src/", "/lib/python"):
        if mark in file:
            return file.rsplit(mark, 1)[1]
    return file


def _excuse(frames: Iterable[tuple[str, int, str]]) -> str | None:
    for file, _, _ in frames:
        for ending, excuse in EXCUSES.items():
            if file.endswith(ending):
                return excuse
    return None
