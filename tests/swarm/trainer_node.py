"""A node in ten lines, for tests of the trainer: says what the test says, over a real socket, and hears the answers."""

from __future__ import annotations

import hashlib
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shoal.journal.rundir import RunDir
from shoal.parallel.place import join
from shoal.spec import dump
from shoal.spec.run import Run
from shoal.swarm.round_record import canonical
from shoal.swarm.trainer import worker
from tests.patience import Stopwatch, limit
from tests.ranks import Ranks, started

Message = dict[str, Any]
WAIT_S = 60.0


class Node:
    """One peer's: `peer` is its name, `run_dir` its own."""

    def __init__(self, peer: str, run: Run, workspace: Path, world: int = 1) -> None:
        self.peer, self.world = peer, world
        self.run_dir = RunDir.of(run.name, workspace / peer)
        self.folder = self.run_dir.path / "swarm"
        self.folder.mkdir(parents=True, exist_ok=True)
        self.run = worker.closed(run, self.run_dir.workspace, world)
        self.run_dir.spec_file.write_text(dump(self.run))
        self._path = self.folder / "t"
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self._path))
        self._listener.listen(1)
        self._listener.settimeout(limit(WAIT_S))
        self.aside: list[Message] = []  # heard, and not waited for

    @contextmanager
    def trainer(self) -> Iterator[Ranks]:
        """Forked warm, on as many ranks as the peer has."""

        def rank(rank: int, world: int) -> None:
            os.environ[worker.SOCKET], os.environ[worker.FOLDER] = str(self._path), str(self.folder)
            worker.work(self.run_dir, self.run, join(self.run))

        with started(rank, self.world, timeout_s=120) as ranks:
            self._sock, _ = self._listener.accept()
            self._sock.settimeout(limit(WAIT_S))
            self._lines = self._sock.makefile("rb")
            self.ranks = ranks
            self.ready = self.hear("ready")
            yield ranks

    def say(self, kind: str, **fields: Any) -> None:
        self._sock.sendall(json.dumps({"kind": kind, **fields}).encode() + b"\n")

    def hear(self, kind: str) -> Message:
        watch = Stopwatch()
        while watch.quiet_s() < WAIT_S and (line := self._lines.readline()):
            message: Message = json.loads(line)
            if message["kind"] == kind:
                return message
            assert message["kind"] != "failed", message
            self.aside.append(message)
        raise AssertionError(f"{self.peer}'s trainer never said {kind}; its last words were {self.aside[-3:]}")

    def close(self) -> None:
        self._listener.close()

    # A round, as a node would lead it.

    def begin(self, round: int, first: int, count: int, done: int = 0, seconds: float = 30.0) -> None:
        self.say("begin", round=round, ranges=[[first, first + count]], samples_done=done, seconds=seconds)

    def end(self, round: int) -> Message:
        """The part, which comes before the end where all samples are used."""
        self.say("end", round=round)
        early = [m for m in self.aside if (m["kind"], m.get("round")) == ("part", round)]
        part = early[0] if early else self.hear("part")
        assert part["round"] == round
        return part


def record(round: int, parts: dict[str, Message], done: int = 0) -> Message:
    """That takes these parts."""
    took = []
    for peer, part in parts.items():
        data = Path(part["path"]).read_bytes()
        keys = ("tokens", "targets", "steps", "used", "loss")
        took.append({"peer": peer, "blob": hashlib.sha256(data).hexdigest(), **{key: part[key] for key in keys}})
    return {"kind": "round", "round": round, "took": took, "ledger": {"done": done}}


def name_of(said: Message) -> str:
    return hashlib.sha256(canonical(said)).hexdigest()


def paths(parts: dict[str, Message]) -> dict[str, str]:
    return {peer: part["path"] for peer, part in parts.items()}
