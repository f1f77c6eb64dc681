"""Slurm's own commands: the one interface that every version and every site has."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence

from shoal.errors import SetupError, TransientError

PATIENCE_S = 120.0
_AWAY = ("unable to contact slurm controller", "socket timed out", "connection refused", "zero bytes were transmitted")
_STRANGERS = ("munge", "authentication", "protocol version", "could not establish a configuration source")


class Refused(Exception):
    """The command ran and said no; in its words."""


def ask(command: Sequence[str], text: str | None = None, env: Mapping[str, str] | None = None) -> str:
    """What it prints. Raises Refused for an answer that depends on what was asked, and ours for the rest."""
    name = command[0]
    try:
        done = subprocess.run(
            command,
            input=text,
            stdin=subprocess.DEVNULL if text is None else None,
            capture_output=True,
            text=True,
            errors="replace",
            env=env,
            timeout=PATIENCE_S,
        )
    except FileNotFoundError:
        raise SetupError(f"`{name}` is not on the PATH; go to a login node of the Slurm cluster.") from None
    except subprocess.TimeoutExpired:
        raise TransientError(f"`{name}` has not answered within {PATIENCE_S:g} s; try again later.") from None
    if done.returncode == 0:
        return done.stdout
    said = (done.stderr or done.stdout).strip()
    if not said:
        raise TransientError(f"`{name}` has failed without a word (it left with {done.returncode}); try again later.")
    plain = said.lower()
    last = said.splitlines()[-1]
    if any(sign in plain for sign in _AWAY):
        raise TransientError(f"Slurm's controller does not answer `{name}` ({last}); try again later.")
    if any(sign in plain for sign in _STRANGERS):
        raise SetupError(f"Slurm does not know this machine or user ({last}); ask those who run the cluster.")
    raise Refused(said)
