"""What a process is doing, written where another can read it while this one hangs. Never imports torch.

One small file a rank, in memory (tmpfs) and mapped, so that a mark costs a microsecond or two and cannot block. It has
two parts. The head is written by the training itself: the phase, the step, how many marks it has made, the time spent
in each phase and the longest stay in it (shoal.journal.beat). The sample is written once a second by a thread: the
Python stacks, how many collectives each group has begun, how far the device is; it is there also when the process has
been stopped. Beside it lies what `faulthandler` writes on SIGUSR1, which works even when a thread holds the interpreter
for ever.

The file's format is that of shoal.journal.pulse_file. All ranks mark the same phases in the same order, so their counts
of marks compare.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import mmap
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from shoal.journal.beat import PHASES, Marks
from shoal.journal.excuses import Frame, excuse
from shoal.journal.pulse_file import (
    HEAD,
    SAMPLE_AT,
    SIZE,
    Device,
    Groups,
    Sample,
    ask_file,
    dump_file,
    flight_file,
    packed_head,
    packed_sample,
    pulse_file,
)

FOLDER = "SHOAL_PULSE"  # the environment variable that names the folder; without it nothing is written
SAMPLE_S = 1.0
MOST_FRAMES = 48
Told = TypeVar("Told")


class Pulse:
    """One process's. `begin` it as early as possible; without a folder it does nothing."""

    def __init__(self, folder: Path | None, rank: int) -> None:
        self._number, self._pid = 0, os.getpid()
        self._marks = Marks(time.monotonic())
        self._look: Callable[[], Groups] | None = None
        self._device: Callable[[], Device] | None = None
        self._map: mmap.mmap | None = None
        self._folder, self._rank = folder, rank
        self._flight: Callable[[], Any] | None = None
        self._pipe: int | None = None  # in which others ask for it
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

    def mark(self, phase: str, step: int | None = None, marks: int | None = None) -> None:
        """From now on it is doing that. `step`: a step begins. `marks`: as in `Marks.mark`."""
        if self._map is None:
            return
        self._marks.mark(phase, step, time.monotonic(), marks)
        self._write()

    def worked(self, seconds: float) -> None:
        """What a step's work took the device: its own work alone, as in shoal.train.clock."""
        if self._map is None:
            return
        self._marks.worked(seconds)
        self._write()

    def watch_groups(self, look: Callable[[], Groups]) -> None:
        """`look` tells how many collectives each group of processes has begun; asked once a second, by the thread."""
        self._look = look

    def watch_device(self, look: Callable[[], Device] | None) -> None:
        """`look` tells how far the device is; asked once a second, by the thread."""
        self._device = look

    def watch_flight(self, look: Callable[[], Any] | None) -> None:
        """`look` gives what is known of the last collectives, as JSON has it; asked by the thread when others ask."""
        if look is None or self._map is None or self._folder is None:
            return
        pipe = ask_file(self._folder, self._rank)
        try:
            os.mkfifo(pipe, 0o600)
            self._flight = look
            self._pipe = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)  # open at both ends: it never reads as ended
        except OSError:  # no pipes in this file system; a hang is then named without it
            self._pipe = None

    def _write(self) -> None:
        assert self._map is not None
        self._number += 1
        self._map[: HEAD.size] = packed_head(self._number, self._pid, self._marks)

    def _sampling(self) -> None:
        number = 0
        while True:
            number += 1
            self._write_sample(number)
            self._rest(time.monotonic() + SAMPLE_S)

    def _rest(self, until: float) -> None:
        """… and answers meanwhile."""
        while (left_s := until - time.monotonic()) > 0:
            if self._pipe is None:
                time.sleep(left_s)
            elif select.select([self._pipe], [], [], left_s)[0]:
                os.read(self._pipe, 4096)
                self._answer()

    def _answer(self) -> None:
        assert self._folder is not None
        file = flight_file(self._folder, self._rank)
        with contextlib.suppress(OSError):  # a full memory
            file.with_suffix(".part").write_text(json.dumps(_asked(self._flight) or {}))
            file.with_suffix(".part").replace(file)

    def _write_sample(self, number: int) -> None:
        assert self._map is not None
        data = packed_sample(number, self._sample())
        self._map[SAMPLE_AT : SAMPLE_AT + len(data)] = data

    def _sample(self) -> Sample:
        stacks = {ident: _frames(frame) for ident, frame in sys._current_frames().items()}
        names = {t.ident: t.name for t in threading.enumerate()}
        main = stacks.pop(threading.main_thread().ident or 0, [])
        reader = next((stacks.pop(ident) for ident in list(stacks) if names.get(ident) == "shoal-feed"), [])
        phase = PHASES[self._marks.phase]
        groups, device = _asked(self._look) or {}, _asked(self._device)  # the latter takes a moment
        return Sample(
            time.monotonic(),
            _words(main),
            _words(reader) if phase == "data" else (),
            excuse(phase, main, reader, stacks.values()),
            groups,
            device,
        )


SILENT = Pulse(None, 0)  # for those who take steps without a run


def _frames(frame: FrameType | None) -> list[Frame]:
    """(file, line, function), innermost first."""
    found = []
    while frame is not None:
        found.append((frame.f_code.co_filename, frame.f_lineno or 0, frame.f_code.co_name))
        frame = frame.f_back
    return found


def _asked(look: Callable[[], Told] | None) -> Told | None:
    try:
        return None if look is None else look()
    except Exception:  # groups come and go while this thread looks; the next second is soon enough
        return None


def _words(frames: Iterable[Frame]) -> tuple[str, ...]:
    return tuple(f"{short(file)}:{line} {name}" for file, line, name in list(frames)[:MOST_FRAMES])


def short(file: str) -> str:
    """From the package on: site-packages/torch/… is torch/…"""
    for mark in ("/site-packages/", "/src/", "/lib/python"):
        if mark in file:
            return file.rsplit(mark, 1)[1]
    return file
