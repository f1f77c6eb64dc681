"""What a run must remember to be repeated: code version, environment and seed. Standard library only.

No environment variable is read, and what looks like a secret on the command line is masked.
"""

from __future__ import annotations

import os
import platform
import socket
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from shoal import __version__
from shoal.masking import mask_arguments
from shoal.spec.run import Run

# What can change a result, and what reads or writes the files of a run.
_PACKAGES = ("torch", "numpy", "pydantic", "safetensors", "tokenizers", "transformers", "datasets", "mlflow")
_GIT_TIMEOUT_S = 10.0


def identity(run: Run, argv: Sequence[str] | None = None, folder: str | os.PathLike[str] = ".") -> dict[str, Any]:
    """A plain dictionary, fit for JSON; `git` is that of the repository `folder` lies in, None outside of one."""
    return {
        "shoal": __version__,
        "git": git_state(Path(folder)),
        "python": platform.python_version(),
        "packages": {name: version for name in _PACKAGES if (version := _version(name)) is not None},
        "platform": platform.platform(),
        "hostname": socket.gethostname(),
        "cpus": os.cpu_count(),
        "seed": run.seed,
        "argv": mask_arguments(list(sys.argv if argv is None else argv)),
    }


def git_state(folder: Path) -> dict[str, Any] | None:
    """The commit that is checked out, and whether tracked files differ from it. None without git or a commit."""
    commit = _git(folder, "rev-parse", "--verify", "HEAD")
    if not commit:
        return None
    changes = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "dirty": None if changes is None else bool(changes)}


def _git(folder: Path, *arguments: str) -> str | None:
    command = ["git", "-C", str(folder), "--no-optional-locks", *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
