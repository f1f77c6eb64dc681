"""Network namespaces: made, entered, and gone again even if who made them was killed.

A namespace is named after the process that made it (its number and when it started), so anybody can tell which ones
nobody will ever delete: `sweep` does, with all processes that still run in them.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from shoal.errors import SetupError

FOLDER = Path("/run/netns")  # where `ip netns` keeps them
_NEWNET = 0x40000000
_NAME = re.compile(r"shoal-(\d+)-(\d+)-(\d+)-.+")
_made = itertools.count(1)
T = TypeVar("T")


def prefix() -> str:
    """For the namespaces of one network; no other process, and no other network of this one, has it."""
    return f"shoal-{os.getpid()}-{_started(os.getpid())}-{next(_made)}-"


def make(names: Iterable[str]) -> None:
    ip("-batch", "-", given="".join(f"netns add {name}\n" for name in names))


def remove(names: Iterable[str]) -> None:
    """With every process that is in them."""
    kept = [FOLDER / name for name in names if (FOLDER / name).exists()]
    end_processes(kept)
    for path in kept:
        ip("netns", "delete", path.name, check=False)


def beginning(prefix: str) -> list[str]:
    """All whose names do."""
    return [path.name for path in FOLDER.glob(f"{prefix}*")]


def sweep() -> None:
    """What processes that are gone have left."""
    found = FOLDER.glob("shoal-*") if FOLDER.is_dir() else ()
    remove([path.name for path in found if (match := _NAME.fullmatch(path.name)) and not _alive(match)])


def inside(name: str, do: Callable[[], T]) -> T:
    """What `do` returns, called in the namespace: sockets, devices, /proc/sys/net and started programs are its own."""
    result: list[T] = []
    trouble: list[BaseException] = []

    def thread() -> None:  # a thread of its own, which ends: nothing else may ever run in the namespace by mistake
        try:
            with entered(name):
                result.append(do())
        except BaseException as e:
            trouble.append(e)

    worker = threading.Thread(target=thread, name=f"in {name}")
    worker.start()
    worker.join()
    if trouble:
        raise trouble[0]
    return result[0]


@contextmanager
def entered(name: str) -> Iterator[None]:
    """The calling thread is in the namespace meanwhile."""
    back = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    try:
        _set(FOLDER / name)
        try:
            yield
        finally:
            _set(Path(f"/proc/self/fd/{back}"))
    finally:
        os.close(back)


def ip(*arguments: str, given: str = "", check: bool = True) -> None:
    done = subprocess.run(["ip", *arguments], input=given, capture_output=True, text=True)
    if check and done.returncode:
        raise SetupError(f"`ip {' '.join(arguments)}` failed: {done.stderr.strip() or done.returncode}.")


def end_processes(namespaces: Iterable[Path]) -> None:
    """SIGKILL until none is left; whoever starts new ones meanwhile is found in the next turn."""
    inodes = {path.stat().st_ino for path in namespaces}
    deadline = time.monotonic() + 5.0
    while inodes and (found := [pid for pid in _processes() if _network(pid) in inodes]):
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            raise SetupError(f"Processes {', '.join(map(str, found))} of an emulated network do not end.")
        time.sleep(0.02)


def _processes() -> Iterator[int]:
    for entry in os.scandir("/proc"):
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            yield int(entry.name)


def _network(pid: int) -> int | None:
    with suppress(OSError):  # it is gone, or a kernel's own
        return os.stat(f"/proc/{pid}/ns/net").st_ino
    return None


def _set(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(fd, _NEWNET):
            why = os.strerror(ctypes.get_errno())
            raise SetupError(f"The network namespace {path} cannot be entered: {why}.")
    finally:
        os.close(fd)


def _started(pid: int) -> int:
    """In ticks since the machine did; with it, a number that is used again is not mistaken."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[19])
    except OSError:
        return -1


def _alive(match: re.Match[str]) -> bool:
    return _started(int(match[1])) == int(match[2])
