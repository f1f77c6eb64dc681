"""The crash campaign: a run is hurt at a named point of a save or at a random moment, started again, and judged.

Judged is what a user would see. The next start finds a checkpoint that is no older than the last one that the trainer
knew to be published, and that is bit for bit the state of its step; the run then goes to its end; what the dead ones
left is swept up; no process stays behind.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
from tests.checkpoint.trainer import (
    Plan,
    asked,
    codes_of,
    faults_met,
    last_step,
    left_in_memory,
    life,
    log,
    persisters,
    published_step,
    running,
    until,
)

from shoal import checkpoint
from shoal.checkpoint import Name
from shoal.checkpoint.ledger import LEDGER
from shoal.checkpoint.names import MANIFEST
from shoal.checkpoint.saver import RESTARTS
from shoal.checkpoint.store import Store, has
from shoal.errors import DONE

TRAINER = ("snapshot", "snapshot-done")
EVERY_RANK = ("write", "written", "read-back", "part")
RANK_0 = ("before-manifest", "before-publish", "published", "before-delete")
BACKGROUND, AT_ONCE, S3 = "in the background", "at once", "in the background, to S3 alone"
# Who dies there.
ONE, EACH, ALL, MACHINE = "the process", "each that takes over", "all processes", "the machine"
STORM = "in the background, at random moments"


@dataclass(frozen=True)
class Case:
    """kill -9 at a point of a save."""

    point: str
    rank: int
    way: str  # of saving
    who: str

    @property
    def kills_the_trainer(self) -> bool:
        return self.who in (ALL, MACHINE) or self.way == AT_ONCE or self.point in TRAINER

    def __str__(self) -> str:
        return f"{self.point}@{self.rank} {self.way}, {self.who}"


@dataclass(frozen=True)
class Verdict:
    kind: str
    point: str
    lost: int  # steps that were taken and had to be taken again
    wrong: str = ""  # what a user would complain about

    @property
    def good(self) -> bool:
        return not self.wrong


def cases() -> Iterator[Case]:
    """Every point in each process that reaches it, for both ways of saving."""
    for rank in (0, 1):
        of_this_rank = (*EVERY_RANK, *(RANK_0 if rank == 0 else ()))
        for point in (*TRAINER, *of_this_rank, "done"):
            for who in (ONE, ALL, MACHINE):
                yield Case(point, rank, BACKGROUND, who)
            if point not in (*TRAINER, "part", "published", "done"):  # what is done is not done again
                yield Case(point, rank, BACKGROUND, EACH)
        for point in of_this_rank:
            yield Case(point, rank, AT_ONCE, ONE)


def cases_on_s3() -> Iterator[Case]:
    for rank in (0, 1):
        for point in (*TRAINER, *EVERY_RANK, *(RANK_0 if rank == 0 else ()), "done"):
            for who in (ONE, MACHINE):
                yield Case(point, rank, S3, who)


def run_of(folder: Path, way: str = BACKGROUND, bucket: str | None = None) -> Plan:
    """Slow enough that the saves in the background are not all of the run."""
    background, local = way != AT_ONCE, way != S3
    return Plan(folder, step_s=0.015 if background else 0.002, background=background, local=local, remote=bucket)


def judged(case: Case, folder: Path, bucket: str | None = None) -> Verdict:
    calm = replace(run_of(folder, case.way, bucket), memory=case.who != MACHINE)
    freeze = ":sleep=60" if case.who in (ALL, MACHINE) else ""  # long enough for the others to be killed, too
    times = 1 + RESTARTS if case.who == EACH else 1
    plan = replace(calm, fault=f"{case.point}@{case.rank}{freeze}", fault_times=times)
    with Complaints() as complaints:
        codes = _killed_there(plan) if freeze else life(plan)
        stood, published = last_step(plan), published_step(plan)
        complaints.unless(faults_met(plan), "the fault was never reached")
        if case.kills_the_trainer:
            complaints.unless(-signal.SIGKILL in codes, f"the trainers ended with {codes}")
        else:
            _training_went_on(case, plan, codes, complaints)
        found = next_start(replace(calm, steps=plan.steps + 10), published, complaints)
        if case.who == ALL and case.point in RANK_0:  # then all parts are there
            complaints.unless(found > plan.fault_at, "what was in memory was not used")
        return Verdict(f"{case.way}, {case.who}", case.point, max(0, stood - found), str(complaints))
    return Verdict(f"{case.way}, {case.who}", case.point, 0, str(complaints))


def _killed_there(plan: Plan) -> list[int]:
    with running(plan) as ranks:
        until(lambda: faults_met(plan))
        for pid in [*ranks.pids, *persisters(plan).values()]:
            _kill(pid)
        return codes_of(ranks)


def _training_went_on(case: Case, plan: Plan, codes: list[int], complaints: Complaints) -> None:
    """A save that fails is no end: it is told, and tried again."""
    complaints.unless(codes == [DONE] * plan.world, f"a save that failed has ended training: {codes}")
    complaints.unless(published_step(plan) == plan.steps, f"the last save is that of step {published_step(plan)}")
    if case.rank == 0 and case.point != "done":  # after that there is nothing to be tried again
        again = [r for r in log(plan, "warning") if "tried again" in r["text"]]
        complaints.unless(again, "nobody was told that the persister died")
    failed = [r["error"] for r in log(plan, "checkpoint_failed")]
    if case.who == EACH and case.point != "before-delete":  # which is after the save
        complaints.unless(failed, "a save that failed for good was not journaled")
    if case.who == ONE:
        complaints.unless(not failed, f"another persister could not finish the save: {failed}")


def storm(seed: int, folder: Path, lives: int) -> Iterator[Verdict]:
    """Somebody is killed at a random moment, again and again; a verdict for each life that follows, to the end."""
    chance = random.Random(seed)
    calm = replace(run_of(folder), steps=1_000_000, step_s=0.005)
    victim, published, stood = "nobody", -1, 0
    for _ in range(lives):
        plan = replace(calm, every=chance.choice((2, 3, 7)), memory=chance.random() < 0.5)
        starts, steps = (len(log(plan, kind)) for kind in ("start", "step"))
        with running(plan) as ranks, Complaints() as complaints:
            until(lambda n=starts, p=plan: all(len(log(p, "start", rank)) > n for rank in (0, 1)))
            lost, before = max(0, stood - _found_good(plan, published, complaints)), victim
            until(lambda n=steps, p=plan: len(log(p, "step")) > n)
            victim = chance.choice(("trainer 0", "trainer 1", "persister 0", "persister 1", "all"))
            _strike(victim, plan, ranks.pids, chance, complaints)
            published, stood = published_step(plan), last_step(plan)
        yield Verdict(STORM, before, lost, str(complaints))
    with Complaints() as complaints:
        found = next_start(replace(calm, steps=stood + 10), published, complaints)
        yield Verdict(STORM, victim, max(0, stood - found), str(complaints))
        return
    yield Verdict(STORM, victim, 0, str(complaints))


def _strike(victim: str, plan: Plan, trainers: list[int], chance: random.Random, complaints: Complaints) -> None:
    who, _, rank = victim.partition(" ")
    time.sleep(chance.uniform(0.0, 1.5))
    if who == "trainer":
        _kill(trainers[int(rank)])
    elif who == "persister":  # training goes on, and is then ended as a machine's death would
        _kill(persisters(plan).get(int(rank)))
        time.sleep(chance.uniform(0.0, 0.7))
        complaints.unless(all(map(_alive, trainers)), "a persister's death has ended training")
    if who != "trainer":
        for pid in [*trainers, *persisters(plan).values()]:
            _kill(pid)


def next_start(plan: Plan, published: int, complaints: Complaints) -> int:
    """Starts the run again, to its end; the step from which it went on."""
    codes = life(plan)
    complaints.unless(codes == [DONE] * plan.world, f"the next start ended with {codes}")
    found = _found_good(plan, published, complaints)
    last, there, left = asked(plan, _what_is_there)
    complaints.unless(last == plan.steps, f"the last that is good is that of step {last}")
    complaints.unless(not left, f"left behind: {left}")
    complaints.unless(there <= plan.keep, f"{there} are there, and {plan.keep} are to be kept")
    with contextlib.suppress(AssertionError):
        until(lambda: not persisters(plan), within_s=10)
    complaints.unless(not persisters(plan), f"persisters that stay behind: {persisters(plan)}")
    complaints.unless(not left_in_memory(plan), f"left in memory: {left_in_memory(plan)}")
    return found


def _what_is_there(store: Store) -> tuple[int, int, list[str]]:
    """(the newest that is good to the last byte, how many there are, what is no checkpoint)"""
    found = checkpoint.newest(store, verify=True)
    names = [name for name in store.list() if name != LEDGER]
    left = [name for name in names if Name.of(name) is None or not has(store, f"{name}/{MANIFEST}")]
    return -1 if found is None else found.step, len(names), left


def _found_good(plan: Plan, published: int, complaints: Complaints) -> int:
    starts = [log(plan, "start", rank) for rank in range(plan.world)]
    if not all(starts):
        complaints.unless(False, "no rank has started")
        return 0
    found = starts[0][-1]["step"]
    complaints.unless(all(s[-1]["good"] for s in starts), f"what was found of step {found} is not the state of it")
    complaints.unless(found >= published, f"step {published} was published, and {found} was found")
    return int(found)


class Complaints:
    def __init__(self) -> None:
        self._words: list[str] = []

    def __enter__(self) -> Complaints:
        return self

    def __exit__(self, kind: object, e: BaseException | None, trace: object) -> bool:
        if isinstance(e, AssertionError | TimeoutError):
            self._words.append(f"{type(e).__name__}: {e}")
            return True
        return False

    def unless(self, fine: object, otherwise: str) -> None:
        if not fine:
            self._words.append(otherwise)

    def __str__(self) -> str:
        return "; ".join(self._words)


def _kill(pid: int | None) -> None:
    if pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
