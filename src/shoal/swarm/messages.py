"""What peers of a swarm say to each other, as typed values within ranges: read here, once, and nowhere else.

Only what is needed is kept. `read` raises `BadValue` for whatever is no such message; unknown fields are passed over,
so that a later version may say more. How long a message of each kind may be stands here too (`MOST`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

from shoal.net.api import LinkState, PeerId, Way
from shoal.swarm.chain import LOCATOR
from shoal.swarm.digests import Told
from shoal.swarm.round_record import MOST_MEMBERS, Certified, Part, Record
from shoal.swarm.terms import MOST_TERM, Vote
from shoal.values import MOST_REAL, BadValue, flag, items, name, read_json, real, table, text, whole

MOST_LINKS = 1000
MOST_IN_HISTORY = 2_000_000  # values of one answer: a record has one in 40 bytes, or in 8 where samples are in pieces
MOST_LOCATOR = 2 * LOCATOR + 16
MOST_ROUND = 1 << 40
MOST_LIFE = 1 << 40
MERGE_TERM = 1 << 30  # a merge goes before whatever is under way
SIGNATURE = 256  # characters
_WAYS: tuple[Way, ...] = get_args(Way)


@dataclass(frozen=True)
class Status:
    """How a peer's training stands, as it says itself."""

    loss: float | None = None
    tokens_per_s: float | None = None
    busy: float | None = None


@dataclass(frozen=True)
class Proposed:
    """A leader's signed word that it proposes this record, as somebody has heard it."""

    by: PeerId
    head: str
    term: int
    name: str
    signature: str

    def body(self) -> dict[str, Any]:
        return dict(self.__dict__)


@dataclass(frozen=True)
class Pulse:
    head: str
    round: int
    ended: int  # the round whose time is over, if its sender says when
    begun: int
    wants: bool
    leaving: bool
    weights: tuple[str, Told] | None  # after which record
    status: Status
    links: dict[PeerId, LinkState] | None
    proposed: Proposed | None  # the newest that its sender has heard


@dataclass(frozen=True)
class Ballot:
    head: str
    vote: Vote
    votes: Mapping[PeerId, Vote] = field(default_factory=dict)  # that its sender's term rests on


@dataclass(frozen=True)
class Query:
    head: str
    term: int
    votes: dict[PeerId, Vote]


@dataclass(frozen=True)
class Promise:
    head: str
    term: int
    acked: tuple[int, Record] | None


@dataclass(frozen=True)
class Proposal:
    term: int
    record: Record
    votes: dict[PeerId, Vote]
    signature: str


@dataclass(frozen=True)
class Ack:
    hash: str
    term: int
    signature: str


@dataclass(frozen=True)
class Wanted:
    """Of the history: what somebody lacks who knows these records."""

    locator: list[str]


@dataclass(frozen=True)
class History:
    head: str
    records: list[Certified]
    size: int  # as it came, in bytes


def _pulse(s: dict[str, Any]) -> Pulse:
    weights, links, proposed = s.get("weights"), s.get("links"), s.get("proposed")
    return Pulse(
        head=name(s.get("head")),
        round=whole(s.get("round"), MOST_ROUND),
        ended=whole(s.get("ended"), MOST_ROUND),
        begun=whole(s.get("begun"), MOST_ROUND),
        wants=flag(s.get("wants")),
        leaving=flag(s.get("leaving")),
        weights=None if weights is None else _weights(table(weights, 8)),
        status=_status(table(s.get("status", {}), 64)),
        links=None if links is None else read_links(links),
        proposed=None if proposed is None else read_proposed(proposed),
    )


def _weights(s: dict[str, Any]) -> tuple[str, Told]:
    told = Told(text(s.get("digest"), 128), whole(s.get("life"), MOST_LIFE), flag(s.get("twice")))
    return name(s.get("after")), told


def _status(s: dict[str, Any]) -> Status:
    return Status(_maybe(s.get("loss"), -MOST_REAL), _maybe(s.get("tokens_per_s")), _maybe(s.get("busy")))


def _maybe(said: object, least: float = 0.0) -> float | None:
    return None if said is None else real(said, MOST_REAL, least)


def read_links(said: object) -> dict[PeerId, LinkState]:
    """What a peer tells of its links: peer, way, round trip, bytes a second up and down."""
    heard = {}
    for link in items(said, MOST_LINKS):
        if len(items(link, 5)) != 5:
            raise BadValue("a link that is none")
        other, way, rtt_s, up, down = link
        if way is not None and way not in _WAYS:
            raise BadValue("a link of an unknown way")
        heard[name(other)] = LinkState(other, way, _measured(rtt_s), None, _measured(up), _measured(down))
    return heard


def _measured(said: object) -> float | None:
    found = _maybe(said)
    return found or None  # nothing takes no time at all


def read_proposed(said: object) -> Proposed:
    s = table(said, 8)
    return Proposed(
        by=name(s.get("by")),
        head=name(s.get("head")),
        term=whole(s.get("term"), MOST_TERM),
        name=name(s.get("name")),
        signature=text(s.get("signature"), SIGNATURE),
    )


def _ballot(s: dict[str, Any]) -> Ballot:
    vote = _vote([s.get("term"), s.get("signature")])
    return Ballot(name(s.get("head")), vote, read_votes(s.get("votes", {})))


def _vote(said: object) -> Vote:
    if len(items(said, 2)) != 2:
        raise BadValue("a vote that is none")
    term, signature = items(said, 2)
    return Vote(whole(term, MOST_TERM, 1), text(signature, SIGNATURE))


def read_votes(said: object) -> dict[PeerId, Vote]:
    return {name(peer): _vote(vote) for peer, vote in table(said, MOST_MEMBERS).items()}


def _query(s: dict[str, Any]) -> Query:
    return Query(name(s.get("head")), whole(s.get("term"), MOST_TERM), read_votes(s.get("votes")))


def _promise(s: dict[str, Any]) -> Promise:
    return Promise(name(s.get("head")), whole(s.get("term"), MOST_TERM), read_acked(s.get("acked")))


def read_acked(said: object) -> tuple[int, Record] | None:
    if said is None:
        return None
    s = table(said, 8)
    return whole(s.get("term"), MOST_TERM), Record.of(s.get("record"))


def _proposal(s: dict[str, Any]) -> Proposal:
    record = Record.of(s.get("record"))
    term = whole(s.get("term"), MERGE_TERM if record.kind == "merge" else MOST_TERM)
    return Proposal(term, record, read_votes(s.get("votes")), text(s.get("signature"), SIGNATURE))


def _ack(s: dict[str, Any]) -> Ack:
    return Ack(name(s.get("hash")), whole(s.get("term"), MERGE_TERM), text(s.get("signature"), SIGNATURE))


def _wanted(s: dict[str, Any]) -> Wanted:
    return Wanted([name(one) for one in items(s.get("locator"), MOST_LOCATOR)])


def _nothing(s: dict[str, Any]) -> None:
    return None


_LONG = 8 << 20  # what holds a record; with a thousand members it is a megabyte
MOST: dict[str, int] = {
    "pulse": 256 << 10,
    "vote": 1 << 20,
    "query": 1 << 20,
    "promise": _LONG,
    "propose": _LONG,
    "ack": 2 << 10,
    "commit": _LONG,
    "chain": 64 << 10,
    "part": 4 << 20,
    "snapshots": 2 << 10,
}
_READ: dict[str, Callable[[dict[str, Any]], Any]] = {
    "pulse": _pulse,
    "vote": _ballot,
    "query": _query,
    "promise": _promise,
    "propose": _proposal,
    "ack": _ack,
    "commit": Certified.of,
    "chain": _wanted,
    "part": Part.of,
    "snapshots": _nothing,
}


def read(kind: str, body: bytes | memoryview) -> Any:
    """BadValue for what is none."""
    if len(body) > MOST[kind]:
        raise BadValue(f"{len(body)} bytes, where a {kind} has at most {MOST[kind]}")
    return _READ[kind](table(read_json(body) if len(body) else {}, 1 << 12))


def read_history(body: bytes | memoryview, most: int, most_bytes: int) -> History:
    s = table(read_json(body, most_parts=MOST_IN_HISTORY, most_bytes=most_bytes), 64)
    records = [Certified.of(one) for one in items(s.get("records"), most)]
    return History(name(s.get("head")), records, len(body))
