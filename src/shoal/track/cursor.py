"""What a mirror remembers of one destination: how far it has uploaded, and the id of the run over there."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal import values
from shoal.journal.rundir import RunDir
from shoal.plain_file import NotPlain, read_object


@dataclass
class Cursor:
    """`offset` is a byte of the journal: everything before it has been uploaded to `address`."""

    path: Path
    address: str
    offset: int = 0
    remote: dict[str, Any] = field(default_factory=dict)  # ids that the destination gave

    @classmethod
    def load(cls, run_dir: RunDir, name: str, address: str) -> Cursor:
        path = run_dir.track / f"{name}.json"
        try:
            known = read_object(path)
        except (FileNotFoundError, NotPlain, values.BadValue):
            return cls(path, address)
        if known.get("address") != address:  # the run file names another server now: it has received nothing yet
            return cls(path, address)
        try:
            offset = values.field(known, "offset", values.whole, 0)
            return cls(path, address, offset, values.field(known, "remote", values.fields_of, {}))
        except values.BadValue:  # what was sent is sent again: destinations take a step twice
            return cls(path, address)

    def save(self) -> None:
        """Atomic: a crash leaves the old cursor or the new one, never half of one."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.path.with_suffix(f".tmp{os.getpid()}")
        with open(temporary, "w") as f:
            json.dump({"address": self.address, "offset": self.offset, "remote": self.remote}, f)
            f.flush()
            os.fsync(f.fileno())
        os.replace(temporary, self.path)

    def forget(self) -> None:
        """The run over there is gone: begin again."""
        self.offset, self.remote = 0, {}


@contextmanager
def alone(run_dir: RunDir, name: str) -> Iterator[bool]:
    """Whether we are the only mirror of this run to this destination (a lock that the kernel frees when we die)."""
    run_dir.track.mkdir(parents=True, exist_ok=True)
    fd = os.open(run_dir.track / f"{name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True
    finally:
        os.close(fd)
