"""Runs a function on several ranks, fast: forks from this warm process, where `import torch` is already paid for.

    from tests.ranks import run_ranks

    def work(rank, world, x):          # any function, closures too; the default group (gloo) is up
        ...
        return something_picklable

    values = run_ranks(work, 4, x)     # one value a rank; a failing rank's traceback is raised here

A rank that fails ends the others, a rank that hangs is killed after `timeout_s` (of a quiet machine: tests/patience.py)
and its stack is shown, and no process outlives the call (nor a killed pytest). Ranks start in tenths of a second;
`spawn` takes seconds. For the CPU only: a process forked from one that has touched CUDA cannot use it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import torch

from tests.forked import fork
from tests.patience import Stopwatch, limit

# Before any op of this process: a forked child must not inherit an OpenMP pool, it waits for threads that are gone.
torch.set_num_threads(1)

GRACE_S = 5.0  # how long the others may go on once one rank has failed
keeper: Callable[[Callable[..., Any], int, tuple[Any, ...], float], list[Outcome]] | None = None  # tests/kept_ranks.py


@dataclass(frozen=True)
class Outcome:
    """How one rank ended: its value, or its traceback, or (killed) neither."""

    rank: int
    status: int  # exit code; minus the signal's number when a signal ended it
    value: Any = None
    error: str = ""

    @property
    def ok(self) -> bool:
        return self.status == 0


def run_ranks(fn: Callable[..., Any], world: int, *args: Any, timeout_s: float = 60) -> list[Any]:
    """`fn(rank, world, *args)` on every rank; returns the ranks' values, or raises with the first failing traceback."""
    outcomes = keeper(fn, world, args, timeout_s) if keeper else rank_outcomes(fn, world, *args, timeout_s=timeout_s)
    failed = [o for o in outcomes if not o.ok]
    if failed:
        # Ranks that say why come first: the others were ended, or lost their peer, because of it.
        failed.sort(key=lambda o: (not o.error, "third_party/gloo" in o.error, o.rank))
        summary = ", ".join(f"rank {o.rank}: {_ending(o.status)}" for o in failed)
        raise AssertionError(f"{len(failed)} of {world} ranks failed ({summary})\n{failed[0].error}")
    return [o.value for o in outcomes]


def rank_outcomes(
    fn: Callable[..., Any], world: int, *args: Any, timeout_s: float = 60, grace_s: float = GRACE_S
) -> list[Outcome]:
    """Like `run_ranks`, for ranks that are meant to fail: how each one ended, whatever happened."""
    with started(fn, world, *args, timeout_s=timeout_s) as ranks:
        return ranks.outcomes(grace_s)


@contextmanager
def started(fn: Callable[..., Any], world: int, *args: Any, timeout_s: float = 60) -> Iterator[Ranks]:
    """Like `rank_outcomes`, for callers that do something to the ranks meanwhile; all have ended when this is left."""
    _warm()
    with tempfile.TemporaryDirectory(prefix="shoal-ranks-") as name:
        folder = Path(name)
        ranks = Ranks([_fork(fn, rank, world, args, folder, timeout_s) for rank in range(world)], folder, timeout_s)
        try:
            yield ranks
        finally:
            _kill(ranks.pids, ranks.statuses)


class Rows:
    """Rows of a table that ranks compute one after the other, those of as many ranks in one group: what is dear is
    an operation of DTensor's that a process sees for the first time. Where one fails, each row that is asked for is
    computed by ranks of its own, so that the failure is that row's.

        rows = Rows(work, {"ep 2": (2, sizes)})      # name → ranks, what else `work` is given
        rows["ep 2"]                                 # one value a rank

    `slow` names those that slow tests alone ask for: they are computed by groups of their own.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        rows: Mapping[str, tuple[int, Any]],
        timeout_s: float = 60,
        each_s: float = 10,
        slow: Collection[str] = (),
    ) -> None:
        assert set(slow) <= rows.keys()
        self._fn, self._rows, self._slow = fn, rows, frozenset(slow)
        self._timeout_s, self._each_s = timeout_s, each_s
        self._found: dict[tuple[int, bool], list[dict[str, Any]]] = {}  # ranks, slow → of each rank, what it found

    def __getitem__(self, name: str) -> list[Any]:
        world, given = self._rows[name]
        group = world, name in self._slow
        if group not in self._found:
            self._found[group] = self._together(*group)
        if self._found[group]:
            return [each[name] for each in self._found[group]]
        return run_ranks(self._fn, world, given, timeout_s=self._timeout_s)

    def _together(self, world: int, slow: bool) -> list[dict[str, Any]]:
        mine = {
            name: given for name, (ranks, given) in self._rows.items() if (ranks, name in self._slow) == (world, slow)
        }

        def work(rank: int, world: int) -> dict[str, Any]:
            return {name: self._fn(rank, world, given) for name, given in mine.items()}

        try:
            return run_ranks(work, world, timeout_s=self._timeout_s + self._each_s * len(mine))
        except (AssertionError, TimeoutError):
            return []


@dataclass
class Ranks:
    """Ranks that run."""

    pids: list[int]
    folder: Path
    timeout_s: float
    statuses: dict[int, int] = field(default_factory=dict)  # pid → how it ended
    answered: Callable[[int], bool] | None = None  # of ranks that are kept: whether one is done

    def outcomes(self, grace_s: float = GRACE_S) -> list[Outcome]:
        """Waits until all have ended, or been ended: `grace_s` after the first that fails."""
        timed_out = not self._wait(grace_s)
        stacks = _stacks(self.pids, self.statuses, self.folder) if timed_out else ""
        if self.answered is None or timed_out or any(self.statuses.values()):
            _kill(self.pids, self.statuses)
        if timed_out:
            raise TimeoutError(f"the ranks did not end within {self.timeout_s:g} s; where they stood:\n{stacks}")
        return [_outcome(rank, self.statuses[pid], self.folder) for rank, pid in enumerate(self.pids)]

    def _wait(self, grace_s: float) -> bool:
        """True when all have ended by themselves, or at most `grace_s` after the first of them failed."""
        watch = Stopwatch()
        failed_at = None
        while len(self.statuses) < len(self.pids):
            for rank, pid in enumerate(self.pids):
                if pid not in self.statuses:
                    ended, status = os.waitpid(pid, os.WNOHANG)
                    if ended:
                        self.statuses[pid] = os.waitstatus_to_exitcode(status)
                    elif self.answered is not None and self.answered(rank):
                        self.statuses[pid] = 0
            now = time.monotonic()
            if failed_at is None and any(self.statuses.values()):
                failed_at = now
            if failed_at is not None and now > failed_at + grace_s:
                return True  # the failure is the news, not those who wait for the failed one
            if watch.quiet_s() > self.timeout_s:
                return False
            time.sleep(0.005)
        return True


@cache
def _warm() -> None:
    """Pays, once and in the parent, for the imports and lazy initialisations that every rank would pay for."""
    import numpy as np
    import torch._dynamo
    import torch.distributed.fsdp
    import torch.distributed.tensor.parallel  # imported for its side effect: it is in memory before the fork

    from shoal.codec import codec

    codec("int8").encode(np.ones(64, np.float32))  # numba: a second of CPU time before the first function runs

    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def _fork(fn: Callable[..., Any], rank: int, world: int, args: tuple[Any, ...], folder: Path, timeout_s: float) -> int:
    def run() -> int:
        os.setpgid(0, 0)  # so that what the rank starts is killed with it
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        try:
            _child(fn, rank, world, args, folder, timeout_s)
        except BaseException:
            (folder / f"{rank}.error").write_text(traceback.format_exc())
            return 1
        return 0

    pid = fork(run)
    with contextlib.suppress(OSError):  # both sides set it: the group exists when either goes on
        os.setpgid(pid, pid)
    return pid


def one_rank(rank: int, world: int) -> dict[str, str]:
    """What the environment tells a rank."""
    of = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "OMP_NUM_THREADS": 1}
    return {**{name: str(value) for name, value in of.items()}, "GLOO_SOCKET_IFNAME": "lo"}


def _child(
    fn: Callable[..., Any], rank: int, world: int, args: tuple[Any, ...], folder: Path, timeout_s: float
) -> None:
    import torch.distributed as dist

    torch.set_num_threads(1)
    faulthandler.register(signal.SIGUSR1, file=open(folder / f"{rank}.stack", "w"), all_threads=True)  # noqa: SIM115
    os.environ.update(one_rank(rank, world))
    wait = timedelta(seconds=limit(timeout_s))
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world, timeout=wait)
    value = fn(rank, world, *args)
    (folder / f"{rank}.value").write_bytes(pickle.dumps(value))
    # Leaving without the barrier aborts now and then: a peer that is still in teardown loses its connection.
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def _stacks(pids: list[int], statuses: dict[int, int], folder: Path) -> str:
    alive = [(rank, pid) for rank, pid in enumerate(pids) if pid not in statuses]
    for _, pid in alive:
        os.kill(pid, signal.SIGUSR1)
    time.sleep(0.5)  # a signal handler has no event to wait for
    return "\n".join(f"rank {rank}:\n{_read(folder / f'{rank}.stack')}" for rank, _ in alive)


def _kill(pids: list[int], statuses: dict[int, int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)  # also what an ended rank has left running
        if pid not in statuses:
            statuses[pid] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _outcome(rank: int, status: int, folder: Path) -> Outcome:
    value = folder / f"{rank}.value"
    return Outcome(
        rank=rank,
        status=status,
        value=pickle.loads(value.read_bytes()) if status == 0 and value.exists() else None,
        error=_read(folder / f"{rank}.error"),
    )


def _read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def _ending(status: int) -> str:
    return f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit code {status}"
