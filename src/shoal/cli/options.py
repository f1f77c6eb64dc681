"""Options that several verbs take, in the same words."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from shoal.errors import UsageError

if TYPE_CHECKING:
    from shoal.journal.rundir import RunDir

BACKENDS = ("local", "slurm", "kubernetes", "ray")  # of --on


def add_workspace(parser: argparse.ArgumentParser, holds: str = "runs/") -> None:
    parser.add_argument(
        "--workspace", metavar="DIR", help=f"the folder that holds {holds} (default: $SHOAL_WORKSPACE or here)"
    )


def no_script(run_dir: RunDir) -> None:
    """Refuses somebody's script, whose checkpoints and model only the script knows, and a batch, which has none."""
    if run_dir.is_batch:
        raise UsageError(
            f"run '{run_dir.name}' is a batch, which trains no model; `shoal report {run_dir.name}` shows it."
        )
    if run_dir.is_script:
        raise UsageError(
            f"run '{run_dir.name}' is a script: its checkpoints are its own, and Shoal cannot read a model from them; "
            f"`shoal report {run_dir.name}` shows the run."
        )


def no_swarm(run_dir: RunDir) -> None:
    """Refuses a peer of a swarm, whose history is the swarm's."""
    if run_dir.in_swarm:
        from shoal.journal.suggested import command

        raise UsageError(
            f"run '{run_dir.name}' is a peer of a swarm: {command('swarm join', run_dir)} starts it again; "
            "name=OTHER trains a run of your own."
        )
