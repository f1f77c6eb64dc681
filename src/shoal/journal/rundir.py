"""The run directory: where everything about a run is. `runs/NAME/` in the workspace."""

from __future__ import annotations

import fcntl
import os
import re
from dataclasses import dataclass
from pathlib import Path

from shoal.errors import SetupError, UsageError
from shoal.near import closest
from shoal.plain_file import NotPlain, is_plain, open_plain, read_plain

MOST_SPEC = 1 << 24  # bytes


def workspace(explicit: str | os.PathLike[str] | None = None) -> Path:
    """The folder that holds `runs/`: `--workspace`, else $SHOAL_WORKSPACE, else the current folder."""
    return Path(explicit or os.environ.get("SHOAL_WORKSPACE") or ".").resolve()


@dataclass(frozen=True)
class RunDir:
    path: Path

    @classmethod
    def of(cls, name: str, in_workspace: Path) -> RunDir:
        return cls(in_workspace / "runs" / name)

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def workspace(self) -> Path:
        return self.path.parent.parent

    @property
    def spec_file(self) -> Path:
        """The resolved run file: `shoal train` of this file is the same run."""
        return self.path / "run.yaml"

    @property
    def is_script(self) -> bool:
        """Whether it is somebody's script."""
        return self._has_section(b"script")

    @property
    def is_batch(self) -> bool:
        """Whether it is one command over many units."""
        return self._has_section(b"batch")

    def _has_section(self, name: bytes) -> bool:
        """The resolved run file is plain block YAML."""
        try:
            return re.search(rb"^%s:$" % name, read_plain(self.spec_file, MOST_SPEC), re.MULTILINE) is not None
        except OSError:
            return False

    @property
    def identity_file(self) -> Path:
        """Code version, environment, seed and data fingerprints (JSON)."""
        return self.path / "identity.json"

    @property
    def plan_file(self) -> Path:
        """What was expected of the run when it started (JSON)."""
        return self.path / "plan.json"

    @property
    def code(self) -> Path:
        """The run's own copy of the user's modules (`own`)."""
        return self.path / "code"

    @property
    def journal_file(self) -> Path:
        return self.path / "journal.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def logs(self) -> Path:
        """`attempt-000/rank-00000.log`, one folder an attempt."""
        return self.path / "logs"

    @property
    def track(self) -> Path:
        """What the mirrors remember: cursors, ids of remote runs."""
        return self.path / "track"

    @property
    def report(self) -> Path:
        return self.path / "report"

    @property
    def pid_file(self) -> Path:
        """Held with an exclusive lock by the supervisor, of a swarm's peer the node, while the run is alive (JSON: pid,
        host, started)."""
        return self.path / "supervisor.lock"

    @property
    def in_swarm(self) -> bool:
        """Whether it is a peer's, which its node starts and ends (`shoal swarm`)."""
        return (self.path / "swarm" / "charter.json").exists()

    def exists(self) -> bool:
        return is_plain(self.journal_file)

    def wrong(self) -> str | None:
        """What stands in the place of its journal, in words; None where a file does, or nothing."""
        try:
            os.close(open_plain(self.journal_file))
        except (FileNotFoundError, NotADirectoryError):
            return None if not self.journal_file.is_symlink() else "is a link to nothing"
        except NotPlain as e:
            return str(e.strerror)
        except OSError as e:
            return f"cannot be opened ({e.strerror})"
        return None

    def supervised(self) -> bool:
        """Whether a supervisor is alive: the kernel drops its lock the moment it dies, however it dies."""
        try:
            fd = open_plain(self.pid_file)
        except (FileNotFoundError, NotPlain):
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(fd)  # also gives back the shared lock, held for microseconds
        return False


def runs_in(folder: Path) -> list[RunDir]:
    """Every run of a workspace, by name."""
    return [run for run in _all_in(folder) if run.exists()]


def damaged_in(folder: Path) -> dict[str, str]:
    """Of the run directories that have no journal, but something else in its place: what, by their names."""
    found = ((run.name, run.wrong()) for run in _all_in(folder) if not run.exists())
    return {name: f"{RunDir.of(name, folder).journal_file.name}: {why}" for name, why in found if why is not None}


def _all_in(folder: Path) -> list[RunDir]:
    try:
        with os.scandir(folder / "runs") as entries:
            names = sorted(entry.name for entry in entries)
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [RunDir.of(name, folder) for name in names]


def find_run(name: str, folder: Path) -> RunDir:
    """The run a person means: its name in the workspace, or the path of its directory."""
    run = RunDir.of(name, folder)
    if run.exists():
        return run
    if "\0" not in name and (why := run.wrong()) is not None:
        raise SetupError(f"run '{name}' is damaged: {run.journal_file} {why}; restore it from a copy, or move it away.")
    if os.sep in name and (there := RunDir(Path(name).resolve())).exists():
        return there
    known = [run.name for run in runs_in(folder)]
    if near := closest(name, known):
        raise UsageError(f"there is no run '{name}' in {folder / 'runs'}; did you mean '{near}'?")
    hint = "`shoal ps` lists the runs" if known else "there are no runs there yet; --workspace names another folder"
    raise UsageError(f"there is no run '{name}' in {folder / 'runs'}; {hint}.")
