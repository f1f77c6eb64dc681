"""The run directory: where everything about a run is. `runs/NAME/` in the workspace."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


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
    def identity_file(self) -> Path:
        """Code version, environment, seed and data fingerprints (JSON)."""
        return self.path / "identity.json"

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
        """Held with an exclusive lock by the supervisor while the run is alive (JSON: pid, host, started)."""
        return self.path / "supervisor.lock"

    def exists(self) -> bool:
        return self.journal_file.exists()
