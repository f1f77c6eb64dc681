"""The file in which a process says what it is doing (shoal.journal.pulse writes it), and how others read it.

Never imports torch. The head and the sample carry their number in front and behind: a reader that sees two different
ones has met the writer at work, and asks again. Readers look a few times a second at up to thousands of ranks, most of
which say what they said before: what has not changed is not decoded again.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from shoal import values
from shoal.journal.beat import PHASES, Beat, ByPhase, Marks
from shoal.plain_file import open_plain

# number, pid, step, steps taken, marks, phase, since, slowest step, time of the device, spent in each phase, longest
# stay in each, number
HEAD = struct.Struct(f"<QQqQQQddd{2 * len(PHASES)}dQ")
# number, time, bytes of the facts, bytes of the stacks, ticks of the device (-1: there is none), whether it has work
# queued; then the facts, the stacks and the number again
SAMPLE = struct.Struct("<QdQQqQ")
SAMPLE_AT = 512
SIZE = 16 * 1024
MOST_TEXT = SIZE - SAMPLE_AT - SAMPLE.size - 8
Frames = tuple[str, ...]
Groups = Mapping[str, int]  # name of a group of processes → collectives begun in it

_NUMBER = struct.Struct("<Q")
_BY_PHASE = 9  # numbers before those of each phase
_LONGEST = _BY_PHASE + len(PHASES)


class Device(NamedTuple):
    """What is known of a GPU's work."""

    ticks: int  # how often it has worked off what was queued before
    queued: bool  # whether it has work that was queued a while ago and is not done


class Sample:
    """What the thread saw last. Of what was read only the numbers are decoded at once: of most ranks nobody asks where
    they are before they have something newer to say."""

    __slots__ = ("_facts", "_stacks", "device", "t")

    def __init__(
        self,
        t: float,
        stack: Frames = (),
        reader: Frames = (),
        excuse: str | None = None,
        groups: Groups = MappingProxyType({}),
        device: Device | None = None,
    ) -> None:
        self.t = t  # monotonic
        self.device = device  # None: the CPU computes
        self._facts: bytes | tuple[str | None, Groups] = (excuse, groups)
        self._stacks: bytes | tuple[Frames, Frames] = (stack, reader)

    @staticmethod
    def read(t: float, facts: bytes, stacks: bytes, device: Device | None) -> Sample:
        sample = Sample.__new__(Sample)
        sample.t, sample.device, sample._facts, sample._stacks = t, device, facts, stacks
        return sample

    @property
    def stack(self) -> Frames:
        """Of the main thread, innermost first."""
        return self._of_stacks()[0]

    @property
    def reader(self) -> Frames:
        """Of the thread that reads the data."""
        return self._of_stacks()[1]

    @property
    def excuse(self) -> str | None:
        return self._of_facts()[0]

    @property
    def groups(self) -> Groups:
        return self._of_facts()[1]

    def _of_facts(self) -> tuple[str | None, Groups]:
        if isinstance(self._facts, bytes):
            self._facts = _facts(self._facts)
        return self._facts

    def _of_stacks(self) -> tuple[Frames, Frames]:
        if isinstance(self._stacks, bytes):
            self._stacks = _stacks(self._stacks)
        return self._stacks


def pulse_file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05d}.pulse"


def dump_file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05d}.stacks"


def ask_file(folder: Path, rank: int) -> Path:
    """A pipe: a byte in it asks the rank for NCCL's flight record (shoal.guard.flights)."""
    return folder / f"rank-{rank:05d}.ask"


def flight_file(folder: Path, rank: int) -> Path:
    """Its answer."""
    return folder / f"rank-{rank:05d}.flight"


def packed_head(number: int, pid: int, m: Marks) -> bytes:
    told = (m.step, m.steps, m.marks, m.phase, m.since, m.slowest_s, m.device_s, *m.spent_s, *m.longest_s)
    return HEAD.pack(number, pid, *told, number)


def packed_sample(number: int, sample: Sample) -> bytes:
    facts = json.dumps({"excuse": sample.excuse, "groups": dict(sample.groups)}).encode()
    stacks = json.dumps([sample.stack, sample.reader]).encode()
    if len(facts) + len(stacks) > MOST_TEXT:
        facts, stacks = facts if len(facts) < MOST_TEXT - 2 else b"{}", b"[]"
    ticks, queued = (-1, False) if sample.device is None else (sample.device.ticks, sample.device.queued)
    head = SAMPLE.pack(number, sample.t, len(facts), len(stacks), ticks, queued)
    return head + facts + stacks + _NUMBER.pack(number)


def beat_of(data: bytes, later_s: float = 0.0) -> Beat | None:
    """None when the process has not begun one, or stands still in the midst of writing: what was read before holds.
    `later_s`: this machine's clock is so much later than that of the one who wrote it."""
    if len(data) < HEAD.size:
        return None
    told = HEAD.unpack_from(data)
    number, pid, step, steps, marks, phase, since, slowest_s, device_s = told[:_BY_PHASE]
    if number != told[-1] or not number or phase >= len(PHASES):
        return None
    spent, longest = ByPhase(told[_BY_PHASE:_LONGEST]), ByPhase(told[_LONGEST:-1])
    return Beat(pid, step, steps, marks, PHASES[phase], since + later_s, slowest_s, spent, longest, device_s)


def sample_of(data: bytes, later_s: float = 0.0) -> Sample | None:
    """`data` is what follows the head."""
    if len(data) < SAMPLE.size:
        return None
    number, t, of_facts, of_stacks, ticks, queued = SAMPLE.unpack_from(data)
    if not number or of_facts + of_stacks > MOST_TEXT:
        return None
    middle = SAMPLE.size + of_facts
    end = middle + of_stacks
    if data[end : end + 8] != _NUMBER.pack(number):
        return None
    device = None if ticks < 0 else Device(ticks, queued != 0)
    return Sample.read(t + later_s, data[SAMPLE.size : middle], data[middle:end], device)


@lru_cache(maxsize=8192)
def _facts(text: bytes) -> tuple[str | None, Groups]:
    """Nothing is known where the text makes no sense: it may be another machine's."""
    try:
        found = values.read_object(text)
        groups = values.field(found, "groups", values.maybe(values.by_name(values.whole)), None)
        return values.field(found, "excuse", values.maybe(values.short), None), groups or {}
    except values.BadValue:
        return None, {}


@lru_cache(maxsize=1024)  # all who wait at one place have the same
def _stacks(text: bytes) -> tuple[Frames, Frames]:
    try:
        stack, reader = values.each(values.each(values.short))(values.read_json(text)) or ((), ())
        return tuple(stack), tuple(reader)
    except ValueError:
        return (), ()


class PulseFolder:
    """The pulses of processes on this machine, as who watches them reads them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def beat(self, rank: int) -> Beat | None:
        return read_beat(self._folder, rank)

    def sample(self, rank: int) -> Sample | None:
        return read_sample(self._folder, rank)


class Heard:
    """A pulse of another machine, as its agent has sent it (`news`): decoded when it is asked for, once."""

    def __init__(self) -> None:
        self._head, self._sample, self._later_s = b"", b"", 0.0
        self._decoded = b""  # the head that `_beat` is
        self._beat: Beat | None = None
        self._last: Sample | None = None

    def hear(self, data: bytes, later_s: float) -> None:
        self._head, self._later_s = data[: HEAD.size], later_s
        if len(data) > SAMPLE_AT:  # a head alone leaves the sample as it was
            self._sample = data[SAMPLE_AT:SIZE]

    @property
    def beat(self) -> Beat | None:
        if self._head != self._decoded:
            self._beat, self._decoded = beat_of(self._head, self._later_s) or self._beat, self._head
        return self._beat

    @property
    def sample(self) -> Sample | None:
        if self._sample:
            self._last, self._sample = sample_of(self._sample, self._later_s) or self._last, b""
        return self._last


def read_beat(folder: Path, rank: int) -> Beat | None:
    return beat_of(_bytes(pulse_file(folder, rank), 0, HEAD.size))


def read_sample(folder: Path, rank: int) -> Sample | None:
    return sample_of(_bytes(pulse_file(folder, rank), SAMPLE_AT, SIZE - SAMPLE_AT))


def news(data: bytes, before: tuple[int, int]) -> tuple[bytes, tuple[int, int]]:
    """What another machine has to be told of a pulse: its head where that has changed, else its sample where that has,
    each without the empty rest. `before` is what this gave for the one that was told last, (0, 0) at first."""
    if len(data) < SIZE:
        return b"", before
    (head,) = _NUMBER.unpack_from(data)
    number, _, of_facts, of_stacks, _, _ = SAMPLE.unpack_from(data, SAMPLE_AT)
    if head != before[0]:
        return data[: HEAD.size], (head, before[1])
    if number != before[1]:
        return data[: SAMPLE_AT + SAMPLE.size + of_facts + of_stacks + 8], (head, number)
    return b"", before


def _bytes(path: Path, at: int, size: int) -> bytes:
    try:
        fd = open_plain(path)
        try:
            return os.pread(fd, size, at)
        finally:
            os.close(fd)
    except OSError:
        return b""
