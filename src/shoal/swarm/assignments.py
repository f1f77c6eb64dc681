"""What the trainer of a peer is told: where to begin, which samples to train on, when a round ends, what counts.

The trainer may be behind the history (it compiles, it is slow, it was started anew): records are told to it one after
the other, when their parts are here. Samples that it was given and has not accounted for are given to nobody else.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from shoal.net.api import PeerId
from shoal.swarm.announced_parts import AHEAD, Parts
from shoal.swarm.blobs import Blobs
from shoal.swarm.chain import Chain
from shoal.swarm.offer import for_trainer, in_a_round
from shoal.swarm.ranges import Ranges, count, first, minus, union
from shoal.swarm.round_record import Record
from shoal.swarm.snapshots import Snapshot, Snapshots
from shoal.swarm.trainer_link import Said
from shoal.swarm.trainer_words import Applied, Handed, Loaded, Saved

MORE_THAN_LAST = 2.0  # samples for a round, by what the last one showed that it can do


class Work:
    def __init__(
        self,
        me: PeerId,
        chain: Chain,
        blobs: Blobs,
        parts: Parts,
        snapshots: Snapshots,
        say: Callable[[Said], None],
        *,
        overlap: bool,
        save_every: int,
        fragments: int,
        round_s: float,
        seed: int,
    ) -> None:
        self._me, self._chain, self._blobs, self._parts, self._snapshots = me, chain, blobs, parts, snapshots
        self._say, self._overlap, self._save_every = say, overlap, save_every
        self._fragments, self._round_s, self._seed = fragments, round_s, seed
        self.ready = False  # it has a model
        self.told: str | None = None  # the record that its state stands at, when it has done all it was told
        self._from: str | None = None  # the record whose state it is loading
        self._loads = 0  # states that it was told to load and has not said so
        self.life = 0  # how often what it had was given up
        self.waits_since: float | None = None  # for parts of the next record (monotonic)
        self.applied: str | None = None
        self.digests: dict[str, str] = {}  # of the weights after a record
        self._newest = 0  # round that it was given samples for
        self._handed_in = 0  # the newest of those that it has handed in
        self._ended = 0  # the newest of those that it was told to end
        self._given: dict[int, Ranges] = {}
        self._announced = 0  # the newest round that a part of ours was announced for
        self._undecided: dict[int, tuple[int, Ranges]] = {}  # that round → the trainer's own, samples
        self._doubtful: dict[int, tuple[int, Ranges]] = {}
        self._returned: Ranges = ()  # go into its next part
        self._overdue: Ranges = ()  # of these, what was not in its last one
        self._does = 0  # samples in a round, by its last part
        self._saving: list[Record] = []
        self.status: dict[str, Any] = {}

    # Beginning.

    def started_anew(self) -> None:
        """What it had not handed in is lost with it, and so is what was returned to it."""
        self.ready, self.status = False, {}
        self.give_up()
        self._from, self._loads = None, 0

    def give_up(self) -> None:
        """Its state is of no use. What it says from now on is not listened to, until it has another one."""
        self.told, self.applied = None, None
        self._given.clear()
        self._returned, self._overdue, self._saving = (), (), []
        self._ended = self._newest
        self.life += 1

    @property
    def listens(self) -> bool:
        """Whether what it says is of the state that it is meant to have."""
        return self.told is not None and not self._loads

    def begin_from(self, snapshot: Snapshot | None) -> None:
        """`None`: from the beginning. What it had under way is gone."""
        self.give_up()
        self._loads += 1
        if snapshot is None:
            self._say({"kind": "fresh", "seed": self._seed})
            self.told = self._chain.start.hash
            self._save(self._chain.start)  # a merge may have to go back to it
        else:
            path = str(self._snapshots.path(snapshot))
            self._say({"kind": "load", "path": path, "digest": snapshot.digest})
            self.told = snapshot.hash
        self._from = self.told

    # Following the history.

    def follow(self) -> None:
        """Tells it of records that count, as far as their parts are here."""
        head = self._chain.head
        if not self.ready or self.told is None or self.told == head.hash:
            return
        if not self._chain.is_ancestor(self.told, head.hash):
            self.give_up()  # the history has gone another way: it has to begin anew
            return
        for record in self._chain.path(self.told, head.hash):
            if not (self._merge(record) if record.kind == "merge" else self._apply(record)):
                self.waits_since = self.waits_since or time.monotonic()
                return
            self.told, self.waits_since = record.hash, None
            self._decided(record)
            if record.round % self._save_every == 0 or record.kind == "merge":
                self._save(record)

    def save(self) -> None:
        """The state that it stands at when it has done all it was told, for others to take."""
        if self.listens and self.told is not None:
            self._save(self._chain.get(self.told))

    def _save(self, record: Record) -> None:
        if not any(s.hash == record.hash for s in self._snapshots.all):
            self._saving.append(record)
            self._say({"kind": "save"})

    def _apply(self, record: Record) -> bool:
        if not self._parts.fetch(record.took, record.members, urgent=True):
            return False
        self._say({"kind": "apply", "record": for_trainer(record), "parts": self._paths(record)})
        return True

    def _merge(self, record: Record) -> bool:
        base = self._snapshots.before(*record.parents)
        if base is None:
            self.give_up()  # there is no way back to where the branches parted: the state has to be fetched
            return False
        needed = [r for parent in record.parents for r in self._since(base.hash, parent)]
        if not self._parts.fetch([part for r in needed for part in r.took], record.members, urgent=True):
            return False
        self._say(
            {
                "kind": "merge",
                "record": for_trainer(record),
                "base": str(self._snapshots.path(base)),
                "base_digest": base.digest,
                "branches": [self._replay(base.hash, parent) for parent in record.parents],
            }
        )
        return True

    def _replay(self, begin: str, end: str) -> list[dict[str, Any]]:
        """The records that lead from one state to another. A merge on the way stands for all that is before it."""
        entries: list[dict[str, Any]] = []
        for record in self._chain.path(begin, end):
            entry: dict[str, Any] = {"record": for_trainer(record), "parts": self._paths(record)}
            if record.kind == "merge":
                entries, entry["branches"] = [], [self._replay(begin, parent) for parent in record.parents]
            entries.append(entry)
        return entries

    def _since(self, begin: str, end: str) -> list[Record]:
        oldest = self._chain.get(begin).round
        return [record for record in self._chain.past(end) if record.round > oldest]

    def _paths(self, record: Record) -> dict[PeerId, str]:
        return {part.peer: str(self._blobs.path(part.blob)) for part in record.took}

    def _decided(self, record: Record) -> None:
        """Our own parts up to a round count, or go back to the trainer. At the beginning of a branch nobody knows:
        those whom we have lost may have counted it. A merge tells, or that they are forgotten."""
        for label in [n for n in self._undecided if n <= record.round]:
            mine = self._undecided.pop(label)
            since = self._since_round(record, label)
            if self._took(since, label):
                continue
            if record.ledger.lanes and any(one.kind == "branch" for one in since):
                self._doubtful[label] = mine
            else:
                self._give_back(*mine)
        if self._doubtful and (record.kind == "merge" or not record.ledger.lanes):
            for label, mine in self._doubtful.items():
                if not self._took(self._since_round(record, label), label):
                    self._give_back(*mine)
            self._doubtful.clear()

    def _since_round(self, record: Record, oldest: int) -> list[Record]:
        """A state that was fetched may lie beyond the record that decides."""
        return list(itertools.takewhile(lambda one: one.round >= oldest, self._chain.past(record.hash)))

    def _took(self, records: Iterable[Record], number: int) -> bool:
        return any(part.peer == self._me and part.round == number for one in records for part in one.took)

    def _give_back(self, number: int, used: Ranges) -> None:
        self._say({"kind": "returned", "round": number})
        self._returned = union(self._returned, used)

    # Rounds.

    def steer(self, computing: int, member: bool) -> None:
        """`computing`: the round that the peers train now, as their first one says."""
        if not self.ready or self.told is None or not member:
            return
        if self._overlap:
            done = max(self._handed_in, self._announced)
            computing = min(max(computing, done + 1), self._chain.head.round + 2)
        if computing > max(self._newest, self.begun) and (self._overlap or self._stands_at(computing - 1)):
            self._begin(computing)
        self._end(before=computing)

    def wind_up(self) -> None:
        """No more rounds: what is begun ends now."""
        if self.ready and self.told is not None:
            self._end(before=None)

    @property
    def begun(self) -> int:
        """The newest round that it trains for, or has a part of."""
        return max([self._announced, *self._goes_into().values()])

    def _goes_into(self) -> dict[int, int]:
        """What it trains, and the round that it will be a part of. When a round has gone by without it, in a branch or
        a merge say, that is a later one than it was begun for: it trains on, and nothing new is begun in its place."""
        found, last = dict[int, int](), self._announced
        for number in sorted(self._given):
            last = found[number] = self._open(number, last)
        return found

    def _open(self, number: int, after: int) -> int:
        """The first round after one that a part can still be of."""
        label = max(number, self._chain.head.round + 1, after + 1)
        return label + (number - label) % self._fragments  # a part is of one fragment

    @property
    def owes(self) -> bool:
        """Something that it has trained does not count yet."""
        return bool(self._given or self._undecided)

    def _stands_at(self, number: int) -> bool:
        return self.applied is not None and self._chain.get(self.applied).round >= number

    def _begin(self, number: int) -> None:
        stock = self._stock()
        n = int(MORE_THAN_LAST * self._does) or -(-count(stock) // 3)
        ranges = first(stock, max(1, n))
        if not ranges and not self._returned:
            return  # a part that came back goes into the next one, and if it is the last there is nothing else in it
        self._given[number] = ranges
        self._newest = number
        done = self._chain.head.ledger.done
        told = {"kind": "begin", "round": number, "ranges": [list(r) for r in ranges], "samples_done": done}
        self._say({**told, "seconds": self._round_s})

    def _end(self, before: int | None) -> None:
        """Of what it trains, all that is for an earlier round."""
        for number, goes_into in self._goes_into().items():
            if number > self._ended and (before is None or goes_into < before):
                self._ended = number
                self._say({"kind": "end", "round": number})

    def _stock(self) -> Ranges:
        held = self._chain.head.ledger.held.get(self._me, ())
        under_way = [used for _, used in (*self._undecided.values(), *self._doubtful.values())]
        return minus(held, union(*self._given.values(), *under_way, self._returned))

    # What it says.

    def has_part(self, said: Handed) -> tuple[int, Ranges] | None:
        """It has handed in a part: the round that it is announced for, and the samples that are in it. A peer whose
        steps are longer than a round is always late: its part goes into a round that is still open. None: it goes back
        to the trainer, and into its next part."""
        number, used = said.round, said.used
        self._given.pop(number, None)
        still = minus(self._returned, used)
        self._returned = minus(still, self._overdue)  # those it has lost, and may be given again
        self._overdue = self._returned
        self._handed_in, self._ended = max(self._handed_in, number), max(self._ended, number)
        label = self._open(number, self._announced)
        if used:
            self._does = in_a_round(count(used), said.seconds, self._round_s)
        if not used or label > self._chain.head.round + AHEAD:
            self._give_back(number, used)
            return None
        self._announced = label
        self._undecided[label] = (number, used)
        return label, used

    def has_applied(self, said: Applied) -> None:
        if said.hash not in self._chain:
            return  # nobody has told it of that one
        self.applied = said.hash
        self.digests[self.applied] = said.digest
        if len(self.digests) > 64:
            del self.digests[next(iter(self.digests))]

    def has_loaded(self, said: Loaded) -> None:
        self._loads -= 1
        if self.listens and self._from is not None:  # `told` may be further by now
            self.applied, self._from = self._from, None
            self.digests[self.applied] = said.digest

    def has_saved(self, said: Saved) -> tuple[Record, Path, str] | None:
        if not self._saving:
            return None
        return self._saving.pop(0), said.path, said.digest

    def has_status(self, said: dict[str, Any]) -> None:
        self.status = {**said, "at": time.time()}
