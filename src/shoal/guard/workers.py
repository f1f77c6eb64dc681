"""One group of worker processes: start them, see them end, end them. What an end means is decided elsewhere."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from shoal import ways
from shoal.errors import SetupError
from shoal.journal.pulse import FOLDER
from shoal.journal.pulses import make_folder
from shoal.wire import text_of

ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # the second is its older name
TIED = Path(__file__).with_name("tied.py")


@dataclass(frozen=True)
class Death:
    """One worker's end, as the system reported it."""

    rank: int
    pid: int
    exit_code: int | None  # None when a signal ended it
    signal: int | None
    told: bool  # it had been signalled by us, so its end explains nothing
    t: float
    log: Path
    known: tuple[str, str] | None = None  # cause and evidence, where another node has looked at it already

    @property
    def by_itself(self) -> bool:
        return not self.told


def log_file(logs: Path, attempt: int, rank: int) -> Path:
    return rank_log(logs / f"attempt-{attempt:03d}", rank)


def rank_log(attempt_logs: Path, rank: int) -> Path:
    return attempt_logs / f"rank-{rank:05d}.log"


@dataclass(frozen=True)
class Share:
    """The part of a group that one node runs, where there are several."""

    node: int
    first: int  # its first rank
    count: int
    master: tuple[str, int]  # where rank 0 will listen
    address: str | None = None  # of this node, as the others reach it
    listening: int | None = None  # a socket that listens there already, for rank 0

    @property
    def ranks(self) -> range:
        return range(self.first, self.first + self.count)


@dataclass(frozen=True)
class Start:
    """What each process of a group is started with."""

    command: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)  # besides that of every worker
    folder: Path | None = None  # None: where the supervisor is
    script: bool = False  # somebody's: torch's allocator is left as it is


class Workers:
    """A running group, or a node's share of one. Each worker leads its own session: Ctrl-C in the terminal does not
    reach it, and its own children can be ended with it."""

    def __init__(
        self,
        command: Sequence[str],
        world: int,
        attempt: int,
        logs: Path,
        threads: int,
        share: Share | None = None,
        start: Start | None = None,
    ) -> None:
        """`start` has more to say than the command, where it is given."""
        self.started = start = start or Start(command)
        self.attempt = attempt
        self._scratch = Path(tempfile.mkdtemp(prefix="shoal-rendezvous-"))
        self.pulses = make_folder()  # where they write what they are doing
        self._alive: dict[int, subprocess.Popen[bytes]] = {}
        self._told: set[int] = set()
        ranks = range(world) if share is None else share.ranks
        self._logs = {rank: log_file(logs, attempt, rank) for rank in ranks}
        try:
            for rank in ranks:
                env = os.environ | worker_env(rank, world, attempt, threads, self._scratch / "store", share)
                env |= {} if start.script else allocator_env(os.environ)
                env |= {FOLDER: str(self.pulses), **recorder_env(os.environ, self._logs[rank].parent), **start.env}
                held = share.listening if share is not None and rank == 0 else None
                handed = () if held is None else (held,)
                self._alive[rank] = _start(start.command, env, self._logs[rank], handed, start.folder)
        except OSError as e:
            self.close()
            raise SetupError(
                f"cannot start worker {rank} of {world}: {e.strerror} ({e.filename or command[0]})."
            ) from e

    @property
    def pids(self) -> dict[int, int]:
        return {rank: process.pid for rank, process in self._alive.items()}

    def reap(self) -> list[Death]:
        """The workers that ended since the last call, lowest rank first. Never waits."""
        deaths = []
        for rank, process in list(self._alive.items()):
            code = process.poll()
            if code is None:
                continue
            del self._alive[rank]
            _signal_session(process.pid, signal.SIGKILL)  # what it left behind (data processes, shells)
            exited, signalled = (None, -code) if code < 0 else (code, None)
            told = rank in self._told
            deaths.append(Death(rank, process.pid, exited, signalled, told, time.time(), self._logs[rank]))
        return deaths

    def tell_to_stop(self) -> None:
        """SIGTERM to the workers alone, not to their children: the worker saves and ends those itself."""
        for rank, process in self._alive.items():
            self._told.add(rank)
            process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        for rank, process in self._alive.items():
            self._told.add(rank)
            _signal_session(process.pid, signal.SIGKILL)

    def end(self, grace_s: float, wait: Callable[[float], None]) -> list[Death]:
        return end(self, grace_s, wait)

    def close(self) -> None:
        """Nothing stays behind, whatever happened to the caller."""
        self.kill()
        for process in self._alive.values():
            process.wait()
        self.reap()
        shutil.rmtree(self._scratch, ignore_errors=True)
        shutil.rmtree(self.pulses, ignore_errors=True)


class Group(Protocol):
    """What a supervisor sees of a running group, wherever its workers are."""

    @property
    def pids(self) -> dict[int, int]: ...
    def reap(self) -> list[Death]: ...
    def tell_to_stop(self) -> None: ...
    def kill(self) -> None: ...
    def end(self, grace_s: float, wait: Callable[[float], None]) -> list[Death]: ...


def end(group: Group, grace_s: float, wait: Callable[[float], None]) -> list[Death]:
    """SIGTERM, then SIGKILL after the grace: a worker that waits in a collective hears only the latter."""
    group.tell_to_stop()
    deaths, deadline = group.reap(), time.monotonic() + grace_s
    while group.pids and (left := deadline - time.monotonic()) > 0:
        wait(min(left, 0.2))  # the end of a worker on another node comes as no signal
        deaths += group.reap()
    group.kill()
    while group.pids:
        wait(0.2)
        deaths += group.reap()
    return deaths


def worker_env(
    rank: int, world: int, attempt: int, threads: int, store: Path, share: Share | None = None
) -> dict[str, str]:
    # A file (or a port) of its own for every group: a stale store of a dead group would hand out dead addresses.
    where = {"SHOAL_RENDEZVOUS": f"file://{store}"}
    if share is not None:
        host, port = share.master
        where = {
            "SHOAL_RENDEZVOUS": f"tcp://{text_of(share.master)}",
            "MASTER_ADDR": host,
            "MASTER_PORT": str(port),
            "GROUP_RANK": str(share.node),
            **({} if share.address is None else ways.settings(share.address)),
            **({} if share.listening is None or rank else {"SHOAL_LISTENING": str(share.listening)}),
        }
    return where | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank if share is None else rank - share.first),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world if share is None else share.count),
        "SHOAL_ATTEMPT": str(attempt),
        "OMP_NUM_THREADS": str(threads),
        "PYTHONUNBUFFERED": "1",  # the last words of a killed worker are in its log
        "PYTHONFAULTHANDLER": "1",  # … and the Python stack of one that crashed in native code
    }


def allocator_env(environ: Mapping[str, str]) -> dict[str, str]:
    """Of torch's allocator on GPUs, before it starts; what the user has set stays. Plans fill nine tenths of a card
    with tensors: that leaves no room for blocks of memory which no tensor fits into, so they must be able to grow."""
    return {} if set(ALLOCATOR) & environ.keys() else {ALLOCATOR[0]: "expandable_segments:True"}


def recorder_env(environ: Mapping[str, str], logs: Path) -> dict[str, str]:
    """Of NCCL's flight recorder: on, and where it writes when a collective times out and nobody has ended the run
    before. (Before a rank is killed it is asked: shoal.guard.flights.) What the user has set stays."""
    wanted = {
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_DUMP_TEMP_FILE": str(logs / "nccl-timeout-rank-"),
    }
    older = {
        "TORCH_FR_BUFFER_SIZE": "TORCH_NCCL_TRACE_BUFFER_SIZE",
        "TORCH_FR_DUMP_TEMP_FILE": "TORCH_NCCL_DEBUG_INFO_TEMP_FILE",
    }
    return {name: value for name, value in wanted.items() if not {name, older.get(name, name)} & environ.keys()}


def threads_for(asked: int | str, world: int) -> int:
    if isinstance(asked, int):
        return asked
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // world)


def _start(
    command: Sequence[str], env: Mapping[str, str], log: Path, held: Sequence[int], folder: Path | None
) -> subprocess.Popen[bytes]:
    """`held`: open files that it is handed."""
    log.parent.mkdir(parents=True, exist_ok=True)
    tied = [sys.executable, "-I", "-S", str(TIED), str(os.getpid()), *command]
    with open(log, "ab", buffering=0) as out:
        return subprocess.Popen(
            tied,
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
            pass_fds=held,
            cwd=folder,
        )


def _signal_session(leader_pid: int, number: signal.Signals) -> None:
    try:
        os.killpg(leader_pid, number)
    except (ProcessLookupError, PermissionError):  # nobody is left in it (macOS says "permission" of zombies)
        return
