"""What the person at the terminal sees: the live line, a sentence when something happens, and a summary at the end.

What happened is told by the journal's follower, the same one as in `shoal logs -f`; here is only what it cannot know.
"""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Callable
from math import isfinite
from pathlib import Path

from shoal.guard.echo import Echo
from shoal.guard.history import History
from shoal.journal.rundir import RunDir
from shoal.journal.suggested import command, needs_mending
from shoal.observe.follow import Follower
from shoal.spec.run import Run


class Console:
    """A screen that goes away or fails costs the run nothing: it goes on unseen."""

    def __init__(self, run_dir: RunDir, run: Run) -> None:
        self.run_dir, self.run = run_dir, run
        self._total = None if run.script is not None else run.steps
        self._follower: Follower | None = None
        self._blind = False
        self._echo: Echo | None = None

    def attempt(self, log: Path) -> None:
        """Another begins; `log` is that of rank 0, which is shown where it is a script's."""
        if self.run.script is not None:
            self._show(lambda: self._print(last=True))
            self._echo = Echo(log)

    def tick(self) -> None:
        """Brings the screen up to date with the journal. The first call must come after the session's `open`."""
        self._show(self._poll)

    def close(self) -> None:
        """Leaves the last live line on the screen."""
        self._show(self._end)

    def say(self, sentence: str) -> None:
        with contextlib.suppress(OSError):
            if self._follower:
                self._follower.console.say(f"shoal: {sentence}")
            else:
                print(f"shoal: {sentence}", file=sys.stderr, flush=True)

    def summary(self, status: str, reason: str, history: History) -> None:
        name = self.run_dir.name  # of a copy that is not the spec's
        loss = f", loss {history.loss:.4f}" if isinstance(history.loss, float) and isfinite(history.loss) else ""
        of = "" if self._total is None else f" of {self._total}"
        where = f"step {history.at}{of}{loss}"
        if status == "failed":
            self.say(f"run {name} failed at {where}: {reason}.")
        with contextlib.suppress(OSError):
            if status != "failed":
                print(f"run {name} {status} at {where}: {reason}.")
            print(f"  directory  {self.run_dir.path}")
            for line in self._next(status, history):
                print(f"  next       {line}")
            sys.stdout.flush()

    def _next(self, status: str, history: History) -> list[str]:
        report, resume = command("report", self.run_dir), command("resume", self.run_dir)
        if status == "done" and self.run.script is not None:
            return [f"{report}: where the time went"]
        if status == "done":
            sample = command("sample", self.run_dir, "--own-code" if self.run.own.computes else "")
            return [f"{report}: where the time went", f"{sample}: what it learnt"]
        # A session that could not write its own end (a full disk) has left the code of the one before it.
        close = None if history.open else history.last_close
        if status == "failed" and close and needs_mending(close.get("exit_code")):
            return [f"fix the cause above (docs/runbooks has what to do), then {resume}", f"{report}: what happened"]
        return [f"{report}: what happened", f"{resume}: go on"]

    def _poll(self) -> None:
        self._follower = self._follower or Follower(self.run_dir, self._total)
        self._print()
        self._follower.poll()

    def _print(self, last: bool = False) -> None:
        for line in self._echo.lines(last) if self._echo and self._follower else ():
            assert self._follower
            self._follower.console.say(line, sys.stdout)

    def _end(self) -> None:
        self._print(last=True)
        if self._follower:
            self._follower.close()
        self._follower, self._blind = None, True

    def _show(self, draw: Callable[[], None]) -> None:
        if self._blind:
            return
        try:
            draw()
        except OSError:  # the terminal is gone
            self._blind, self._follower = True, None
        except Exception as e:  # a defect of the display must not take the workers with it
            self._blind, self._follower = True, None
            where = traceback.extract_tb(e.__traceback__)[-1].name
            self.say(f"nothing more is shown ({type(e).__name__}: {e} in {where}); the run goes on, please report it.")
