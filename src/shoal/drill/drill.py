"""One drill: a calm run, the same run broken at the planned moments, and the verdict."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal.decide.load import load
from shoal.drill import means
from shoal.drill.account import Account
from shoal.drill.live import Live, Silent
from shoal.drill.means import Broken, Stage
from shoal.drill.measure import Measured, Samples, measure, samples
from shoal.drill.plan import Planned, environment
from shoal.errors import DONE, TOLD_TO_STOP, TransientError, UsageError
from shoal.journal.journal import Record, records
from shoal.journal.rundir import RunDir
from shoal.spec import Run
from shoal.spec.begun import differences

CALM, BROKEN = "calm", "drill"
RESTARTS = ("kill", "oom", "bitflip")  # of a run without islands: the workers start again
RESUMES = ("coordinator", "preempt")  # … and here somebody has to start the run again
# A drill touches nothing of the user's but the data: no tracker, no store of checkpoints.
ALONE = (
    "track.mlflow=false",
    "track.wandb=off",
    "track.tensorboard=false",
    "checkpoint.remote=",
    "checkpoint.local=true",
)
SETTLED_STEPS = 2  # after a fault, before the next one


@dataclass(frozen=True)
class Asked:
    file: str
    overrides: list[str]
    run: Run
    planned: list[Planned]
    baseline: Path | None
    pause_s: float
    patience_s: float
    pace_s: float = 0.0
    tick: Callable[[], None] = lambda: None


@dataclass
class Result:
    steps: int
    planned: int
    ended: bool  # by itself, at its last step
    how: str
    faults: list[Measured] = field(default_factory=list)
    samples: Samples = field(default_factory=lambda: Samples([], [], 0))
    digest: str | None = None
    calm_digest: str | None = None
    account: Account | None = None
    calm: Account | None = None
    has_to_be_same: bool = False  # the digest: whoever came and went has added up in the same order
    could_be_same: bool = False  # islands that add up in whatever order they are there
    paced: bool = False  # its steps took longer than they would have

    @property
    def same(self) -> bool | None:
        return None if None in (self.digest, self.calm_digest) else self.digest == self.calm_digest

    @property
    def lost_samples(self) -> int:
        return sum(n for _, n in self.samples.lost)

    @property
    def repeated_samples(self) -> int:
        return sum(n for _, n in self.samples.repeated)

    @property
    def goodput(self) -> float | None:
        return self.account.ledger.goodput if self.account and not self.paced else None

    @property
    def accounted(self) -> bool:
        return all(account.right for account in (self.account, self.calm) if account)

    @property
    def passed(self) -> bool:
        all_done = len(self.faults) == self.planned
        lost = self.lost_samples or self.repeated_samples or (self.has_to_be_same and not self.same)
        return self.ended and all_done and not lost and self.accounted

    def as_json(self) -> dict[str, Any]:
        return {
            "passed": self.passed,
            "ended": self.ended,
            "how": self.how,
            "steps": self.steps,
            "planned": self.planned,
            "faults": [fault.as_json() for fault in self.faults],
            "lost_samples": self.lost_samples,
            "repeated_samples": self.repeated_samples,
            "left_out_samples": self.samples.left_out,
            "lost_steps": sum(fault.lost_steps for fault in self.faults),
            "digest": self.digest,
            "calm_digest": self.calm_digest,
            "same_digest": self.same,
            "goodput": self.goodput,
            "calm_goodput": self.calm.ledger.goodput if self.calm else None,
            "ledger": self.account.as_json() if self.account else None,
            "calm_ledger": self.calm.as_json() if self.calm else None,
        }


@contextmanager
def own_folder(workspace: Path, keep: Path | None, whose: str = "drill") -> Iterator[Path]:
    """A workspace for the runs of a drill or a check: gone afterwards, unless it is to be kept."""
    if keep is not None:
        if keep.exists() and any(keep.iterdir()):
            raise UsageError(f"{keep} is not empty: a {whose} keeps its runs in a folder of its own.")
        keep.mkdir(parents=True, exist_ok=True)
        yield keep.resolve()
        return
    folder = Path(tempfile.mkdtemp(prefix=f".{whose}-", dir=workspace))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def drill(asked: Asked, folder: Path) -> Result:
    memory = Path(tempfile.mkdtemp(prefix="shoal-drill-", dir=os.environ.get("SHOAL_MEMORY") or _shared_memory()))
    try:
        env = {"SHOAL_MEMORY": str(memory)}
        calm, wall_s = (_told(asked.baseline, asked.run), None) if asked.baseline else _calm(asked, folder, env)
        return _broken(asked, folder, memory, env, calm, Account.of(calm, wall_s))
    finally:
        shutil.rmtree(memory, ignore_errors=True)


def _shared_memory() -> str | None:
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def _told(baseline: Path, run: Run) -> list[Record]:
    """An earlier run of the same spec that nobody broke."""
    run_dir = RunDir(baseline.resolve())
    if not run_dir.exists():
        raise UsageError(f"{baseline} is no run directory; --baseline takes that of a finished run, runs/NAME.")
    steps = run.steps
    differ = [d for d in differences(load(run_dir.spec_file).run, run, auto_is_equal=True) if not d.safe]
    if differ := [d for d in differ if d.key != "name"]:
        raise UsageError(f"{baseline} is another run: {'; '.join(map(str, differ))}.")
    told = records(run_dir.journal_file)
    if not any(r["kind"] == "finished" and r["step"] == steps for r in told):
        raise UsageError(f"{baseline} has not finished step {steps}, so there is nothing to compare with.")
    return told


def _begin(asked: Asked, folder: Path, name: str, env: dict[str, str]) -> Live:
    args = ["train", asked.file, "--workspace", str(folder), *asked.overrides, *ALONE, f"name={name}"]
    return Live(RunDir.of(name, folder), args, env, asked.patience_s, asked.tick)


def _calm(asked: Asked, folder: Path, env: dict[str, str]) -> tuple[list[Record], float | None]:
    live = _begin(asked, folder, CALM, env)
    try:
        live.say("first the run that nobody breaks")
        live.wait(live.over)
        if live.code != DONE:
            raise TransientError(f"the run fails without any fault (exit code {live.code}): {live.last_words()}")
    finally:
        live.end()
    return live.records, live.wall_s


def _broken(
    asked: Asked, folder: Path, memory: Path, env: dict[str, str], calm: list[Record], calm_account: Account
) -> Result:
    faults_env = {**means.environment(folder, asked.pace_s), **environment(asked.planned)}
    live = _begin(asked, folder, BROKEN, env | faults_env)
    stage = Stage(live, folder, memory, asked.pause_s)
    faults, how = broken(asked.planned, stage, live, asked.patience_s)
    digest = next((r.get("digest") for r in reversed(live.records) if r["kind"] == "finished"), None)
    ended = not how and live.finished()
    missed = len(asked.planned) - len(faults)
    if missed and ended:
        how = f"{missed} of {len(asked.planned)} faults came too late: more train.steps or a --pace leave room for them"
    read = samples(live.records, calm)
    order_is_fixed = asked.run.fleet.islands == 1 or asked.run.fleet.deterministic
    return Result(
        steps=asked.run.steps,
        planned=len(asked.planned),
        ended=ended,
        how=how or ("" if ended else f"exit code {live.code}: {live.last_words()}"),
        faults=measure(faults, live.records, calm, asked.pace_s),
        samples=read,
        digest=digest,
        calm_digest=next((r.get("digest") for r in reversed(calm) if r["kind"] == "finished"), None),
        account=Account.of(live.records, live.wall_s) if live.records else None,
        calm=calm_account,
        paced=asked.pace_s > 0,
        # A GPU's own kernels may add up in any order; batches that were left out make another model.
        has_to_be_same=order_is_fixed and not read.left_out and _on_cpu(calm) and _on_cpu(live.records),
        could_be_same=not order_is_fixed,
    )


def _on_cpu(records: Sequence[Record]) -> bool:
    return all(r.get("device") == "cpu" for r in records if r["kind"] == "start")


def broken(plan: Sequence[Planned], stage: Stage, live: Live, patience_s: float) -> tuple[list[Broken], str]:
    """The faults that were done to a run until it was over, and how it came that no more of it was seen, if so."""
    faults: list[Broken] = []
    how = ""
    try:
        live.say(f"now with {len(plan)} fault{'s' * (len(plan) > 1)}")
        for planned in plan:
            if not until_ready(planned, stage, faults):
                break
            if fault := means.do(planned, stage):
                faults.append(fault)
                live.say(f"fault {len(faults)} of {len(plan)} done: {fault.kind} of {fault.victim}")
                begin_again_if_needed(stage, fault)
        while not live.wait(live.finished) and goes_on(live, faults):
            pass
        live.wait(live.over, patience_s)
    except Silent as e:
        how = str(e)
    finally:
        live.end()
    return faults, how


def until_ready(planned: Planned, stage: Stage, faults: Sequence[Broken]) -> bool:
    """Waits for the moment; False where the run is over before it."""
    live = stage.live
    while not live.wait(lambda: _settled(stage, faults) and live.step >= planned.step - (planned.kind == "nan")):
        if not goes_on(live, faults):
            return False
    if live.finished():
        return False
    steps = live.of("step")
    took_s = float(steps[-1]["t"]) - float(steps[-1].get("begin") or steps[-1]["t"]) if steps else 0.0
    if planned.kind != "nan":
        time.sleep(min(planned.moment * took_s, stage.pause_s))
    return True


def _settled(stage: Stage, faults: Sequence[Broken]) -> bool:
    """Whether the run has recovered from the last fault: it takes steps again, and everybody is back."""
    live = stage.live
    if live.over():
        return False
    if not faults:
        return True
    last, islands = faults[-1], bool(live.members())
    since = last.until
    if last.kind in (*RESTARTS, *RESUMES) and not islands:
        started = live.of("start", since=last.t)
        if not started:
            return False
        since = float(started[-1]["t"])
    if last.kind == "disk-full" and not live.of("checkpoint", since=last.until):
        return False  # the save is tried again, or given up and the next one is not there yet
    everybody = set(range(_islands(live))) - stage.gone if islands else set()
    steps = live.of("step", since=since)[-SETTLED_STEPS:]
    return len(steps) == SETTLED_STEPS and all(everybody <= set(step.get("islands") or ()) for step in steps)


def _islands(live: Live) -> int:
    return 1 + max((int(r["island"]) for r in live.of("island")), default=0)


def begin_again_if_needed(stage: Stage, fault: Broken) -> None:
    """The part of the scheduler: what was lost or taken away is started again."""
    live = stage.live
    if fault.kind not in RESUMES or (live.members() and live.members() != [fault.island]):
        return  # the other islands go on, and all of them do without a supervisor
    live.wait(live.over, None if not live.members() else live.patience_s)
    if live.code == -signal.SIGKILL and fault.seen is None:
        fault.seen = time.time()
    if not live.finished() and live.over():
        fault.resumed = True
        live.resume()


def goes_on(live: Live, faults: Sequence[Broken]) -> bool:
    """Whether a run that has ended is started again: it was told to stop, or its supervisor was killed, by a drill."""
    if live.finished() or not faults or faults[-1].kind not in RESUMES:
        return False
    if live.code not in (TOLD_TO_STOP, -signal.SIGKILL):
        return False
    if not faults[-1].resumed:
        faults[-1].resumed = True
        live.resume()
        return True
    return False
