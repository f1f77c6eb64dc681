"""One attempt of one unit: its process, its log, and what its end means."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from shoal.errors import DONE, WRONG_ENVIRONMENT
from shoal.guard.classify import Failure, classify
from shoal.guard.surroundings import Change, Surroundings
from shoal.guard.workers import Death
from shoal.journal.units import Folder
from shoal.spec.batch import Batch, filled

LONGEST_WAIT_S = 600.0
# What a shell says of a child that a signal has ended.
BY_A_SHELL = {128 + number: number for number in (signal.SIGABRT, signal.SIGBUS, signal.SIGKILL, signal.SIGSEGV)}
PACKED_BYTES = 256 << 10  # of a log that is put into the file of its block; a longer one keeps its own


@dataclass(frozen=True)
class Work:
    """What is the same for every unit of a runner."""

    batch: Batch
    units: int
    items: list[str] | None
    env: Mapping[str, str]
    gpus: tuple[str, ...]
    at_once: int

    def item(self, unit: int) -> str | None:
        return None if self.items is None else self.items[unit]

    def words(self, unit: int, attempt: int) -> list[str]:
        return [filled(word, unit, self.units, self.item(unit), attempt) for word in self.batch.command]

    def environment(self, unit: int, attempt: int, slot: int) -> dict[str, str]:
        about = {"SHOAL_UNIT": str(unit), "SHOAL_UNITS": str(self.units), "SHOAL_UNIT_ATTEMPT": str(attempt)}
        if self.items is not None:
            about["SHOAL_ITEM"] = self.items[unit]
        if self.gpus and "CUDA_VISIBLE_DEVICES" not in self.batch.env:
            each = max(1, len(self.gpus) // self.at_once)
            first = slot * each % len(self.gpus)
            about["CUDA_VISIBLE_DEVICES"] = ",".join(self.gpus[first : first + each])
        return {**self.env, **about}

    def output(self, unit: int) -> Path | None:
        if self.batch.outputs is None:
            return None
        return Path(self.batch.folder or ".") / filled(self.batch.outputs, unit, self.units, self.item(unit), 0)


class Attempt:
    """A running one. It leads a session of its own: Ctrl-C in the terminal does not reach it."""

    def __init__(self, work: Work, unit: int, number: int, slot: int, log: Path) -> None:
        self.unit, self.number, self.slot, self.log = unit, number, slot, log
        self.told: str | None = None  # why it was ended by its runner: `timeout`, `stopped`
        self.began, self.began_at = time.time(), time.monotonic()
        self._kill_at = float("inf")
        with open(log, "wb", buffering=0) as out:
            self._process = subprocess.Popen(
                work.words(unit, number),
                env=work.environment(unit, number, slot),
                cwd=work.batch.folder,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def tell(self, why: str, grace_s: float) -> None:
        if self.told is None:
            self.told = why
            self._kill_at = time.monotonic() + grace_s
            self._signal(signal.SIGTERM)
        else:
            self._kill_at = min(self._kill_at, time.monotonic() + grace_s)

    def kill_if_due(self) -> float:
        """When it will be due."""
        if time.monotonic() >= self._kill_at:
            self._signal(signal.SIGKILL)
            self._kill_at = time.monotonic() + 1.0
        return self._kill_at

    def ended(self) -> Death | None:
        code = self._process.poll()
        if code is None:
            return None
        self._signal(signal.SIGKILL)  # what it left behind
        exited, signalled = (None, -code) if code < 0 else (code, None)
        return Death(self.unit, self.pid, exited, signalled, self.told is not None, time.time(), self.log)

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)


class Kills:
    """Those of the kernel for want of memory: each is of one unit."""

    def __init__(self, path: Path) -> None:
        self._path, self._before = path, Surroundings.now(path)
        self._untold: list[Change] = []

    def around(self) -> Change:
        """Of a unit that a signal has ended."""
        change = self._before.change()
        self._before = Surroundings.now(self._path)
        self._untold += [change] * change.oom_kills
        return self._untold.pop() if self._untold else change


def failure_of(attempt: Attempt, death: Death, work: Work, kills: Kills) -> Failure | None:
    """None: it is done. Named by the classes of every run."""
    if attempt.told == "timeout":
        took = death.t - attempt.began
        said = f"still at work after {took:.1f} s (batch.timeout {work.batch.timeout})"
        return Failure(None, "timeout", said, death.exit_code, death.signal, death.t)
    if death.exit_code != DONE:
        number = BY_A_SHELL.get(death.exit_code or 0)
        seen = death if number is None else replace(death, exit_code=None, signal=number)
        found = classify(seen, kills.around() if seen.signal is not None else None)
        return replace(found, rank=None, exit_code=death.exit_code, signal=death.signal)
    output = work.output(attempt.unit)
    if output is not None and not output.exists():
        return Failure(None, "no-output", f"it ended with 0, and there is no {output}", DONE, None, death.t)
    return None


def not_started(e: OSError, unit: int) -> Failure:
    """The program is not there, or the machine has no room for another process."""
    retried = e.errno in (11, 12)  # EAGAIN, ENOMEM
    return Failure(
        None,
        "host-memory" if retried else "environment",
        f"cannot be started: {e.strerror} ({e.filename or 'its program'})",
        None if retried else WRONG_ENVIRONMENT,
    )


def wait_s(failures: int, backoff_s: float) -> float:
    """Before the next attempt: twice as long each time, and not all at the same moment."""
    return min(backoff_s * 2.0 ** min(failures - 1, 30), LONGEST_WAIT_S) * random.uniform(0.75, 1.25)


def kept_log(folder: Folder, block: int, attempt: Attempt) -> dict[str, str | int]:
    """Puts what it has printed where it stays: a million small files would be more than the file system likes."""
    try:
        size = attempt.log.stat().st_size
        if not size:
            return {}
        if size > PACKED_BYTES:
            own = folder.logs / f"unit-{attempt.unit}-{attempt.number}.log"
            attempt.log.rename(own)
            return {"log": own.name, "log_from": 0, "log_bytes": size}
        said = attempt.log.read_bytes()
        packed = folder.logs / f"block-{block:05d}.log"
        with open(packed, "ab", buffering=0) as file:
            begin = file.seek(0, os.SEEK_END)
            file.write(said)
        return {"log": packed.name, "log_from": begin, "log_bytes": len(said)}
    except OSError:  # a full disk: the unit has ended all the same
        return {}
