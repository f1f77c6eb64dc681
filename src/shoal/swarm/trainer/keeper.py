"""Keeps the swarm's weights beside the training: decodes, judges, adds up, hashes and encodes in a thread of its own.

The thread does what it is given in order, and alone touches theta and what is pending. The training goes on meanwhile;
it asks at each step whether something is to be added to its weights (`moves`), and waits for the thread only before it
hands in a part (`settle`): the part is told from the weights and theta, and must not miss a move that is under way.
"""

from __future__ import annotations

import json
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from shoal.plain_file import read_object
from shoal.swarm.outer import state_files
from shoal.swarm.outer.exact import F32
from shoal.swarm.outer.merge import merge
from shoal.swarm.outer.outer import Applied, Outer
from shoal.swarm.outer.peer_side import Local, Move
from shoal.swarm.outer.robust import Verdict, learned
from shoal.swarm.ranges import parse
from shoal.values import real, whole

MOST_SUM = 1e300
KEPT = 16  # own parts that may still be returned
Paths = Mapping[str, str]


@dataclass
class Work:
    """What went into a part."""

    used: list[list[int]] = field(default_factory=list)
    tokens: int = 0
    steps: int = 0
    seconds: float = 0.0
    loss_sum: float = 0.0  # over targets
    targets: int = 0

    @staticmethod
    def of(s: dict[str, Any]) -> Work:
        """As it was written beside a part."""
        return Work(
            used=[list(r) for r in parse(s.get("used"))],
            tokens=whole(s.get("tokens")),
            steps=whole(s.get("steps")),
            seconds=real(s.get("seconds")),
            loss_sum=real(s.get("loss_sum"), MOST_SUM, -MOST_SUM),
            targets=whole(s.get("targets")),
        )

    def add(self, other: Work) -> None:
        self.used = [*other.used, *self.used]
        self.tokens, self.steps = self.tokens + other.tokens, self.steps + other.steps
        self.seconds += other.seconds
        self.loss_sum, self.targets = self.loss_sum + other.loss_sum, self.targets + other.targets

    def said(self) -> dict[str, Any]:
        loss = round(self.loss_sum / self.targets, 6) if self.targets else None
        used = _joined(self.used)
        done = {"tokens": self.tokens, "targets": self.targets, "steps": self.steps}
        return {**done, "used": used, "seconds": self.seconds, "loss": loss}


Say = Callable[..., None]
Told = Callable[[Mapping[str, Any], list[Verdict], float], None]  # (record, verdicts, seconds): a record is applied


class Keeper:
    def __init__(self, outer: Outer, folder: Path, say: Say, told: Told) -> None:
        self._say, self._told = say, told
        self._own = folder / "parts"
        self._own.mkdir(parents=True, exist_ok=True)
        self._take(outer)
        self._moves: list[Move] = []
        self._lock = threading.Lock()
        self._wrong: BaseException | None = None
        self._jobs: queue.Queue[Callable[[], None]] = queue.Queue()
        threading.Thread(target=self._run, name="shoal-swarm-keeper", daemon=True).start()

    @property
    def outer(self) -> Outer:
        """Only while nothing is under way."""
        return self._outer

    def take(self, outer: Outer) -> None:
        """Begins anew from a state. Only while nothing is under way."""
        self._take(outer)

    def _take(self, outer: Outer) -> None:
        self._outer, self._local = outer, Local(outer)
        self._carried = Work()  # of parts that were returned

    # The training's side.

    def moves(self) -> list[Move]:
        """What is to be added to the weights by now."""
        self._raise()
        with self._lock:
            moves, self._moves = self._moves, []
        return moves

    def settle(self) -> list[Move]:
        """Waits until nothing is under way."""
        self._jobs.join()
        return self.moves()

    def hand_in(self, round: int, weights: F32, work: Work) -> None:
        """After `settle`, with its moves added. `weights` are the caller's no more."""
        self._jobs.put(lambda: self._hand_in(round, weights, work))

    def apply(self, record: Mapping[str, Any], name: str, parts: Paths) -> None:
        self._jobs.put(lambda: self._apply(record, name, parts))

    def merge(
        self, record: Mapping[str, Any], name: str, base: Path, digest: str | None, branches: Sequence[Any]
    ) -> None:
        self._jobs.put(lambda: self._merge(record, name, base, digest, branches))

    def returned(self, round: int) -> None:
        self._jobs.put(lambda: self._returned(round))

    def save(self, folder: Path) -> None:
        self._jobs.put(lambda: self._save(folder))

    # The thread's.

    def _run(self) -> None:
        while True:
            job = self._jobs.get()
            try:
                if self._wrong is None:
                    job()
            except BaseException as e:
                self._wrong = e
            finally:
                self._jobs.task_done()

    def _raise(self) -> None:
        if self._wrong is not None:
            raise self._wrong

    def _hand_in(self, round: int, weights: F32, work: Work) -> None:
        work.add(self._carried)
        payload = self._local.part(round, weights)
        self._carried = Work()
        path = self._own / f"{round}.part"
        _whole(path, payload)
        _whole(path.with_suffix(".json"), json.dumps(asdict(work)).encode())
        numbers = sorted({int(file.stem) for file in self._own.glob("*") if file.stem.isdigit()})
        for old in numbers[:-KEPT]:
            for suffix in ("part", "json"):
                (self._own / f"{old}.{suffix}").unlink(missing_ok=True)
        self._say("part", round=round, path=str(path), **work.said())

    def _apply(self, record: Mapping[str, Any], name: str, parts: Paths) -> None:
        began = time.perf_counter()
        applied = _applied(self._outer, record, parts)
        self._move(self._local.follow(applied))
        self._done(record, name, applied.verdicts, began)

    def _merge(
        self, record: Mapping[str, Any], name: str, base: Path, digest: str | None, branches: Sequence[Any]
    ) -> None:
        began, rule, count = time.perf_counter(), self._outer.rule, self._outer.count
        ancestor = state_files.load(base, rule, count, digest)
        merged = _merged(ancestor, record, branches)
        moves = self._local.follow_merge(merged.round, self._outer.theta, merged.theta)
        self._outer.become(merged)
        self._move(moves)
        self._done(record, name, [], began)

    def _returned(self, round: int) -> None:
        path = self._own / f"{round}.part"
        if not path.exists():
            return  # too old, or handed in by an earlier life of this peer's that has lost its folder
        work = Work.of(read_object(path.with_suffix(".json")))
        self._local.returned(round, path.read_bytes())
        self._carried.add(work)
        path.unlink()

    def _save(self, folder: Path) -> None:
        digest = state_files.save(self._outer, folder)
        self._say("saved", round=self._outer.round, digest=digest, path=str(folder))

    def _done(self, record: Mapping[str, Any], name: str, verdicts: list[Verdict], began: float) -> None:
        digest, seconds = self._outer.digest(), round(time.perf_counter() - began, 6)
        self._told(record, verdicts, seconds)
        self._say("applied", round=int(record["round"]), hash=name, digest=digest, seconds=seconds)

    def _move(self, moves: list[Move]) -> None:
        with self._lock:
            self._moves += moves


def _applied(outer: Outer, record: Mapping[str, Any], parts: Paths) -> Applied:
    payloads = {peer: Path(path).read_bytes() for peer, path in parts.items()}
    return outer.apply(record, payloads)


def _merged(base: Outer, record: Mapping[str, Any], branches: Sequence[Any]) -> Outer:
    """Both branches from the base's state. A branch may begin with a merge of its own, from the same base."""
    ends, tokens = [], []
    for branch in branches:
        end = base.copy()
        for entry in branch:
            if "branches" in entry:
                end = _merged(base.copy(), entry["record"], entry["branches"])
            else:
                _applied(end, entry["record"], entry.get("parts") or {})
        ends.append(end)
        tokens.append(sum(learned(t) for entry in branch for t in entry["record"].get("took") or []))
    weights = [int(w) for w in record.get("weights") or tokens]
    return merge(base.copy(), ends, weights, int(record["round"]))


def _whole(path: Path, data: bytes) -> None:
    """All of it, or nothing."""
    new = path.with_name(f"{path.name}.new")
    new.write_bytes(data)
    os.replace(new, path)


def _joined(ranges: Sequence[Sequence[int]]) -> list[list[int]]:
    """Sorted, and one range where two touch."""
    joined: list[list[int]] = []
    for a, b in sorted((int(a), int(b)) for a, b in ranges):
        if joined and joined[-1][1] == a:
            joined[-1][1] = b
        else:
            joined.append([a, b])
    return joined
