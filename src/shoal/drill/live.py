"""A real run under drill: started through `shoal train`, followed by its journal, and ended without a trace."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from shoal.errors import TransientError
from shoal.guard.workers import TIED
from shoal.held_signals import held_back
from shoal.journal.journal import Record, read
from shoal.journal.rundir import RunDir
from shoal.observe.follow import Follower

LOOK_S = 0.01
END_S = 10.0
WRITER = b"shoal.checkpoint.persister"


class Silent(TransientError):
    """Nothing happened for too long: the run hangs, or the machine is far too slow."""


class Live:
    """`tick` is called while one waits; it may raise to end the drill. `follow`: what the run says is shown."""

    def __init__(
        self,
        run_dir: RunDir,
        args: Sequence[str],
        env: dict[str, str],
        patience_s: float,
        tick: Callable[[], None] = lambda: None,
        follow: bool = True,
    ) -> None:
        self.run_dir, self.records = run_dir, list[Record]()
        self.patience_s, self._tick, self._follow = patience_s, tick, follow
        self._env, self._offset, self._heard_at = env, 0, time.monotonic()
        self._log = run_dir.workspace / f"{run_dir.name}.log"
        self.wall_s: float | None = None  # from its first start to its end
        self._began = time.monotonic()
        self.follower: Follower | None = None
        self._process = self._start(args)

    # Its life

    @property
    def code(self) -> int | None:
        """Of the newest `shoal train` or `shoal resume`; None while it runs."""
        return self._process.poll()

    @property
    def pid(self) -> int:
        return self._process.pid

    def over(self) -> bool:
        """Islands go on when their supervisor is gone, and hold the run's lock."""
        return self.code is not None and not self.run_dir.supervised()

    def resume(self) -> None:
        """As a scheduler does with a job that was lost or taken away."""
        args = ["resume", self.run_dir.name, "--workspace", str(self.run_dir.workspace)]
        self._process = self._start(args)

    def finished(self) -> bool:
        return any(r["kind"] == "finished" for r in self.records)

    def end(self) -> None:
        """At once, without saving: nothing of it stays alive. An impatient Ctrl-C waits until then."""
        with held_back(signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            self._end()
        self.wall_s = time.monotonic() - self._began
        if self.follower:
            self.follower.close()

    def _end(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):  # any stop and then a Ctrl-C: now
            if self.code is None:
                with contextlib.suppress(ProcessLookupError):
                    self._process.send_signal(number)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(0.3)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_S)
        self._process.kill()
        self._process.wait()
        while True:
            self._read()  # an agent may have been started a moment ago
            for pid in {*self.agents().values(), *self.workers().values()}:
                self.signal(pid, signal.SIGKILL)  # a stopped one, too; the workers of an agent are tied to it
            if not self.run_dir.supervised():
                return
            time.sleep(LOOK_S)

    # What it says

    def poll(self) -> None:
        """Reads what is new. Raises `Silent` when there has been nothing for too long."""
        if self._read():
            self._heard_at = time.monotonic()
        elif time.monotonic() - self._heard_at > self.patience_s:
            raise Silent(f"nothing has happened for {self.patience_s:g} s; the run's own words are in {self._log}")
        if self._follow and self.follower is None and self.run_dir.exists():
            self.follower = Follower(self.run_dir)
        if self.follower:
            self.follower.poll()
        self._tick()

    def wait(self, happened: Callable[[], bool], at_most_s: float | None = None) -> bool:
        """Until it has happened, the run is over, or the time is up: whether it has happened."""
        deadline = None if at_most_s is None else time.monotonic() + at_most_s
        while True:
            self.poll()
            if happened():
                return True
            if self.over() or (deadline is not None and time.monotonic() > deadline):
                self._read()
                return happened()
            time.sleep(LOOK_S)

    def of(self, *kinds: str, since: float = 0.0) -> list[Record]:
        return [r for r in self.records if r["kind"] in kinds and float(r["t"]) >= since]

    @property
    def step(self) -> int:
        return next((int(r["step"]) for r in reversed(self.records) if r["kind"] == "step"), 0)

    def say(self, sentence: str) -> None:
        if self.follower:
            self.follower.console.say(f"drill: {sentence}")
        else:
            print(f"drill: {sentence}", file=sys.stderr, flush=True)

    # Who is in it

    def workers(self) -> dict[str, int]:
        """Name → pid, as they were started last."""
        found: dict[str, int] = {}
        for record in self.records:
            if record["kind"] == "attempt" and record.get("pids"):
                found = {f"rank {rank}": pid for rank, pid in enumerate(record["pids"])}
            elif record["kind"] == "island":
                island, pids = record["island"], record["pids"]
                found = {who: pid for who, pid in found.items() if not who.startswith(f"island {island},")}
                found |= {f"island {island}, rank {rank}": pid for rank, pid in enumerate(pids)}
        return found

    def writers(self) -> list[int]:
        """Who writes the workers' saves, in sessions of their own, and would go on without them. Linux alone tells."""
        workers = set(self.workers().values())
        return [pid for pid, parent in _parents() if parent in workers and WRITER in _words(pid)]

    def agents(self) -> dict[int, int]:
        """Island → pid of the process that starts it again."""
        return {int(r["island"]): int(r["agent"]) for r in self.records if r["kind"] == "island" and "agent" in r}

    def members(self) -> list[int]:
        """Islands of the newest epoch, the first member first."""
        return next((list(r["members"]) for r in reversed(self.records) if r["kind"] == "epoch"), [])

    def signal(self, pid: int, number: signal.Signals, whole_session: bool = False) -> bool:
        """Whether it was there to be signalled. A pid that is somebody else's by now is left alone."""
        if not _is_shoal(pid):
            return False
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, number) if whole_session else os.kill(pid, number)
            return True
        return False

    def _start(self, args: Sequence[str]) -> subprocess.Popen[bytes]:
        # Tied to this process: when the drill is killed, its run goes too. In a session of its own: Ctrl-C is ours.
        tied = [sys.executable, "-I", "-S", str(TIED), str(os.getpid()), sys.executable, "-m", "shoal", *args]
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with open(self._log, "ab") as out:
            return subprocess.Popen(
                tied,
                env=os.environ | self._env,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )

    def last_words(self) -> str:
        with contextlib.suppress(OSError, IndexError):
            return self._log.read_text(errors="replace").strip().splitlines()[-1]
        return "it said nothing"

    def _read(self) -> bool:
        if not self.run_dir.exists() or self.run_dir.journal_file.stat().st_size == self._offset:
            return False
        before = len(self.records)
        for record, after in read(self.run_dir.journal_file, self._offset):
            self.records.append(record)
            self._offset = after
        return len(self.records) > before


def gone(pid: int) -> bool:
    """Whether it runs no more, waited for or not."""
    return (_stat(pid) or "Z")[0] in "ZX"


def _parents() -> Iterator[tuple[int, int]]:
    """(pid, that of its parent) of each process."""
    for path in Path("/proc").glob("[0-9]*"):
        if stat := _stat(int(path.name)):
            yield int(path.name), int(stat.split()[1])


def _stat(pid: int) -> str | None:
    """What the kernel says of a process, from its state on; the name before that may hold anything."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].strip()
    except OSError:
        return None


def _words(pid: int, file: str = "cmdline") -> bytes:
    try:
        return Path(f"/proc/{pid}/{file}").read_bytes()
    except OSError:
        return b""


def _is_shoal(pid: int) -> bool:
    """A worker that is somebody's script has Shoal's name in its environment alone."""
    return sys.platform != "linux" or b"shoal" in _words(pid) or b"SHOAL_SCRIPT=" in _words(pid, "environ")
