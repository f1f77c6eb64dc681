"""The history as one peer knows it: records that count, by name; its own head, and the branches of others.

Kept in a file, a line each, so that a peer that was killed knows all that it has agreed to.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from shoal.net.api import PeerId
from shoal.swarm.round_record import BadRecord, Certified, Record, ack_text
from shoal.values import MOST_BYTES, BadValue, read_object
from shoal.values import name as name_of

Verify = Callable[[PeerId, bytes, str], bool]  # (peer, text, signature)
LOCATOR = 64  # names of records by which two peers find where their histories part


def majority(present: Iterable[PeerId], members: tuple[PeerId, ...]) -> bool:
    """More than half of the members; of an even number also that half which has the first one."""
    here = set(present) & set(members)
    return 2 * len(here) > len(members) or (2 * len(here) == len(members) > 0 and members[0] in here)


class Chain:
    """`start` is the same for all peers of a swarm: it says whose it is, and counts without signatures."""

    def __init__(self, swarm: str, start: Record, verify: Verify, file: Path | None = None) -> None:
        self.swarm, self.verify, self._file = swarm, verify, file
        self._known: dict[str, Certified] = {start.hash: Certified(start, 0, {})}
        self._after: dict[str, list[str]] = {}
        self.start = start
        self.head = start
        if file is not None and file.exists():
            self._read(file)

    def __contains__(self, name: str) -> bool:
        return name in self._known

    def __len__(self) -> int:
        return len(self._known)

    def known(self) -> Iterator[Record]:
        """All of them, of all branches."""
        return (one.record for one in self._known.values())

    def get(self, name: str) -> Record:
        return self._known[name].record

    def certified(self, name: str) -> Certified:
        return self._known[name]

    # Growing.

    def add(self, new: Certified) -> None:
        """A record that counts, of any branch. BadRecord if it does not."""
        if new.record.hash in self._known:
            return
        self.check(new)
        self._keep(new)
        self._write({"add": new.body()})

    def _keep(self, new: Certified) -> None:
        self._known[new.record.hash] = new
        for parent in new.record.parents:
            self._after.setdefault(parent, []).append(new.record.hash)

    def after(self, name: str) -> list[Certified]:
        """The records that come next, of all branches."""
        return [self._known[one] for one in self._after.get(name, ())]

    def fits(self, record: Record) -> list[Record]:
        """The records that it comes after. BadRecord for one that can never count, whoever signs it."""
        if record.kind == "start" or any(parent not in self._known for parent in record.parents):
            raise BadRecord("a record whose past is not known here")
        parents = [self.get(parent) for parent in record.parents]
        if record.round != max(parent.round for parent in parents) + 1:
            raise BadRecord(f"a record of round {record.round} after round {max(p.round for p in parents)}")
        if not record.members:
            raise BadRecord("a record without members")
        return parents

    def check(self, new: Certified) -> None:
        record, parents = new.record, self.fits(new.record)
        text = ack_text(self.swarm, record.hash, new.term)
        wanted = set(record.members).union(*(parent.members for parent in parents))
        signed = {peer for peer in new.signatures if peer in wanted and self.verify(peer, text, new.signatures[peer])}
        if not enough(record, parents, signed):
            raise BadRecord(f"a record of round {record.round} that too few members have signed")

    def move(self, name: str) -> None:
        """This peer's head; it stands in what is known."""
        self.head = self.get(name)
        self._write({"head": name})

    # Looking back.

    def past(self, name: str) -> Iterator[Record]:
        """A record and those before it, newest first. Of a merge the first parent's line, then what else is before."""
        return self._past([name])

    def _past(self, names: Iterable[str]) -> Iterator[Record]:
        seen = set(names)
        todo = [self.get(name) for name in seen]
        while todo:
            todo.sort(key=lambda record: record.round)
            record = todo.pop()
            yield record
            for parent in record.parents:
                if parent not in seen:
                    seen.add(parent)
                    todo.append(self.get(parent))

    def is_ancestor(self, old: str, new: str) -> bool:
        if old not in self._known or new not in self._known:
            return False
        oldest = self.get(old).round
        for record in self.past(new):
            if record.hash == old:
                return True
            if record.round < oldest:
                return False
        return False

    def common(self, a: str, b: str) -> Record:
        """The newest record that both have in their past. The start is always one."""
        ours = {record.hash for record in self.past(a)}
        return next(record for record in self.past(b) if record.hash in ours)

    def path(self, old: str, new: str) -> list[Record]:
        """From one record to a later one along parents, oldest first, without the first. Of a merge that both of its
        parents lead to, by way of the first one."""
        found: list[Record] = []
        while new != old:
            found.append(self.get(new))
            new = next(parent for parent in found[-1].parents if self.is_ancestor(old, parent))
        return found[::-1]

    def locator(self) -> list[str]:
        """Names by which somebody else finds what is not known here: the newest of each branch (a history that comes
        in pieces is one until all of it is here), then the head's past, dense at first and ever sparser."""
        past = [record.hash for record in self.past(self.head.hash)]
        picked: list[str] = []
        at, stride = 0, 1
        while at < len(past) and len(picked) < LOCATOR:
            picked.append(past[at])
            if len(picked) > 16:
                stride *= 2
            at += stride
        ends = sorted((record.round, record.hash) for record in self.known() if record.hash not in self._after)
        newest = [name for _, name in ends[-LOCATOR:][::-1]]
        return list(dict.fromkeys([*newest, *picked, self.start.hash]))

    def since(self, locator: Iterable[str], most: int) -> list[Certified]:
        """What somebody who knows these does not know of this head's past, oldest first."""
        known = {record.hash for record in self._past(name for name in locator if name in self._known)}
        missing = [record for record in self.past(self.head.hash) if record.hash not in known]
        missing.sort(key=lambda record: (record.round, record.hash))
        return [self._known[record.hash] for record in missing[:most]]

    # The file.

    def _write(self, entry: dict[str, object]) -> None:
        if self._file is None:
            return
        with open(self._file, "ab") as f:
            f.write(json.dumps(entry, separators=(",", ":")).encode() + b"\n")
            f.flush()
            os.fsync(f.fileno())

    def _read(self, file: Path) -> None:
        """Our own words, but a disk may have lost the end of them: what does not fit is as if it were not there."""
        good = 0
        with open(file, "rb") as f:
            while raw := f.readline(MOST_BYTES):
                if not raw.endswith(b"\n"):
                    break
                with contextlib.suppress(BadValue):
                    entry = read_object(raw)
                    if "add" in entry:
                        new = Certified.of(entry["add"])
                        self.check(new)
                        self._keep(new)
                    elif (head := name_of(entry.get("head"))) in self._known:
                        self.head = self.get(head)
                good += len(raw)
        if good < file.stat().st_size:
            os.truncate(file, good)


def enough(record: Record, parents: list[Record], signed: set[PeerId]) -> bool:
    """Whether these signatures make a record count: most of the members before it. A branch says openly that they are
    not most of them, and needs all of its own; a merge needs most of both sides."""
    if record.kind == "branch":
        return bool(record.members) and signed >= set(record.members)
    return all(majority(signed, parent.members) for parent in parents)
