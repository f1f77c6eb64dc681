"""Who works on which block of a batch, agreed by files alone: nodes share a workspace, and perhaps nothing else.

A claim is a file that only one can create, `00017.1.claim`. It is never removed: who takes a block over from a runner
that is gone creates the next number, which again only one can. A runner says that it lives by counting up in its own
file. It is gone when it has said so, when it was of this machine and its process is no more, or when its count has
stood still for LEASE_S by the clock of the one who looks (clocks of nodes differ, and no two are compared). A runner
that cannot count up for less than that ends its units itself, before anybody else begins them.

A round is one order of a person to do what is left: all runners of one scheduler's job are of the same round. What has
failed for good is tried again in the next one, and only there.
"""

from __future__ import annotations

import json
import os
import re
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from shoal import values
from shoal.journal.units import Folder, Summary, created, read_summary
from shoal.plain_file import read_object
from shoal.processes import began, machine

BEAT_S = 10.0
LEASE_S = 120.0  # NFS may show an old file for a minute
FENCE_S = 60.0  # a runner that could not count up for so long ends its units
_MOST_BYTES = 1 << 20
_NAME = re.compile(r"(\d{5,8})\.(?:(\d{1,6})\.claim|(done)|jsonl)")


@dataclass(frozen=True)
class Runner:
    """What a runner says of itself."""

    id: str
    node: int
    host: str
    machine: str
    pid: int
    since: str  # its process's own, with which a number is one process
    at_once: int
    began: float
    beat: int = 0
    left: int | None = None  # the exit code, once it has nothing more to do
    running: list[int] = field(default_factory=list)

    @classmethod
    def me(cls, node: int, at_once: int) -> Runner:
        pid = os.getpid()
        id_ = f"{node}-{os.urandom(6).hex()}"
        return cls(id_, node, socket.gethostname(), machine(), pid, began(pid), at_once, time.time())

    @property
    def of_this_machine(self) -> bool:
        return bool(self.machine) and self.machine == machine()

    @property
    def process_is_gone(self) -> bool:
        return self.of_this_machine and began(self.pid) != self.since


_FIELDS: dict[str, Callable[[object], object]] = {
    "id": lambda said: values.below(said),
    "node": values.whole,
    "host": values.short,
    "machine": values.short,
    "pid": values.pid,
    "since": values.short,
    "at_once": values.whole,
    "began": lambda said: values.real(said, values.LAST_YEAR, 0),
    "beat": values.whole,
    "left": values.maybe(values.whole),
    "running": values.each(values.whole, 100_000),
}


def write_runner(folder: Folder, runner: Runner) -> None:
    """In place: who reads half of it reads it again, and a rename would cost a name more on every server."""
    (folder.runners / f"{runner.id}.json").write_text(json.dumps(asdict(runner), separators=(",", ":")) + "\n")


def read_runner(path: Path) -> Runner | None:
    try:
        return values.made(Runner, read_object(path, _MOST_BYTES), **_FIELDS)
    except (OSError, values.BadValue):
        return None


def runners(folder: Folder) -> list[Runner]:
    found = (read_runner(path) for path in sorted(folder.runners.glob("*.json")))
    return [runner for runner in found if runner is not None]


class Watch:
    """Who is gone, by what one process has seen."""

    def __init__(self, folder: Folder, lease_s: float = LEASE_S) -> None:
        self._folder, self._lease_s = folder, lease_s
        self._seen: dict[str, tuple[int, float]] = {}  # beat, and when it was new
        self._gone: set[str] = set()

    def gone(self, id_: str) -> bool:
        if id_ in self._gone:
            return True
        said = read_runner(self._folder.runners / f"{id_}.json") if id_ else None
        if said is not None and (said.left is not None or said.process_is_gone):
            self._gone.add(id_)
            return True
        beat, now = -1 if said is None else said.beat, time.monotonic()
        before = self._seen.get(id_)
        if before is None or before[0] != beat:
            self._seen[id_] = beat, now
            return False
        if now - before[1] > self._lease_s:
            self._gone.add(id_)
            return True
        return False


def round_of(folder: Folder, job: str | None) -> int:
    """The round of that job; another job, and a person without one, begin the next."""
    while True:
        numbers = sorted(int(path.name) for path in folder.rounds.iterdir() if path.name.isdecimal())
        newest = numbers[-1] if numbers else 0
        if job is not None and newest and _job_of(folder.rounds / f"{newest:05d}") == job:
            return newest
        if created(folder.rounds / f"{newest + 1:05d}", (json.dumps({"job": job}) + "\n").encode()):
            return newest + 1


def _job_of(path: Path) -> str | None:
    try:
        return values.field(read_object(path, 1 << 16), "job", values.maybe(values.short), None)
    except (OSError, values.BadValue):
        return None


@dataclass
class Block:
    """What its names in the folder say."""

    claims: int = 0  # the highest number
    done: bool = False


def listed(folder: Folder) -> dict[int, Block]:
    """All blocks that anybody has touched, in one look at the folder."""
    found: dict[int, Block] = {}
    with os.scandir(folder.blocks) as entries:
        for entry in entries:
            if named := _NAME.fullmatch(entry.name):
                block = found.setdefault(int(named[1]), Block())
                block.claims = max(block.claims, int(named[2] or 0))
                block.done = block.done or named[3] is not None
    return found


@dataclass(frozen=True)
class Claim:
    block: int
    number: int


class Claims:
    """The claims of one runner. `take` gives it blocks until there are none that it may have."""

    def __init__(self, folder: Folder, blocks: int, round_: int, me: Runner, first: int, watch: Watch) -> None:
        self._folder, self._round, self._me, self._watch = folder, round_, me, watch
        self._order = [*range(first, blocks), *range(first)]
        self._closed: set[int] = set()
        self._mine: set[int] = set()
        self._next: list[tuple[int, int]] = []  # (block, number of the claim), the next one last
        self._looked_at = float("-inf")
        self.held_by_others = 0  # at the last look

    def take(self, again_after_s: float) -> Claim | None:
        """None: there is none now. The folder is looked at again no sooner than after so many seconds."""
        while True:
            while self._next:
                block, number = self._next.pop()
                if block in self._mine:
                    continue
                said = json.dumps({"runner": self._me.id, "round": self._round}).encode()
                if created(self._path(block, number), said):
                    if self._is_closed(block):  # whoever had it was done between the look and this moment
                        continue
                    self._mine.add(block)
                    return Claim(block, number)
            if time.monotonic() - self._looked_at < again_after_s:
                return None
            self._look()
            if not self._next:
                return None

    def closed(self, block: int) -> None:
        self._mine.discard(block)
        self._closed.add(block)

    @property
    def all_closed(self) -> bool:
        return len(self._closed) == len(self._order)

    def _look(self) -> None:
        known, found, self.held_by_others = listed(self._folder), [], 0
        for block in self._order:
            if block in self._closed or block in self._mine:
                continue
            one = known.get(block, Block())
            if one.done and self._is_closed(block):
                continue
            if self._free(block, one):
                found.append((block, one.claims + 1))
            else:
                self.held_by_others += 1
        self._next = found[::-1]
        self._looked_at = time.monotonic()

    def _is_closed(self, block: int) -> bool:
        """Nothing of it is to be done in this round."""
        summary = self._summary(block)
        if summary is None or (summary.failed and summary.round < self._round):
            return False
        self._closed.add(block)
        return True

    def _free(self, block: int, one: Block) -> bool:
        if not one.claims:
            return True
        try:
            said = read_object(self._path(block, one.claims), 4096)
            who, round_ = values.field(said, "runner", values.below), values.field(said, "round", values.whole)
        except (OSError, values.BadValue):  # its maker is writing it, or died at that
            return self._watch.gone(f"claim-{block}-{one.claims}")
        summary = self._summary(block) if one.done else None
        if summary is not None and round_ <= summary.round:
            return True  # it was finished in an earlier round, with failures
        return self._watch.gone(who)

    def _summary(self, block: int) -> Summary | None:
        try:
            return read_summary(self._folder.done(block))
        except (OSError, values.BadValue):
            return None

    def _path(self, block: int, number: int) -> Path:
        return self._folder.blocks / f"{block:05d}.{number}.claim"


def leave(folder: Folder, me: Runner) -> None:
    with suppress(OSError):
        write_runner(folder, me)
