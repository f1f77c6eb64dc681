"""States of the weights that newcomers begin with, and that a merge goes back to.

All peers save them at the same rounds: their files are the same, and can be fetched from several at once.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shoal.fleet.swarm.chain import Chain
from shoal.fleet.swarm.record import Record

KEEP = 2


@dataclass(frozen=True)
class Snapshot:
    hash: str  # of the record that it stands at
    round: int
    blob: str  # the manifest of its folder
    size: int  # of that
    digest: str  # of the weights

    @staticmethod
    def of(said: Any) -> Snapshot | None:
        """From another peer; None for what is none."""
        try:
            found = Snapshot(said["hash"], said["round"], said["blob"], said["size"], said["digest"])
        except (TypeError, KeyError):
            return None
        texts = (found.hash, found.blob, found.digest)
        good = all(isinstance(t, str) and len(t) <= 128 for t in texts)
        return found if good and type(found.round) is int and type(found.size) is int else None


class Snapshots:
    def __init__(self, folder: Path, chain: Chain) -> None:
        self._folder, self._chain = folder, chain
        self._index = folder / "index.json"
        self.all: list[Snapshot] = []
        with contextlib.suppress(OSError, ValueError):
            found = [Snapshot.of(one) for one in json.loads(self._index.read_bytes())]
            self.all = [s for s in found if s is not None and self.path(s).is_dir()]

    def path(self, snapshot: Snapshot) -> Path:
        return self._folder / f"{snapshot.round:08d}-{snapshot.hash[:12]}"

    def place(self, record: Record) -> Path:
        """For one that is to be saved."""
        return self._folder / f"{record.round:08d}-{record.hash[:12]}"

    def add(self, snapshot: Snapshot) -> None:
        self.all = [s for s in self.all if s.hash != snapshot.hash] + [snapshot]
        self._write()

    def before(self, *names: str) -> Snapshot | None:
        """The newest that all these records have in their past, or are."""
        good = [s for s in self.all if all(self._chain.is_ancestor(s.hash, name) for name in names)]
        return max(good, key=lambda s: s.round, default=None)

    def prune(self) -> int:
        """Keeps the newest, and the one from before anybody was lost who may come back with a branch of its own. From
        the round that is returned on, parts are still needed."""
        head = self._chain.head
        whole = next(
            (r for r in self._chain.past(head.hash) if not r.ledger.away and not r.ledger.lanes), self._chain.start
        )
        ours = sorted((s for s in self.all if self._chain.is_ancestor(s.hash, head.hash)), key=lambda s: s.round)
        keep = set(ours[-KEEP:]) | {s for s in self.all if s.round > whole.round}
        if (pinned := self.before(whole.hash)) is not None:
            keep.add(pinned)
        for snapshot in set(self.all) - keep:
            shutil.rmtree(self.path(snapshot), ignore_errors=True)
        if len(keep) != len(self.all):
            self.all = [s for s in self.all if s in keep]
            self._write()
        oldest = min((s.round for s in self.all), default=0)
        return min(oldest, whole.round) if pinned is not None or not whole.round else 0

    def _write(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        part = self._index.with_suffix(".new")
        part.write_text(json.dumps([asdict(s) for s in self.all]))
        os.replace(part, self._index)
