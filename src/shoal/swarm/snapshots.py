"""States of the weights that newcomers begin with, and that a merge goes back to.

All peers save them at the same rounds: their files are the same, and can be fetched from several at once.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from shoal.net.api import Message
from shoal.plain_file import read_plain
from shoal.swarm.blob_folder import MOST_MANIFEST
from shoal.swarm.chain import Chain
from shoal.swarm.round_record import Record
from shoal.values import BadValue, fields, items, name, read_json, text, whole

KEEP = 2
MOST_ROUND = 1 << 40
MOST_OFFERED = 64  # of one peer
MOST_INDEX, MOST_HELD = 16 << 20, 10_000


@dataclass(frozen=True)
class Snapshot:
    hash: str  # of the record that it stands at
    round: int
    blob: str  # the manifest of its folder
    size: int  # of that
    digest: str  # of the weights

    @staticmethod
    def of(said: object) -> Snapshot:
        """From another peer. BadValue for what is none."""
        s = fields(said, Snapshot.__dataclass_fields__)
        where = name(s.get("hash")), whole(s.get("round"), MOST_ROUND)
        size = whole(s.get("size"), MOST_MANIFEST)
        return Snapshot(*where, name(s.get("blob")), size, text(s.get("digest"), 128))


def read_offered(answer: Message) -> list[Snapshot]:
    """Of a peer that was asked which states it has."""
    return [Snapshot.of(one) for one in items(read_json(answer.body), MOST_OFFERED)]


class Snapshots:
    def __init__(self, folder: Path, chain: Chain) -> None:
        self._folder, self._chain = folder, chain
        self._index = folder / "index.json"
        self.all: list[Snapshot] = []
        with contextlib.suppress(OSError, BadValue):
            for one in items(read_json(read_plain(self._index, MOST_INDEX)), MOST_HELD):
                with contextlib.suppress(BadValue):
                    self.all.append(Snapshot.of(one))
        self.all = [s for s in self.all if self.path(s).is_dir()]

    def path(self, snapshot: Snapshot) -> Path:
        return self._folder / f"{snapshot.round:08d}-{snapshot.hash[:12]}"

    def place(self, record: Record) -> Path:
        """For one that is to be saved."""
        return self._folder / f"{record.round:08d}-{record.hash[:12]}"

    def add(self, snapshot: Snapshot) -> None:
        self.all = [s for s in self.all if s.hash != snapshot.hash] + [snapshot]
        self._write()

    def drop(self, snapshot: Snapshot) -> None:
        """It cannot be begun with."""
        shutil.rmtree(self.path(snapshot), ignore_errors=True)
        self.all = [s for s in self.all if s != snapshot]
        self._write()

    def before(self, *names: str, good: Callable[[Snapshot], bool] = lambda snapshot: True) -> Snapshot | None:
        """The newest from which all these records can be replayed: whatever is in their past is in its past too, or
        comes after it. Of two branches that have merged, one's state alone is no beginning."""
        for snapshot in sorted(self.all, key=lambda s: -s.round):
            if (
                snapshot.hash in self._chain
                and good(snapshot)
                and all(self._leads_to(snapshot, name) for name in names)
            ):
                return snapshot
        return None

    def _leads_to(self, snapshot: Snapshot, name: str) -> bool:
        if not self._chain.is_ancestor(snapshot.hash, name):
            return False
        before = {record.hash for record in self._chain.past(snapshot.hash)}
        after = [record for record in self._chain.past(name) if record.hash not in before]
        return all(self._chain.is_ancestor(snapshot.hash, record.hash) for record in after)

    def forget(self, keep: Callable[[Snapshot], bool]) -> None:
        """Those that cannot be trusted; that of the beginning, which is not computed, can."""
        gone = [s for s in self.all if s.round and not keep(s)]
        for snapshot in gone:
            shutil.rmtree(self.path(snapshot), ignore_errors=True)
        self.all = [s for s in self.all if s not in gone]
        self._write()

    def prune(self, at: Record) -> int:
        """Keeps the newest of those before `at`, which the trainer has reached, and the one from before the oldest
        record at which somebody may have parted. Parts of the rounds after the one returned are needed."""
        pinned = self.before(at.hash, *self._partings(at))
        if pinned is None:
            return 0
        ours = sorted((s for s in self.all if self._chain.is_ancestor(s.hash, at.hash)), key=lambda s: s.round)
        keep = {pinned, *ours[-KEEP:]} | {s for s in self.all if s.round > at.round}
        for snapshot in set(self.all) - keep:
            shutil.rmtree(self.path(snapshot), ignore_errors=True)
        if len(keep) != len(self.all):
            self.all = [s for s in self.all if s in keep]
            self._write()
        return min((s.round for s in self.all), default=0)

    def _partings(self, at: Record) -> set[str]:
        """The newest records that members are known to have, and those who are away and may come back: whoever has
        signed a record has its parent, whoever has brought a part to one has the second before it."""
        wanted, found = {*at.members, *at.ledger.away, *at.ledger.lanes}, set[str]()
        for record in self._chain.past(at.hash):
            signed = wanted & set(self._chain.certified(record.hash).signatures)
            for peer in signed:
                parents = [x for x in record.parents if peer in self._chain.get(x).members]
                found |= {*(parents or record.parents)}
            for peer in wanted & {part.peer for part in record.took} - signed:
                parent = self._chain.get(record.parent)
                found |= {*(parent.parents or (parent.hash,))}
                signed = signed | {peer}
            wanted -= signed
            if not wanted:
                break
        return found | ({self._chain.start.hash} if wanted - set(at.joined) else set())

    def _write(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        part = self._index.with_suffix(".new")
        part.write_text(json.dumps([asdict(s) for s in self.all]))
        os.replace(part, self._index)
