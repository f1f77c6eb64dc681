"""A run that is somebody's script, as its supervisor sees it: how each attempt is started, and from where it goes on.
Never imports torch."""

from __future__ import annotations

import os
import re
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shoal.errors import DONE, TRANSIENT
from shoal.guard.classify import Failure
from shoal.guard.history import History, newest_checkpoint_step
from shoal.guard.workers import Start
from shoal.journal.rundir import RunDir
from shoal.observe.causes import advice_of
from shoal.script.accelerate import environment
from shoal.script.checkpoints import Found, newest_whole
from shoal.script.file import PROBE
from shoal.script.horovod.needed import PATH as HOROVOD
from shoal.spec.run import Run
from shoal.spec.script import CHECKPOINT, Script

# What no second try can mend: Python says it of a package that is not installed.
_NOT_INSTALLED = re.compile(r"^(?:ModuleNotFoundError|ImportError)\b")


class Scripted:
    def __init__(self, run_dir: RunDir, run: Run, script: Script) -> None:
        self._run_dir, self._run, self._script = run_dir, run, script
        self._port: socket.socket | None = None
        self._found: Found | None = None
        self._attached = 0  # the step of the newest checkpoint of `shoal.attach`
        self._verified: set[Found] = set()

    def start(self, attempt: int, world: int, note: Callable[..., Any]) -> Start:
        self._attached = newest_checkpoint_step(self._run_dir)
        self._found = self._looked_for(note) if attempt and not self._attached else None
        self.close()
        self._port = reserved()
        resume = [] if self._found is None else [w.replace(CHECKPOINT, self._found.path) for w in self._script.resume]
        command = [sys.executable, self._script.path, *self._script.args, *resume]
        env = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._port.getsockname()[1]),
            "GROUP_RANK": "0",
            "GROUP_WORLD_SIZE": "1",
            "TORCHELASTIC_RUN_ID": self._run.name,
            "TORCHELASTIC_RESTART_COUNT": str(attempt),
            "TORCHELASTIC_MAX_RESTARTS": str(self._run.guard.restarts),
            "TORCHELASTIC_USE_AGENT_STORE": "False",  # rank 0 has the store
            "SHOAL_SCRIPT": str(self._run_dir.path),
            **self._threads(),
            **(environment(self._script.accelerate) if self._script.accelerate is not None else {}),
            **self._script.env,
            **self._probe(),
            **self._path(),
        }
        folder = Path(self._script.folder) if self._script.folder else None
        return Start(command, env, folder, script=True)

    def started(self, attempt: int, world: int, note: Callable[..., Any]) -> None:
        """What rank 0 of Shoal's own training writes."""
        known: dict[str, Any] = {"resumed_from": self._attached} if self._attached else {}
        known |= {} if self._found is None else {"resumed_from": self._found.step, "path": self._found.path}
        note("start", attempt=attempt, step=self._first_step, world=world, script=self._script.path, **known)

    def goes_on_from(self) -> str:
        if step := newest_checkpoint_step(self._run_dir):
            return f"from step {step}"
        if not self._script.resume:
            return "anew (script.resume is empty)"
        found = newest_whole(self._run_dir, self._script, self._verified)
        return f"from {found.path}" if found else "anew (there is no whole checkpoint)"

    def done(self) -> str:
        return "the script has ended with exit code 0"

    def stopped(self, history: History, saved: bool) -> str:
        return "its processes have ended"

    def retried(self, failure: Failure) -> bool:
        return failure.retry and not (failure.cause == "exception" and _NOT_INSTALLED.match(failure.evidence))

    def exit_code(self, failure: Failure) -> int:
        """The script's own, where it has one."""
        return failure.exit_code if failure.exit_code not in (None, DONE) else TRANSIENT

    def advice(self, failure: Failure) -> str:
        return advice_of(failure.cause, script=True) or failure.advice

    def close(self) -> None:
        if self._port is not None:
            self._port.close()
        self._port = None

    @property
    def _first_step(self) -> int:
        return self._attached if self._found is None else self._found.step or 0

    def _looked_for(self, note: Callable[..., Any]) -> Found | None:
        """The checkpoint that a restart goes on from; what is to be said of it is said."""
        if not self._script.resume:
            note("warning", text="the script begins anew: script.resume does not say how it goes on")
            return None
        found = newest_whole(self._run_dir, self._script, self._verified, lambda text: note("warning", text=text))
        if found is None:
            note("warning", text="the script begins anew: there is no whole checkpoint of this run")
            return None
        at = "of a step that nobody saw" if found.step is None else f"of step {found.step}"
        note("decision", key="script.resume", value=found.path, why=f"the newest whole checkpoint, {at}")
        return found

    def _threads(self) -> dict[str, str]:
        """What the shell says counts, where the run file says nothing."""
        said = os.environ.get("OMP_NUM_THREADS")
        return {"OMP_NUM_THREADS": said} if said and self._run.resources.threads == "auto" else {}

    def _probe(self) -> dict[str, str]:
        if not self._script.probe:
            return {}
        return {"SHOAL_PROBE_OF": str(os.getpid()), "SHOAL_PROBE_STEP": str(self._first_step)}

    def _path(self) -> dict[str, str]:
        """What stands in front of where Python looks for modules."""
        first = [str(PROBE)] if self._script.probe else []
        first += [str(HOROVOD)] if self._script.horovod is True else []
        before = self._script.env.get("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
        return {"PYTHONPATH": os.pathsep.join([*first, *([before] if before else [])])} if first else {}


def reserved() -> socket.socket:
    """A port for rank 0's store, bound and not listened on: with SO_REUSEADDR, as torch sets it, the rank can listen
    there, and the kernel gives it to nobody who asks for any port."""
    both = socket.has_dualstack_ipv6()
    held = socket.socket(socket.AF_INET6 if both else socket.AF_INET)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if both:
        held.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    held.bind(("", 0))
    return held
