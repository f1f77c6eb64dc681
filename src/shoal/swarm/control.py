"""How commands reach a node that runs: files in its folder, and the run's lock, which says whether it does.

`shoal swarm leave` and `revoke` write a file; the node looks once a second (`obey`), and the file is gone when it has
been obeyed. A file survives what a socket does not, and needs no port.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from shoal.errors import UsageError
from shoal.plain_file import read_object
from shoal.swarm.config import NodeConfig
from shoal.swarm.roster import Roster
from shoal.values import BadValue, table

MOST_COMMAND = 1 << 20


@contextmanager
def alone(config: NodeConfig) -> Iterator[None]:
    """This process is the peer's node, as long as it lives: it holds the run as a supervisor does, so `shoal ps` and
    `shoal stop` know it too."""
    config.folder.mkdir(parents=True, exist_ok=True)
    fd = os.open(config.run_dir.pid_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(
                f"this peer is running already; `shoal swarm status {config.run_dir.name}` shows it, "
                f"`shoal swarm leave {config.run_dir.name}` ends it."
            ) from None
        os.ftruncate(fd, 0)
        about = {"pid": os.getpid(), "host": socket.gethostname(), "started": time.time()}
        os.pwrite(fd, json.dumps(about).encode() + b"\n", 0)
        yield
    finally:
        os.close(fd)


def running(config: NodeConfig) -> bool:
    return config.run_dir.supervised()


def tell(config: NodeConfig, what: str, **fields: Any) -> None:
    """To the running node; it obeys within a second or so."""
    config.commands.mkdir(parents=True, exist_ok=True)
    name = f"{time.time_ns()}-{secrets.token_hex(4)}"
    part = config.commands / f".{name}"
    part.write_text(json.dumps({"what": what, **fields}))
    part.rename(config.commands / f"{name}.json")


def obey(config: NodeConfig, roster: Roster) -> bool:
    """Does what was asked for; True: the peer is to leave. To be called once a second or so."""
    leave = False
    try:
        files = sorted(p for p in config.commands.iterdir() if p.suffix == ".json")
    except FileNotFoundError:
        return False
    for file in files:
        with contextlib.suppress(OSError, BadValue):
            said = read_object(file, MOST_COMMAND)
            if said.get("what") == "leave":
                leave = True
            elif said.get("what") == "revoke":
                roster.take([], [table(said.get("revocation"), 64)])  # checked there: only the organiser's counts
        file.unlink(missing_ok=True)
    return leave


def forget_commands(config: NodeConfig) -> None:
    """At a start: what was said to an earlier node is over."""
    with contextlib.suppress(FileNotFoundError):
        for file in config.commands.iterdir():
            file.unlink(missing_ok=True)
