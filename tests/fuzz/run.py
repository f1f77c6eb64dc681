"""Runs cases in children, so that a hang, a crash of a library and a full memory are findings and not the end.

A child writes which case it is at into memory that its parent shares. It raises in itself what takes too much CPU time;
where that does not help (a library that never returns to Python), or where it dies, the parent notes that case and goes
on after it in another child.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import mmap
import os
import re
import resource
import select
import shutil
import signal
import struct
import tempfile
import time
import traceback
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any

from tests.fuzz.reader import MIB, READERS, Finding, Reader, Target, dump, load, objection

_M_ARENA_MAX = -8  # of malloc.h
MOST_CPU_S = 10.0  # of one case
_KILL_CPU_S = 12.0  # of one case that does not come back to Python
_AT = struct.Struct("<qqdqd")  # item, seed, CPU seconds of the process when the case began; taken before, CPU s before
_MEMORY = Path("/dev/shm") if Path("/dev/shm").is_dir() else Path(tempfile.gettempdir())
_SOURCE = f"{os.sep}src{os.sep}shoal{os.sep}"


class TooLong(BaseException):
    """More than `MOST_CPU_S`. No `Exception`: no reader may take it for bad input."""


@dataclass(frozen=True)
class Work:
    reader: str
    seed: int  # of the first case
    cases: int
    kept: tuple[Path, ...] = ()  # files to read instead: a seed is then the place in this list


@dataclass(frozen=True)
class Found:
    """The smallest case seen of all that fail at one place in one way."""

    reader: str
    place: str  # file:function:class, so that it stays when lines move
    what: str
    seed: int
    size: int
    count: int = 1

    @property
    def key(self) -> tuple[str, str]:
        return self.reader, self.place


@dataclass
class Ran:
    cases: dict[str, int]
    taken: dict[str, int]  # of these, those that the reader took; none: its generator makes nothing but noise
    cpu_s: dict[str, float]
    found: dict[tuple[str, str], Found]

    def count(self, reader: str, cases: int, taken: int, cpu_s: float) -> None:
        self.cases[reader] = self.cases.get(reader, 0) + cases
        self.taken[reader] = self.taken.get(reader, 0) + taken
        self.cpu_s[reader] = self.cpu_s.get(reader, 0.0) + cpu_s

    def note(self, one: Found) -> None:
        best = self.found.get(one.key, replace(one, count=0))
        smaller = one if one.size < best.size else best
        self.found[one.key] = replace(smaller, count=best.count + one.count)


def case_of_work(work: Work, target: Target, seed: int) -> Any:
    return load(work.kept[seed]) if work.kept else case_of(work.reader, target, seed)


def case_of(name: str, target: Target, seed: int) -> Any:
    return target.generate(Random(zlib.crc32(name.encode()) << 64 | seed))


def one(target: Target, case: Any) -> tuple[str, str] | bool:
    """Place and description of what is wrong with how a reader takes a case; else whether it was taken."""
    try:
        target.read(case)
        return True
    except target.silent:
        return False
    except target.allowed as e:
        if (wrong := objection(e, target.lines)) is None:
            return False
        return f"{place_of(e)}:{re.sub(r'[0-9]+', 'many', wrong)}", f"{type(e).__name__} {wrong}: {str(e)[:300]!r}"
    except BaseException as e:  # a panic of a Rust library is no `Exception`
        if isinstance(e, KeyboardInterrupt):
            raise
        short = traceback.format_exception(e, limit=-3)
        said = "".join(short)[-700:]
        kind = f"{type(e).__name__} {e}" if isinstance(e, Finding) else type(e).__name__
        return f"{place_of(e)}:{kind[:80]}", said


def place_of(e: BaseException) -> str:
    """The innermost function of the product that it passed through."""
    place = "outside"
    for frame, _ in traceback.walk_tb(e.__traceback__):
        code = frame.f_code
        if _SOURCE in code.co_filename:
            place = f"{code.co_filename.rpartition(_SOURCE)[2]}:{code.co_name}"
    return place


def run(works: Sequence[Work], until: float | None = None, told: Callable[[Ran], None] | None = None) -> Ran:
    """All of it, one child after another. `until` (monotonic): no new case after that."""
    ran, left = Ran({}, {}, {}, {}), list(works)
    while left and (until is None or time.monotonic() < until):
        left = _child(left, ran, until, told)
    return ran


def _child(works: list[Work], ran: Ran, until: float | None, told: Callable[[Ran], None] | None) -> list[Work]:
    """What one child does of it; what is left where it died."""
    shared = mmap.mmap(-1, _AT.size)
    _AT.pack_into(shared, 0, 0, -1, 0.0, 0, 0.0)
    folder = Path(tempfile.mkdtemp(prefix="shoal-fuzz-", dir=_MEMORY))
    out, into = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.close(out)
            _work(works, shared, into, folder, until)
            code = 0
        except BaseException:
            _tell(into, broken=traceback.format_exc())
        finally:
            os._exit(code)
    os.close(into)
    try:
        killed = _listen(pid, out, shared, ran, told)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    except BaseException:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise
    finally:
        os.close(out)
        shutil.rmtree(folder, ignore_errors=True)
    if status == 0:
        return []
    item, seed, _, taken, cpu_s = _AT.unpack_from(shared)
    work = works[item]
    if seed < 0 or status > 0:
        raise RuntimeError(f"the generator of {work.reader} itself failed")
    how = f"took more than {_KILL_CPU_S:g} s of CPU" if killed else f"died of {signal.Signals(-status).name}"
    if killed or not READERS[work.reader].isolated:
        ran.note(Found(work.reader, f"process:{how}", how, seed, 1 << 60))
    ran.count(work.reader, seed + 1 - work.seed, taken, cpu_s)
    rest = replace(work, seed=seed + 1, cases=work.seed + work.cases - seed - 1)
    return ([rest] if rest.cases else []) + works[item + 1 :]


def _listen(pid: int, out: int, shared: mmap.mmap, ran: Ran, told: Callable[[Ran], None] | None) -> bool:
    """Until the child closes its end; whether it had to be killed."""
    rest, before = b"", None
    while True:
        if select.select([out], [], [], 1.0)[0]:
            data = os.read(out, 1 << 16)
            if not data:
                return False
            *whole, rest = (rest + data).split(b"\n")
            for line in whole:
                _hear(json.loads(line), ran)
        else:
            now = _AT.unpack_from(shared)
            # Seen twice: `pack_into` writes zeros first, and they may be read.
            if now == before and now[1] >= 0 and _cpu_s(pid) - now[2] > _KILL_CPU_S:
                os.kill(pid, signal.SIGKILL)
                return True
            before = now
        if told is not None:
            told(ran)


def _hear(said: dict[str, Any], ran: Ran) -> None:
    if "broken" in said:
        raise RuntimeError(f"a generator failed, and no reader:\n{said['broken']}")
    if "found" in said:
        ran.note(Found(**said["found"]))
    else:
        ran.count(**said)


def _tell(into: int, **said: Any) -> None:
    data = json.dumps(said).encode() + b"\n"
    while data:
        data = data[os.write(into, data) :]


def _cpu_s(pid: int) -> float:
    with open(f"/proc/{pid}/stat", "rb") as file:
        words = file.read().rpartition(b")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


# In the child


def _work(works: Sequence[Work], shared: mmap.mmap, into: int, folder: Path, until: float | None) -> None:
    faulthandler.disable()  # a child that dies is told by its parent
    nothing = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):  # libraries print what they think of bad input
        os.dup2(nothing, fd)
    signal.signal(signal.SIGPROF, _too_long)
    _few_arenas()
    for item, work in enumerate(works):
        _AT.pack_into(shared, 0, item, -1, time.process_time(), 0, 0.0)
        try:
            _item(item, work, READERS[work.reader], shared, into, folder / work.reader, until)
        except Exception:  # of the generator itself: it has to be mended, and the others are run all the same
            what = traceback.format_exc()[-1500:]
            _tell(into, found=Found(work.reader, "generator:failed", what, work.seed, 1 << 60).__dict__)


def _item(
    item: int, work: Work, reader: Reader, shared: mmap.mmap, into: int, folder: Path, until: float | None
) -> None:
    folder.mkdir()
    target = reader.make(folder)
    for case in _warm(target, reader):  # what is loaded and compiled once is no case's
        one(target, case)
    base, began = _peak_mib(), time.process_time()
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, ((_size_mib() + 2 * reader.most_mib + 512) * MIB, hard))
    seen: dict[str, Found] = {}
    done = taken = 0
    for seed in range(work.seed, work.seed + work.cases):
        if until is not None and not done & 15 and time.monotonic() > until:
            break
        case = case_of_work(work, target, seed)
        if _peak_mib() > base:  # what it took to make the case is none of the reader's
            base = _forgotten_peak_mib()
        now = time.process_time()
        _AT.pack_into(shared, 0, item, seed, now, taken, now - began)
        signal.setitimer(signal.ITIMER_PROF, MOST_CPU_S)
        wrong = one(target, case)
        signal.setitimer(signal.ITIMER_PROF, 0)
        done += 1
        if (peak := _peak_mib()) > base + reader.most_mib:
            wrong = ("memory:over its bound", f"{peak - base} MiB, where {reader.most_mib} are allowed")
            base = _forgotten_peak_mib()
        if isinstance(wrong, bool):
            taken += wrong
        else:
            _note(work.reader, seed, case, wrong, seen, into)
    _AT.pack_into(shared, 0, item, -1, time.process_time(), 0, 0.0)
    resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
    shutil.rmtree(folder, ignore_errors=True)
    _tell(
        into,
        reader=work.reader,
        cases=done,
        taken=done if target.refuses_all else taken,
        cpu_s=time.process_time() - began,
    )


def _few_arenas() -> None:
    """glibc reserves 64 MiB of address space for each thread that allocates, and libraries start one a core: on 16 of
    them that is all a case may have. Then no thread can be started, and Rust aborts where an allocation fails."""
    with suppress(OSError, AttributeError):  # another libc
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 2)


def _warm(target: Target, reader: Reader) -> Iterator[Any]:
    for seed in range(3):
        yield case_of(reader.name, target, (1 << 62) + seed)


def _note(reader: str, seed: int, case: Any, wrong: tuple[str, str], seen: dict[str, Found], into: int) -> None:
    place, what = wrong
    size = len(dump(case)[1])
    found = Found(reader, place, what, seed, size)
    if place not in seen or size < seen[place].size:
        seen[place] = found
        _tell(into, found=found.__dict__)
    else:
        _tell(into, found=replace(found, what="", size=1 << 61).__dict__)


def _too_long(signum: int, frame: FrameType | None) -> None:
    raise TooLong(f"more than {MOST_CPU_S:g} s of CPU")


def _peak_mib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10


def _forgotten_peak_mib() -> int:
    """From here on the peak is of what comes (5: Documentation/filesystems/proc.rst)."""
    with suppress(OSError), open("/proc/self/clear_refs", "wb") as file:
        file.write(b"5")
    return _peak_mib()


def _size_mib() -> int:
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[0]) * resource.getpagesize() // MIB
