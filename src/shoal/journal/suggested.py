"""The commands that Shoal suggests, so that they work as typed where the reader is."""

from __future__ import annotations

import shlex

from shoal.errors import WRONG_ENVIRONMENT, WRONG_USAGE
from shoal.journal.rundir import RunDir, workspace


def command(verb: str, run_dir: RunDir, values: str = "") -> str:
    """`shoal VERB NAME VALUES`, with `--workspace` unless the run would be found without it."""
    typed = f"`shoal {verb} {run_dir.name} {values}".rstrip()
    folder = run_dir.workspace.resolve()
    return f"{typed}`" if folder == workspace() else f"{typed} --workspace {shlex.quote(str(folder))}`"


def needs_mending(exit_code: object) -> bool:
    """Whether a run that ended with this code would end the same way again."""
    return exit_code in (WRONG_USAGE, WRONG_ENVIRONMENT)


def going_on(run_dir: RunDir, exit_code: object) -> str:
    """How a run that has ended before its last step goes on."""
    resume = command("swarm join" if run_dir.in_swarm else "resume", run_dir)
    return f"fix the cause (docs/runbooks), then {resume}" if needs_mending(exit_code) else f"{resume} goes on"
