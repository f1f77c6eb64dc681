"""Work on what strangers wrote, in a forked child with limits of time, memory and answer: a grammar that compiles for
ever, a template that fills the memory.

A child is a fork and not a new program, as libraries that take seconds to import are there already; it runs one piece
of work, which touches no GPU and starts no thread, and leaves without any of the parent's endings.
"""

from __future__ import annotations

import faulthandler
import os
import resource
import select
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

_DONE, _REFUSED, _NO_MEMORY = b"\0", b"\1", b"\2"
_BLOCK = 1 << 18


class Refused(ValueError):
    """What the work itself says of its input, or that it went beyond a limit: part of a sentence."""


@dataclass(frozen=True)
class Allowance:
    cpu_s: int
    memory_bytes: int
    """Beyond what the process has already."""
    answer_bytes: int

    @property
    def wall_s(self) -> float:
        """For a child that waits for something that never comes. A busy machine gives it little of its time."""
        return 60.0 + 20.0 * self.cpu_s


def limited(work: Callable[[], bytes], limits: Allowance) -> bytes:
    """What the work returns; `Refused` if it raises that, or takes more than it may."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        _work(work, limits, writing)
    os.close(writing)
    try:
        said, why = _answer(reading, limits)
    finally:
        os.close(reading)
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
    if why:
        raise Refused(why)
    if said[:1] == _DONE:
        return said[1:]
    if said[:1] == _REFUSED:
        raise Refused(said[1:].decode(errors="replace"))
    if said[:1] == _NO_MEMORY:
        raise Refused(f"it takes more than {limits.memory_bytes >> 20:,} MiB of memory")
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGXCPU, signal.SIGKILL):
        raise Refused(f"it takes more than {limits.cpu_s} s")
    raise Refused("what reads it breaks down over it")


def _answer(reading: int, limits: Allowance) -> tuple[bytes, str]:
    """What came until the child ended, or why it is not waited for any longer."""
    parts: list[bytes] = []
    size, until = 0, time.monotonic() + limits.wall_s
    while True:
        ready, _, _ = select.select([reading], [], [], max(until - time.monotonic(), 0))
        if not ready:
            return b"", f"it takes more than {limits.wall_s:.0f} s"
        if not (part := os.read(reading, _BLOCK)):
            return b"".join(parts), ""
        size += len(part)
        if size > limits.answer_bytes + 1:
            return b"", f"it makes more than {limits.answer_bytes:,} bytes"
        parts.append(part)


def _work(work: Callable[[], bytes], limits: Allowance, writing: int) -> NoReturn:
    """In the child."""
    code = 1
    try:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGXCPU):
            signal.signal(number, signal.SIG_DFL)
        quiet = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(quiet, fd)
        faulthandler.disable()  # what breaks down here is told in a sentence
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_CPU, (limits.cpu_s, limits.cpu_s + 1))
        most = _size() + limits.memory_bytes
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (most if hard < 0 else min(most, hard), hard))
        try:
            answer = _DONE + work()
        except Refused as e:
            answer = _REFUSED + str(e).encode(errors="replace")[:4000]
        except MemoryError:
            answer = _NO_MEMORY
        left = memoryview(answer)
        while left:
            left = left[os.write(writing, left) :]
        code = 0
    finally:
        os._exit(code)


def _size() -> int:
    """Of the address space."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except OSError:  # not Linux
        return 1 << 40
