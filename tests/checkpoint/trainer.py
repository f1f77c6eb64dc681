"""A trainer of a few milliseconds a step that saves as the real one does: for tests that do things to it.

Its state after a step is a function of the step, so that whoever restores it can tell whether it is that state, bit for
bit. All else is real: the takeover, the saves, the journal, the memory tier.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import psutil
import torch
from tests import patience
from tests.checkpoint.states import same_bits
from tests.ranks import Ranks, run_ranks, started

from shoal import checkpoint
from shoal.checkpoint import fault_points
from shoal.checkpoint.find import Found, Roots
from shoal.checkpoint.setup import Setup
from shoal.checkpoint.store import Folder, Store, store_of
from shoal.errors import DONE, TOLD_TO_STOP, ShoalError
from shoal.journal.journal import Journal, Record, records
from shoal.journal.rundir import RunDir
from shoal.parallel.place import Place
from shoal.spec.run import Run
from shoal.train import saves as train_saves
from shoal.train import takeover

MARK = "SHOAL_TEST_RUN"  # in the environment of all its processes
Tensors = dict[str, torch.Tensor]
Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Plan:
    """A run, and what goes wrong in the life that is started with it."""

    folder: Path
    steps: int = 40
    every: int = 5
    world: int = 2
    background: bool = True
    memory: bool = True
    step_s: float = 0.015
    kib: int = 64  # of state that each rank writes
    keep: int = 2
    remote: str | None = None
    local: bool = True  # else the checkpoints are in `remote` alone
    patience_s: float = 20.0
    again_s: float = 0.2  # after a save that failed
    fault: str = ""
    fault_at: int = 12  # after this step, which is saved
    fault_times: int = 1  # over all processes

    @property
    def run_dir(self) -> RunDir:
        return RunDir.of("fake", self.folder)

    @property
    def root(self) -> Path:
        return self.run_dir.checkpoints

    @property
    def tokens(self) -> Path:
        return self.folder / "tokens"

    @property
    def ram(self) -> Path:
        return self.folder / "ram"

    def spec(self) -> Run:
        about = {"every": self.every, "keep": self.keep, "background": self.background}
        about |= {"remote": self.remote, "local": self.local}
        return Run.model_validate(
            {
                "name": "fake",
                "data": {"train": "none"},
                "train": {"steps": self.steps},
                "checkpoint": about | {"memory": "auto" if self.memory else "off"},
                "guard": {"grace_s": 6.0},
            }
        )


class State:
    """What a rank has: something of its own, and something that all have."""

    def __init__(self, rank: int, world: int, kib: int) -> None:
        self.world = world
        self.found: Found | None = None
        ramp = torch.arange(kib * 256, dtype=torch.float32)
        self._tensors = {f"own.{rank}": ramp + rank, "shared": torch.arange(97, dtype=torch.float32)}

    def tensors(self) -> Tensors:
        return self._tensors

    def holders(self) -> dict[str, list[int]]:
        own: dict[str, list[int]] = {f"own.{rank}": [rank] for rank in range(self.world)}
        return own | {"shared": list(range(self.world))}

    def extra(self, step: int) -> dict[str, Any]:
        return {"step": step}

    def restore(self, roots: Roots, tell: Callable[..., None], at_most: int | None = None) -> Found | None:
        assert at_most is None
        self.found = checkpoint.restore(roots, self.tensors())
        return self.found

    def update(self, step: int) -> None:
        for t in self._tensors.values():
            t.mul_(0.999).add_(step + 1)

    def after(self, steps: int) -> Tensors:
        """The state as it must be then, of a fresh one."""
        for step in range(steps):
            self.update(step)
        return self._tensors


def train(rank: int, world: int, plan: Plan) -> int:
    """One rank, from what it finds to the end; returns an exit code, as the real worker does."""
    os.environ |= {MARK: str(plan.folder), "SHOAL_MEMORY": str(plan.ram)}
    if plan.fault:
        os.environ |= {"SHOAL_FAULT": plan.fault, "SHOAL_FAULT_TOKENS": str(plan.tokens)}
        fault_points.fault = fault_points.parse(plan.fault)
    train_saves.AGAIN_S = plan.again_s
    takeover.Setup = partial(Setup, patience_s=plan.patience_s, backoff_s=0.1)  # type: ignore[misc]
    told: list[int] = []
    for number in (signal.SIGTERM, signal.SIGUSR2):
        signal.signal(number, lambda number, frame: told.append(number))
    tell = Journal(_log(plan, rank)).note
    try:
        stopped = _train(Place(rank, world, torch.device("cpu")), plan, told, tell)
        code = TOLD_TO_STOP if stopped else DONE
    except ShoalError as e:
        tell("error", text=str(e))
        code = e.exit_code
    tell("exit", code=code)
    return code


def _train(place: Place, plan: Plan, told: list[int], tell: Callable[..., None]) -> bool:
    """Whether it was told to stop."""
    rank, world = place.rank, place.world
    state = State(rank, world, plan.kib)
    told_by_0 = tell if rank == 0 else lambda kind, **fields: None
    restored, saves = takeover.take_over(plan.spec(), plan.run_dir, place, state, told_by_0)  # type: ignore[arg-type]
    first, found = restored or 0, state.found
    good = same_bits(state.tensors(), State(rank, world, plan.kib).after(first))
    where = None if found is None else f"{found.store!r}/{found.name}"
    tell("start", step=first, world=world, good=good, found=where)
    try:
        for step in range(first, plan.steps):
            began = time.perf_counter()
            if plan.fault and step == plan.fault_at:
                saves.now(step, must=True)  # there is something to lose
                for i in range(plan.fault_times if rank == 0 else 0):
                    (plan.tokens / f"{i:03d}").touch()
            stop, *votes = place.sum(float(bool(told)), *saves.votes(step))
            saves.heard(*votes)
            if stop:
                saves.now(step, must=False)
                return True
            time.sleep(plan.step_s)
            saves.settle()
            state.update(step)
            tell("step", step=step + 1)
            if step + 1 < plan.steps:
                saves.after(step + 1)
            tell("took", step=step + 1, seconds=round(time.perf_counter() - began, 4))
        if first < plan.steps:
            saves.now(plan.steps, must=True)
    finally:
        saves.close()
    return False


def _log(plan: Plan, rank: int) -> Path:
    return plan.run_dir.journal_file if rank == 0 else plan.folder / f"rank-{rank}.jsonl"


def log(plan: Plan, kind: str, rank: int = 0) -> list[Record]:
    path = _log(plan, rank)
    return [r for r in records(path) if r["kind"] == kind] if path.exists() else []


@contextmanager
def running(plan: Plan, timeout_s: float = 60) -> Iterator[Ranks]:
    """A start of the workers, to do things to; the trainers have ended when this is left, the persisters may go on."""
    for folder in (plan.tokens, plan.run_dir.path):
        folder.mkdir(parents=True, exist_ok=True)
    with started(train, plan.world, plan, timeout_s=timeout_s) as ranks:
        yield ranks


def life(plan: Plan, timeout_s: float = 60) -> list[int]:
    """A start of the workers until they end, or one of them dies: then, as the supervisor would, it ends the others.
    Exit codes, or minus the number of a signal."""
    with running(plan, timeout_s) as ranks:
        return codes_of(ranks)


def codes_of(ranks: Ranks) -> list[int]:
    return [o.value if o.ok else o.status for o in ranks.outcomes(grace_s=0.5)]


def persisters(plan: Plan) -> dict[int, int]:
    """rank → pid, of those that live."""
    found = {}
    for process in psutil.process_iter(["cmdline", "environ", "status"]):
        about = process.info
        if "shoal.checkpoint.persister" in (about["cmdline"] or []) and about["status"] != psutil.STATUS_ZOMBIE:
            environment = about["environ"] or {}
            if environment.get(MARK) == str(plan.folder):
                found[int(environment["RANK"])] = process.pid
    return found


until = partial(patience.until, every_s=0.005)


def faults_met(plan: Plan) -> int:
    return len(list(plan.tokens.glob("*.used")))


def published_step(plan: Plan) -> int:
    """The newest that the trainer knows to be published; -1: none."""
    return max((r["step"] for r in log(plan, "checkpoint")), default=-1)


def last_step(plan: Plan) -> int:
    steps = log(plan, "step")
    return int(steps[-1]["step"]) if steps else 0


def asked(plan: Plan, question: Callable[[Store], Answer]) -> Answer:
    """The store that the run saves in. In a process of its own if that is a bucket: what has asked one has threads, and
    is not forked any more."""
    if plan.local:
        return question(Folder(plan.root))
    answer: Answer = run_ranks(lambda rank, world: question(store_of(f"{plan.remote}/fake")), 1)[0]
    return answer


def entries(plan: Plan) -> list[str]:
    return asked(plan, lambda store: sorted(store.list()))


def left_in_memory(plan: Plan) -> list[str]:
    return sorted(str(path.relative_to(plan.ram)) for path in plan.ram.rglob("*") if path.is_file())
