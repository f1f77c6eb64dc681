"""How an agent is started on a Ray node, and what it is told: pure, so that it can be looked at without a cluster."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shoal.errors import TRANSIENT, WRONG_ENVIRONMENT
from shoal.journal.rundir import RunDir
from shoal.launch.request import Request
from shoal.wire import text_of


def order(request: Request, secrets: Mapping[str, str], job: str, node: int, head: tuple[str, int]) -> dict[str, Any]:
    """For node.Node.start. `secrets` are values: they go into the agent's environment and nowhere else."""
    there = Path(request.there)
    code = request.bundle.place_in(there)
    about = {"SHOAL_NODE": str(node), "SHOAL_HEAD": text_of(head), "SHOAL_JOB": job, "PYTHONUNBUFFERED": "1"}
    return {
        "code": str(code),
        "journal": str(RunDir.of(request.name, there).journal_file),
        "script": script(request, str(code)),
        "env": {**request.plain_env(), **secrets, **about},
    }


def script(request: Request, code: str) -> str:
    """Ends as the agent does. The actor ($PPID) takes it along when it is killed."""
    lines = []
    for name, reference in request.launch.secrets.items():
        kind, _, path = reference.partition(":")
        if kind == "file":
            lines.append(f'{name}="$(cat {shlex.quote(path)})" || exit {WRONG_ENVIRONMENT}; export {name}')
    if any(name.startswith("code/") for name in request.bundle.files):
        lines.append(f"cd {shlex.quote(f'{code}/code')} || exit {WRONG_ENVIRONMENT}")
        lines.append('export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"')
    lines += setup(request)
    python = shlex.quote(request.python)
    # Else a missing program or package looks like any crash, and would be tried again and again.
    lines.append(f"{python} -c 'import shoal' || exit {WRONG_ENVIRONMENT}")
    lines.append(f'exec {python} -m shoal.guard.tied "$PPID" {shlex.join(request.agent(code))}')
    return "\n".join(lines) + "\n"


def setup(request: Request) -> list[str]:
    return [f"{{ {line}\n}} || exit {TRANSIENT}" for line in request.launch.setup]
