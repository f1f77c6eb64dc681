"""Ranks that stay for the next call, for the tests of a file that ask for it (the fixture `kept_ranks`).

A fresh rank pays for its fork, for its group and above all for each operation of DTensor's that it sees for the first
time; one that has done it pays half as much for a run. A call begins with the environment, the folder and the seeds
that a fresh rank would have. A rank that fails ends them all, and the next call has fresh ones. While a test patches
something in this process its ranks are fresh ones, forked with it; what a rank patches in itself is undone after the
call. What else a call would leave behind (an operator that it registers), or what a process does only once, is for
fresh ranks: the fixture `fresh_ranks`.
"""

from __future__ import annotations

import gc
import os
import pickle
import random
import select
import signal
import socket
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests import ranks
from tests.ranks import Ranks, one_rank

_patches: list[pytest.MonkeyPatch] = []  # that have set an attribute, and perhaps have undone it
LONGEST_S = 3600.0  # that a rank waits for another; how long a call may take is the caller's to say


@contextmanager
def kept() -> Iterator[None]:
    """Meanwhile `run_ranks` keeps its ranks; all have ended when this is left."""
    crews, set_one = Crews(), pytest.MonkeyPatch.setattr

    def noted(patch: pytest.MonkeyPatch, *args: Any, **more: Any) -> None:
        _patches.append(patch)
        set_one(patch, *args, **more)

    ranks.keeper = crews.run
    pytest.MonkeyPatch.setattr = noted  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        pytest.MonkeyPatch.setattr = set_one  # type: ignore[method-assign]
        ranks.keeper = None
        crews.end()


class Crews:
    """One crew for each number of ranks."""

    def __init__(self) -> None:
        self._of: dict[int, _Crew] = {}

    def run(self, fn: Callable[..., Any], world: int, args: tuple[Any, ...], timeout_s: float) -> list[ranks.Outcome]:
        if any(patch._setattr for patch in _patches):
            return ranks.rank_outcomes(fn, world, *args, timeout_s=timeout_s)
        job = cloudpickle.dumps((fn, args, dict(os.environ), os.getcwd()))
        crew = self._of.get(world) or _Crew(world)
        self._of[world] = crew
        try:
            outcomes = crew.do(job, timeout_s)
        except BaseException:
            self._of.pop(world).end()
            raise
        if not all(o.ok for o in outcomes):
            self._of.pop(world).end()
        return outcomes

    def end(self) -> None:
        for crew in self._of.values():
            crew.end()


class _Crew:
    def __init__(self, world: int) -> None:
        ranks._warm()
        self._folder = tempfile.TemporaryDirectory(prefix="shoal-ranks-")
        folder = Path(self._folder.name)
        pairs = [socket.socketpair() for _ in range(world)]
        self._socks = [here for here, _ in pairs]

        def serve(rank: int, world: int) -> None:
            for i, (here, there) in enumerate(pairs):
                here.close()
                if i != rank:
                    there.close()
            _serve(pairs[rank][1], rank, world, folder)

        self._pids = [ranks._fork(serve, rank, world, (), folder, LONGEST_S) for rank in range(world)]
        for _, there in pairs:
            there.close()

    def do(self, job: bytes, timeout_s: float) -> list[ranks.Outcome]:
        for sock in self._socks:
            sock.sendall(len(job).to_bytes(8, "big") + job)
        working = Ranks(self._pids, Path(self._folder.name), timeout_s, answered=self._answered)
        return working.outcomes()

    def _answered(self, rank: int) -> bool:
        sock = self._socks[rank]
        return bool(select.select([sock], [], [], 0)[0]) and bool(sock.recv(1))

    def end(self) -> None:
        for sock in self._socks:
            sock.close()
        for pid in self._pids:
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            with suppress(ChildProcessError):  # it failed, and was waited for
                os.waitpid(pid, 0)
        self._folder.cleanup()


def _serve(sock: socket.socket, rank: int, world: int, folder: Path) -> None:
    """In a rank: does what it is told until nobody tells it anything."""
    _remember_groups()
    mine = {name: os.environ[name] for name in one_rank(rank, world)}
    seeds = torch.get_rng_state(), random.getstate(), np.random.get_state()
    while size := sock.recv(8, socket.MSG_WAITALL):
        fn, args, environment, folder_then = pickle.loads(sock.recv(int.from_bytes(size, "big"), socket.MSG_WAITALL))
        os.environ.clear()
        os.environ.update({**environment, **mine})
        os.chdir(folder_then)
        torch.set_rng_state(seeds[0])
        random.setstate(seeds[1])
        np.random.set_state(seeds[2])
        torch.set_num_threads(1)
        gc.freeze()  # else a run looks at all that there is before it begins (shoal.train.collect)
        (folder / f"{rank}.value").write_bytes(pickle.dumps(fn(rank, world, *args)))
        for patch in _patches:
            patch.undo()
        dist.barrier()  # none begins the next while another has not ended this one
        sock.sendall(b".")


def _remember_groups() -> None:
    """Runs of the same axes have the same groups: DTensor remembers, with an operation, the mesh that it first saw."""
    from shoal.parallel.groups import Groups

    made: dict[tuple[str, int, int, int], dist.ProcessGroup] = {}
    make = Groups.axis

    def axis(self: Groups, name: str, size: int, stride: int) -> dist.ProcessGroup:
        count = self.__dict__.setdefault("_asked", Counter())
        count[name, size, stride] += 1
        key = (name, size, stride, count[name, size, stride])
        if key not in made:
            made[key] = make(self, name, size, stride)
        return made[key]

    Groups.axis = axis  # type: ignore[method-assign]
