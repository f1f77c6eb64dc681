"""A job that was submitted: remembered as `job.json` in its run's directory, so that any shell finds it again."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from shoal import values
from shoal.errors import SetupError
from shoal.journal.rundir import RunDir
from shoal.plain_file import NotPlain, read_plain

FILE = "job.json"
RUN_FILE = "job.yaml"  # the run file as it was sent, beside job.json: the run directory may be out of sight from here


_MOST_BYTES = 1 << 20
_FIELDS: dict[str, Callable[[Any], Any]] = {
    "run": values.below,
    "backend": lambda said: _backend(said),
    "id": values.short,
    "submitted": lambda said: values.real(said, least=0, most=values.LAST_YEAR),
    "nodes": lambda said: values.whole(said, 1 << 20),
    "gpus": lambda said: values.whole(said, 1 << 20),
    "workspace": values.path,
    "bundle": values.short,
    "where": values.by_name(values.short, 100),
    "stopped": values.maybe(values.real),
}


def _backend(said: Any) -> str:
    """One of Shoal's, or `module:object`, a launcher of somebody's own."""
    own = isinstance(said, str) and re.fullmatch(r"[\w.]{1,100}:[\w.]{1,100}", said)
    return str(said) if own else values.one_of(said, ("local", "slurm", "kubernetes", "ray"))


@dataclass(frozen=True)
class Job:
    run: str  # the run's name
    backend: str
    id: str  # the scheduler's: a number, namespace/name, a submission id
    submitted: float  # unix time
    nodes: int
    gpus: int  # of each node
    workspace: str  # on the nodes
    bundle: str  # the SHA-256 of what travelled
    where: dict[str, str] = field(default_factory=dict)  # what finds the scheduler again: context, address, cluster
    stopped: float | None = None  # when a person told it to stop; a scheduler may forget that along with the job


def remember(job: Job, run_dir: RunDir) -> None:
    """Whole or not at all: a job that nobody remembers costs money."""
    run_dir.path.mkdir(parents=True, exist_ok=True)
    temporary = run_dir.path / f".{FILE}.{os.getpid()}"
    temporary.write_text(json.dumps(asdict(job), indent=2) + "\n")
    temporary.rename(run_dir.path / FILE)


def remembered(run_dir: RunDir) -> Job | None:
    """The newest job of that run; None when it was never launched."""
    path = run_dir.path / FILE
    try:
        job = values.made(Job, values.read_object(read_plain(path, _MOST_BYTES)), **_FIELDS)
        if run_dir.name.startswith(f"{job.run}.old-"):  # set aside: the job was of the name, not of this folder
            return None
        if job.run != run_dir.name:  # what is asked of the scheduler and shown would be another run's
            raise values.BadValue(f"it is of run '{job.run}'", "run")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except NotPlain as e:
        raise SetupError(f"{e}: move it away and launch the run again.") from None
    except values.BadValue as e:
        raise SetupError(f"{path} cannot be read ({e}); move it away and launch the run again.") from None
    return job


def launched(name: str, workspace: Path) -> Job | None:
    """The job of a run that a person names, if it was launched from here."""
    return remembered(RunDir.of(name, workspace))


def run_file(job: Job, workspace: Path) -> Path:
    """The run as it was sent last; `resume` and the cost of a run need it where its directory is out of sight."""
    return RunDir.of(job.run, workspace).path / RUN_FILE


def on(job: Job) -> str:
    """Who runs it and under what name: `local`, `slurm 123`, `kubernetes ns/name`."""
    return "local" if job.backend == "local" else f"{job.backend} {job.id}"
