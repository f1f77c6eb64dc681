"""`torchrun -m shoal.train RUN.yaml [overrides]`: for those whose scripts and schedulers speak torchrun.

torchrun is then the supervisor: it starts the processes, restarts them and keeps their logs. Rank 0 keeps the run
directory as `shoal train` would, so that `ps`, `report`, `resume` and the trackers see no difference.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.decide.auto import Decided, decide
from shoal.decide.checks import local_inputs, trainable
from shoal.decide.length import with_steps
from shoal.decide.load import load
from shoal.errors import DONE, TOLD_TO_STOP, TRANSIENT, ShoalError, SpecError, UsageError
from shoal.guard import mirroring
from shoal.guard.began import began
from shoal.guard.begin import create, say_changed, write_spec, writing
from shoal.guard.beside import pulse_of_this_process, watch_beside
from shoal.guard.history import History
from shoal.guard.progress import of_attempt
from shoal.guard.workers import allocator_env, log_file
from shoal.journal import lock
from shoal.journal.journal import Journal
from shoal.journal.pulse import Pulse
from shoal.journal.rundir import RunDir, workspace
from shoal.masking import mask_arguments
from shoal.observe.follow import Follower
from shoal.spec import Run
from shoal.spec.begun import as_begun, differences
from shoal.spec.overrides import split_overrides
from shoal.spec.run import Train
from shoal.train.prolong import prolonged

if TYPE_CHECKING:
    from shoal.parallel.place import Place
    from shoal.train.worker import StopFlag

# Every rank finds the same wrong value. Rank 0 says it, and torchrun then ends the others; one that alone has found
# something (a node without the data) says it after so long.
RANK_0_FIRST_S = 20.0
STATUS = {DONE: "done", TOLD_TO_STOP: "stopped"}


def main(argv: list[str]) -> int:
    rest, overrides = split_overrides(argv)
    parser = _Parser(prog="torchrun -m shoal.train", description=__doc__)
    parser.add_argument("file", metavar="RUN.yaml")
    parser.add_argument("--workspace", metavar="DIR")
    args = parser.parse_args(rest)
    if "RANK" not in os.environ:
        raise UsageError("`python -m shoal.train` is for torchrun and the supervisor: use `shoal train RUN.yaml`.")
    run = load(args.file, overrides).run
    with joined(run, workspace(args.workspace)) as here:
        from shoal.train import worker

        here.code = worker.outcome(lambda: here.run, here.run_dir, here.stop, here.place, here.pulse)
    return here.code


@dataclass
class Here:
    """This process of a run that no supervisor has started. `code`: what it leaves with."""

    run: Run
    run_dir: RunDir
    place: Place
    stop: StopFlag
    pulse: Pulse
    code: int = TRANSIENT


@contextmanager
def joined(run: Run, folder: Path) -> Iterator[Here]:
    """Joins the processes that torchrun has started, or is the only one. Rank 0 keeps the run directory meanwhile."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    trainable(run)
    if run.fleet.islands > 1:
        raise SpecError(
            f"fleet.islands is {run.fleet.islands}, and torchrun starts one island: use `shoal train` or "
            "`shoal launch`, or set it to 1."
        )
    local_inputs(run)
    run_dir = RunDir.of(run.name, folder)
    if rank == 0 and run_dir.exists():
        run = as_begun(load(run_dir.spec_file).run, run)
    run = with_steps(run, run_dir.workspace, History.of(run_dir).step if rank == 0 else 0)
    decided = decide(run, run_dir.workspace, world)
    os.environ.update(allocator_env(os.environ))
    from shoal.parallel.agree import text_from_rank_0
    from shoal.parallel.place import join  # torch: what is wrong with the run file is said before
    from shoal.train.worker import StopFlag

    stop = StopFlag()
    pulse, pulses = pulse_of_this_process()
    with _session(run_dir, decided) if rank == 0 else nullcontext() as session:
        place = join(decided.run)
        (attempt,) = place.sum(session.attempt if session else 0)  # all ranks save under the same attempt
        os.environ["SHOAL_ATTEMPT"] = str(int(attempt))
        tell = of_attempt(session.journal.note, attempt=session.attempt) if session else None
        watch_beside(pulses, log_file(run_dir.logs, int(attempt), rank).parent, decided.run.guard, tell)
        # What the run has behind it stands in its directory, which rank 0 alone need see.
        text = text_from_rank_0(session.run.train.model_dump_json() if session else "")
        run = decided.run.model_copy(update={"train": Train.model_validate_json(text)})
        here = Here(run, run_dir, place, stop, pulse)
        try:
            yield here
        finally:
            if session:
                session.journal.append(
                    "close",
                    session=session.number,
                    status=STATUS.get(here.code, "failed"),
                    exit_code=here.code,
                    reason="all steps are done" if here.code == DONE else f"rank 0 left with exit code {here.code}",
                )


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]  # argparse says NoReturn; raising is that
        raise UsageError(f"{message}; it is `torchrun … -m shoal.train RUN.yaml [NAME=VALUE …]`.")


def say(e: ShoalError) -> None:
    """One sentence of one rank; torchrun's own summary, which is long, ends with it too."""
    if os.environ.get("RANK", "0") != "0":
        time.sleep(RANK_0_FIRST_S)
    print(f"shoal: {e}", file=sys.stderr, flush=True)
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        with suppress(OSError):
            Path(file).write_text(json.dumps({"message": f"shoal: {e}", "timestamp": int(time.time())}))


@dataclass(frozen=True)
class Session:
    run: Run  # with its past schedules
    journal: Journal
    number: int
    attempt: int


@contextmanager
def _session(run_dir: RunDir, decided: Decided) -> Iterator[Session]:
    """Rank 0's part: the lock, the files of the run directory, the mirror, and the session's first records."""
    with lock.hold(run_dir):
        with writing(run_dir):
            if not run_dir.exists():
                create(run_dir, decided.run)
            else:
                say_changed(decided.run, run_dir)
        before, history = load(run_dir.spec_file).run, History.of(run_dir)
        _refuse_another_history(before, decided.run)
        run = prolonged(before, decided.run, history.step)
        with writing(run_dir):
            if run != before:
                write_spec(run_dir, run)
        journal = Journal(run_dir.journal_file)
        session = Session(run, journal, history.sessions, history.attempts)
        journal.append(
            "open",
            session=session.number,
            pid=os.getpid(),
            host=socket.gethostname(),
            argv=mask_arguments(sys.argv),
            resumed=session.number > 0,
            began=began(),
        )
        for decision in decided.decisions:
            journal.append("decision", key=decision.key, value=decision.value, why=decision.why)
        journal.append("attempt", attempt=session.attempt, world=decided.world, pids=[os.getpid()])
        if mirroring.wanted(decided.run.track):
            mirroring.Mirror(run_dir, mirroring.default_command(run_dir))
        with _shown(run_dir, decided.run.steps):
            yield session


@contextmanager
def _shown(run_dir: RunDir, steps: int) -> Iterator[None]:
    """The live line, as `shoal train` shows it. A thread, because here the supervisor is a worker too."""
    follower, over = Follower(run_dir, steps), threading.Event()

    def follow() -> None:
        while not over.wait(0.5):
            follower.poll()
        follower.poll()
        follower.close()

    thread = threading.Thread(target=follow, name="shoal-follow", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(timeout=5.0)


def _refuse_another_history(before: Run, run: Run) -> None:
    if differ := [d for d in differences(before, run, auto_is_equal=True) if not d.safe]:
        named = "; ".join(str(d) for d in differ)
        raise SpecError(f"run '{run.name}' exists with another spec: {named}. Give this one another name (name=…).")
