"""Starts the processes that are profiled, waits for them, and leaves their traces in a folder. No torch."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from shoal.errors import TOLD_TO_STOP, WRONG_ENVIRONMENT, WRONG_USAGE, SetupError, Stopped, TransientError, UsageError
from shoal.guard.classify import Failure
from shoal.guard.signals import Signals
from shoal.guard.surroundings import Surroundings
from shoal.guard.watch import watch
from shoal.guard.workers import Workers, threads_for
from shoal.spec import Run, dump

ASKED, SPEC, RESULT, LOGS = "asked.json", "run.yaml", "profile.json", "logs"
NOT_WRITTEN = "cannot write the trace"  # how a process says that the disk is full
GRACE_S = 10.0  # to end a step after Ctrl-C


def trace_file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05d}.json.gz"


@contextmanager
def own_folder(asked: str | None, workspace: Path, name: str) -> Iterator[Path]:
    """A folder of the profile's own; gone again if nothing comes of it."""
    folder = Path(asked).absolute() if asked else workspace / "profiles" / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder} is not an empty folder; --out takes one of the profile's own.")
    missing = [p for p in (folder, *folder.parents) if not p.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise SetupError(f"cannot make the folder {folder} ({e.strerror}); choose another --out or --workspace.") from e
    try:
        yield folder
    except BaseException as e:
        if not isinstance(e, _Broken):
            shutil.rmtree(folder, ignore_errors=True)
            for parent in missing[1:]:
                with suppress(OSError):  # somebody else has put something there meanwhile
                    parent.rmdir()
        raise


class _Broken(TransientError):
    """Something failed that its log explains best: the folder stays."""


def trace(run: Run, world: int, workspace: Path, folder: Path, steps: int, warmup: int) -> list[Path]:
    """The traces of all ranks. Raises what a process died of, or Stopped."""
    (folder / SPEC).write_text(dump(run))
    (folder / ASKED).write_text(json.dumps({"workspace": str(workspace), "steps": steps, "warmup": warmup}))
    command = [sys.executable, "-m", "shoal.profile", str(folder)]
    with Signals() as signals:
        around = Surroundings.now(folder)
        threads = threads_for(run.resources.threads, world)
        with closing(Workers(command, world, 0, folder / LOGS, threads)) as workers:
            ended = watch(workers, signals, around, GRACE_S, lambda number: None, lambda: None)
    if ended.stop_signal is not None:
        raise Stopped("stopped before the trace was whole; nothing was kept.")
    if ended.failure is not None:
        raise _error(ended.failure, folder)
    shutil.rmtree(folder / LOGS)
    (folder / ASKED).unlink()
    return [trace_file(folder, rank) for rank in range(world)]


def _error(failure: Failure, folder: Path) -> Exception:
    said = failure.evidence.rstrip(".")
    if failure.exit_code == WRONG_USAGE:
        return UsageError(f"{said}.")
    if failure.exit_code == WRONG_ENVIRONMENT:
        return SetupError(f"{said}.")
    if failure.exit_code == TOLD_TO_STOP:
        return Stopped(f"{said}.")
    if said.startswith(NOT_WRITTEN):
        return TransientError(f"{said}.")
    return _Broken(f"rank {failure.rank} failed ({failure.cause}): {said}; {failure.advice} ({folder / LOGS}).")
