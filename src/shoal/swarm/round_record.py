"""A record of the history: one round that counts. The weights are a pure function of the records up to the newest.

Its name is the SHA-256 of its canonical JSON. It counts when enough members have signed that name: the certificate.
Whatever comes from another peer is checked here, field by field, before anything else looks at it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, cast, get_args

from shoal.net.api import PeerId
from shoal.net.identity import canonical, verify
from shoal.swarm.ranges import Ranges, parse
from shoal.values import BadValue, fields, items, name, real, table, text, whole

Kind = Literal["start", "round", "branch", "merge"]
MOST_MEMBERS = 1000
MOST_OF_ONE = 1 << 40  # tokens or steps of one part: sums of them stay within 62 bits
MOST_SECONDS = 1e9
MOST_SCORE = 1e6
_DIGEST = re.compile(r"[0-9a-f]{1,128}\Z")


class BadRecord(BadValue):
    """Not what a record may be."""


@dataclass(frozen=True)
class Part:
    """What a peer has brought to a round; signed by it."""

    peer: PeerId
    round: int
    blob: str  # name of the file that holds it
    size: int  # of that, in bytes
    tokens: int
    steps: int
    used: Ranges  # samples
    loss: float | None = None
    seconds: float = 0.0  # of computing
    scores: Mapping[PeerId, float] = field(default_factory=dict)  # what this peer found of others' earlier parts
    signature: str = ""
    targets: int = field(kw_only=True)  # tokens that it was taught to predict: what it counts and weighs by

    def signed(self, swarm: str) -> bytes:
        return canonical({"part": {**self.body(), "signature": ""}, "swarm": swarm})

    def body(self) -> dict[str, Any]:
        return {**self.__dict__, "used": [list(r) for r in self.used], "scores": dict(self.scores)}

    @staticmethod
    def of(said: object) -> Part:
        s = fields(said, Part.__dataclass_fields__)
        scores = table(s.get("scores", {}), MOST_MEMBERS)
        return Part(
            peer=name(s.get("peer")),
            round=whole(s.get("round")),
            blob=name(s.get("blob")),
            size=whole(s.get("size")),
            tokens=whole(s.get("tokens"), MOST_OF_ONE),
            steps=whole(s.get("steps"), MOST_OF_ONE),
            used=parse(s.get("used")),
            loss=None if s.get("loss") is None else real(s["loss"]),
            seconds=real(s.get("seconds", 0.0), MOST_SECONDS, 0.0),
            scores={name(peer): real(score, MOST_SCORE, -MOST_SCORE) for peer, score in scores.items()},
            signature=text(s.get("signature", ""), 256),
            targets=_targets(s),
        )


@dataclass(frozen=True)
class Ledger:
    """Which samples are whose. Everything below `cursor` was used, is free, or is held by somebody."""

    cursor: int = 0
    done: int = 0  # samples that were used in the history
    free: Ranges = ()
    held: Mapping[PeerId, Ranges] = field(default_factory=dict)
    away: Mapping[PeerId, Ranges] = field(default_factory=dict)  # of peers out of reach, who may use them
    lanes: tuple[PeerId, ...] = ()  # in a branch: blocks above `cursor` belong to these in turn …
    mine: tuple[PeerId, ...] = ()  # … and the branch takes those of these

    def body(self) -> dict[str, Any]:
        return {
            "cursor": self.cursor,
            "done": self.done,
            "free": [list(r) for r in self.free],
            "held": {peer: [list(r) for r in some] for peer, some in self.held.items()},
            "away": {peer: [list(r) for r in some] for peer, some in self.away.items()},
            "lanes": list(self.lanes),
            "mine": list(self.mine),
        }

    @staticmethod
    def of(said: object) -> Ledger:
        s = fields(said, Ledger.__dataclass_fields__)
        return Ledger(
            whole(s.get("cursor")),
            whole(s.get("done")),
            parse(s.get("free")),
            _by_peer(s.get("held")),
            _by_peer(s.get("away")),
            _names(s.get("lanes")),
            _names(s.get("mine")),
        )


@dataclass(frozen=True)
class Record:
    kind: Kind
    round: int  # of the start: 0
    parents: tuple[str, ...]
    members: tuple[PeerId, ...]  # from now on
    took: tuple[Part, ...] = ()  # in the order in which they are added up
    state: str | None = None  # digest of the weights before this record, if known then
    standing: Mapping[PeerId, float] = field(default_factory=dict)  # what others' losses say of a peer's parts so far
    ledger: Ledger = field(default_factory=Ledger)
    tokens: int = 0  # of the whole history, that were learned (`Part.targets`)
    weights: tuple[int, ...] = ()  # of a merge: those of each branch since the common ancestor
    left: Mapping[PeerId, str] = field(default_factory=dict)
    joined: tuple[PeerId, ...] = ()
    time: float = 0.0
    by: PeerId = ""

    @cached_property
    def hash(self) -> str:
        return hashlib.sha256(canonical(self.body())).hexdigest()

    @property
    def parent(self) -> str:
        return self.parents[0]

    def body(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "round": self.round,
            "parents": list(self.parents),
            "members": list(self.members),
            "took": [part.body() for part in self.took],
            "state": self.state,
            "standing": dict(self.standing),
            "ledger": self.ledger.body(),
            "tokens": self.tokens,
            "weights": list(self.weights),
            "left": dict(self.left),
            "joined": list(self.joined),
            "time": self.time,
            "by": self.by,
        }

    @staticmethod
    def of(said: object) -> Record:
        """BadRecord for whatever is not well formed; whether it may count is another question."""
        s = fields(said, Record.__dataclass_fields__)
        kind = s.get("kind")
        if kind not in get_args(Kind):
            raise BadRecord("a record of no known kind")
        took = items(s.get("took"), MOST_MEMBERS)
        left, standing = table(s.get("left"), MOST_MEMBERS), table(s.get("standing"), MOST_MEMBERS)
        weights = items(s.get("weights"), 2)
        record = Record(
            kind=cast(Kind, kind),
            round=whole(s.get("round")),
            parents=_names(s.get("parents")),
            members=_names(s.get("members")),
            took=tuple(Part.of(part) for part in took),
            state=None if s.get("state") is None else _digest(s["state"]),
            standing={name(peer): real(x) for peer, x in standing.items()},
            ledger=Ledger.of(s.get("ledger")),
            tokens=whole(s.get("tokens")),
            weights=tuple(whole(w) for w in weights),
            left={name(peer): text(why, 200) for peer, why in left.items()},
            joined=_names(s.get("joined")),
            time=real(s.get("time")),
            by="" if s.get("by") == "" else name(s.get("by")),
        )
        if len(record.parents) != {"start": 0, "round": 1, "branch": 1, "merge": 2}[record.kind]:
            raise BadRecord(f"a record of kind {record.kind} with {len(record.parents)} parents")
        if len(set(record.members)) != len(record.members) or len(set(record.parents)) != len(record.parents):
            raise BadRecord("a name that stands twice")
        if len({part.peer for part in record.took}) != len(record.took):
            raise BadRecord("two parts of one peer")
        return record


def ack_text(swarm: str, name: str, term: int) -> bytes:
    """What a member signs when it agrees to a record."""
    return canonical({"ack": name, "term": term, "swarm": swarm})


def vote_text(swarm: str, head: str, term: int) -> bytes:
    """What a member signs when it leaves all terms below this one."""
    return canonical({"vote": term, "head": head, "swarm": swarm})


def proposal_text(swarm: str, head: str, term: int, name: str) -> bytes:
    """What a member signs when it proposes a round: one in a term, or it has lied."""
    return canonical({"propose": name, "head": head, "term": term, "swarm": swarm})


def verified(peer: PeerId, text: bytes, signature: str) -> bool:
    """Signatures of the history are hexadecimal."""
    try:
        return verify(peer, text, bytes.fromhex(signature))
    except ValueError:
        return False


@dataclass(frozen=True)
class Certified:
    """A record that counts, and who has signed it in which term."""

    record: Record
    term: int
    signatures: Mapping[PeerId, str]

    def body(self) -> dict[str, Any]:
        return {"record": self.record.body(), "term": self.term, "signatures": dict(self.signatures)}

    @staticmethod
    def of(said: object) -> Certified:
        s = fields(said, ("record", "term", "signatures"))
        signatures = table(s.get("signatures"), MOST_MEMBERS)
        return Certified(
            Record.of(s.get("record")),
            whole(s.get("term")),
            {name(peer): text(sig, 256) for peer, sig in signatures.items()},
        )


def _targets(s: dict[str, Any]) -> int:
    """Where masks hide tokens, a part is no better for having read them: one that does not say is not taken."""
    if s.get("targets") is None:
        raise BadRecord("a part that does not say how many targets it was taught")
    return whole(s["targets"], MOST_OF_ONE)


def _names(said: object) -> tuple[str, ...]:
    return tuple(map(name, items(said, MOST_MEMBERS)))


def _digest(said: object) -> str:
    if not isinstance(said, str) or not _DIGEST.match(said):
        raise BadRecord("a digest that is none")
    return said


def _by_peer(said: object) -> dict[PeerId, Ranges]:
    return {name(peer): parse(some) for peer, some in table(said, MOST_MEMBERS).items()}
