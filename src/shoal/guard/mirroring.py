"""The tracking mirror as a process beside the run: started, not watched, waited for a little at the end."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Sequence

from shoal.journal.rundir import RunDir
from shoal.spec.run import Track

MODULE = "shoal.track.mirror"


def wanted(track: Track) -> bool:
    return bool(track.mlflow) or track.wandb != "off" or track.tensorboard


def default_command(run_dir: RunDir) -> list[str]:
    return [sys.executable, "-m", MODULE, str(run_dir.path), "--until-closed"]


class Mirror:
    """It has its own session and is not tied to us: when we are gone it may still be uploading."""

    def __init__(self, run_dir: RunDir, command: Sequence[str]) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        try:
            run_dir.logs.mkdir(parents=True, exist_ok=True)
            with open(run_dir.logs / "mirror.log", "ab", buffering=0) as out:
                self._process = subprocess.Popen(
                    list(command), stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
                )
        except OSError:
            return  # training goes on without it; `caught_up` will say that it is behind

    def caught_up(self, within_s: float, wait: Callable[[float], None], hurry: Callable[[], bool]) -> bool:
        """Whether it has ended well by then. The journal must be closed: that is what it waits for."""
        if self._process is None:
            return False
        deadline = time.monotonic() + within_s
        while self._process.poll() is None and not hurry() and (left := deadline - time.monotonic()) > 0:
            wait(min(left, 0.2))
        return self._process.poll() == 0
