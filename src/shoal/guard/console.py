"""What the person at the terminal sees: the live line while it trains, a sentence when something happens, a summary."""

from __future__ import annotations

import sys

from shoal.guard.history import History
from shoal.spec.run import Run
from shoal.track.rundir import RunDir


class Console:
    """Sentences go to stderr, the summary to stdout."""

    def __init__(self, run_dir: RunDir, run: Run) -> None:
        self.run_dir, self.run = run_dir, run

    def tick(self) -> None:
        """Brings the live line up to date."""

    def say(self, sentence: str) -> None:
        print(f"shoal: {sentence}", file=sys.stderr, flush=True)

    def summary(self, status: str, reason: str, history: History) -> None:
        self.close()
        name, steps = self.run.name, self.run.train.steps
        loss = f", loss {history.loss:.4f}" if isinstance(history.loss, float) else ""
        print(f"run {name} {status} at step {history.step} of {steps}{loss}: {reason}.")
        print(f"  directory  {self.run_dir.path}")
        if status == "done":
            print(f"  next       `shoal report {name}` shows where the time went, `shoal sample {name}` lets it speak")
        else:
            print(f"  next       `shoal report {name}` shows what happened, `shoal resume {name}` goes on")
        sys.stdout.flush()

    def close(self) -> None:
        """Ends the live line."""
