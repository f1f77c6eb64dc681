"""What a process is doing, written where another can read it while this one hangs. Never imports torch.

One small file a rank, in memory (tmpfs) and mapped, so that a mark costs a microsecond or two and cannot block. It has
two parts. The head is written by the training itself: the phase, the step, how many marks it has made, the time spent
in each phase and the longest stay in it (shoal.observe.beat). The sample is written once a second by a thread: the
Python stacks, how many collectives each group has begun, how far the device is; it is there also when the process has
been stopped. Beside it lies what `faulthandler` writes on SIGUSR1, which works even when a thread holds the interpreter
for ever.

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
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from shoal.observe.beat import PHASES, Beat, Marks
from shoal.observe.excuses import Frame, excuse

FOLDER = "SHOAL_PULSE"  # the environment variable that names the folder; without it nothing is written
SAMPLE_S = 1.0
MOST_FRAMES = 48

# number, pid, step, steps taken, marks, phase, since, slowest step, spent in each phase, longest stay in each, number
_HEAD = struct.Struct(f"<QQqQQQdd{2 * len(PHASES)}dQ")
_SAMPLE = struct.Struct("<QdQ")  # number, time, bytes; then the text, then the number
_SAMPLE_AT = 512
SIZE = 16 * 1024
_MOST_TEXT = SIZE - _SAMPLE_AT - _SAMPLE.size - 8
Groups = Mapping[str, int]  # name of a group of processes → collectives begun in it


@dataclass(frozen=True)
class Device:
    """What is known of a GPU's work."""

    ticks: int  # how often it has worked off what was queued before
    queued: bool  # whether it has work that was queued a while ago and is not done


@dataclass(frozen=True)
class Sample:
    """What the thread saw last."""

    t: float  # monotonic
    stack: tuple[str, ...] = ()  # of the main thread, innermost first
    reader: tuple[str, ...] = ()  # of the thread that reads the data
    excuse: str | None = None
    groups: Groups = field(default_factory=dict)
    device: Device | None = None  # None: the CPU computes


class Pulse:
    """One process's. `begin` it as early as possible; without a folder it does nothing."""

    def __init__(self, folder: Path | None, rank: int) -> None:
        self._number, self._pid = 0, os.getpid()
        self._marks = Marks(time.monotonic())
        self._look: Callable[[], Groups] | None = None
        self._device: Callable[[], Device] | None = None
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
        self._marks.mark(phase, step, time.monotonic())
        self._write()

    def watch_groups(self, look: Callable[[], Groups]) -> None:
        """`look` tells how many collectives each group of processes has begun; asked once a second, by the thread."""
        self._look = look

    def watch_device(self, look: Callable[[], Device] | None) -> None:
        """`look` tells how far the device is; asked once a second, by the thread."""
        self._device = look

    def _write(self) -> None:
        assert self._map is not None
        self._number += 1
        number, m = self._number, self._marks
        told = (m.step, m.steps, m.marks, m.phase, m.since, m.slowest_s, *m.spent_s, *m.longest_s)
        _HEAD.pack_into(self._map, 0, number, self._pid, *told, number)

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
        stacks = {ident: _frames(frame) for ident, frame in sys._current_frames().items()}
        names = {t.ident: t.name for t in threading.enumerate()}
        main = stacks.pop(threading.main_thread().ident or 0, [])
        reader = next((stacks.pop(ident) for ident in list(stacks) if names.get(ident) == "shoal-feed"), [])
        phase = PHASES[self._marks.phase]
        found: dict[str, Any] = {"stack": _words(main), "excuse": excuse(phase, main, reader, stacks.values())}
        if phase == "data":
            found["reader"] = _words(reader)
        for name, look in (("groups", self._look), ("device", self._device)):
            if look is not None:
                try:
                    found[name] = _plain(look())
                except Exception:  # groups come and go while this thread looks; the next second is soon enough
                    found[name] = None
        return found


SILENT = Pulse(None, 0)  # for those who take steps without a run


class PulseFolder:
    """The pulses of a group, as who watches it reads them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def beat(self, rank: int) -> Beat | None:
        return read_beat(self._folder, rank)

    def sample(self, rank: int) -> Sample | None:
        return read_sample(self._folder, rank)


def pulse_file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05d}.pulse"


def dump_file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05d}.stacks"


def read_beat(folder: Path, rank: int) -> Beat | None:
    """None when the process has not begun one, or stands still in the midst of writing: what was read before holds."""
    data = _bytes(pulse_file(folder, rank), 0, _HEAD.size)
    if len(data) < _HEAD.size:
        return None
    number, pid, step, steps, marks, phase, since, slowest_s, *by_phase, again = _HEAD.unpack(data)
    if number != again or not number or phase >= len(PHASES):
        return None
    spent, longest = (dict(zip(PHASES, by_phase[i:], strict=False)) for i in (0, len(PHASES)))
    return Beat(pid, step, steps, marks, PHASES[phase], since, slowest_s, spent, longest)


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
        device = Device(int(d["ticks"]), bool(d["queued"])) if (d := found.get("device")) else None
        return Sample(t, **lists, excuse=found.get("excuse"), groups=dict(found.get("groups") or {}), device=device)
    except (ValueError, AttributeError, TypeError, KeyError):
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


def _plain(told: Groups | Device) -> dict[str, Any]:
    return asdict(told) if isinstance(told, Device) else dict(told)


def _frames(frame: FrameType | None) -> list[Frame]:
    """(file, line, function), innermost first."""
    found = []
    while frame is not None:
        found.append((frame.f_code.co_filename, frame.f_lineno or 0, frame.f_code.co_name))
        frame = frame.f_back
    return found


def _words(frames: Iterable[Frame]) -> list[str]:
    return [f"{short(file)}:{line} {name}" for file, line, name in list(frames)[:MOST_FRAMES]]


def short(file: str) -> str:
    """From the package on: site-packages/torch/… is torch/…"""
    for mark in ("/site-packages/", "/src/", "/lib/python"):
        if mark in file:
            return file.rsplit(mark, 1)[1]
    return file
