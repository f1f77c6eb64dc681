"""Rosters that come into line: each peer asks a random other now and then, and passes news on at once.

A question is the hash of what one has; only if it differs do the summaries travel, then what the other lacks. News
(somebody came, moved, was revoked) goes to a few peers at once, and from those to others, so a swarm of hundreds knows
within a second or two, and what was lost on the way is made up for by the next question. No peer is special: as long as
any two know each other, all that either has heard reaches the other.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from shoal.net.answers import Answers
from shoal.net.api import Address, Endpoint, Event, Message, PeerId, Refused, Unreachable
from shoal.net.identity import canonical
from shoal.swarm.entries import Entry, Revocation
from shoal.swarm.lies import Lie
from shoal.swarm.roster import MOST_ENTRIES, MOST_REVOKED, Changed, Roster
from shoal.swarm.signed import Object
from shoal.values import BadValue, flag, items, name, read_object, real, table, text, whole

EVERY_S = 2.0
FANOUT = 3  # who hears news at once
MOST_BODY = 2 << 20
FIT = 3 << 18  # bytes of records in one message; beside them is a summary
MOST_TIME = 1e11  # seconds since 1970
SKEW_TOLD_S = 60.0  # from where on clocks that differ are worth a word
ASK, NEWS, CHARTER = "roster.ask", "roster.news", "charter"


@dataclass(frozen=True)
class News:
    """What a peer knows of others. Each record is checked by the roster that takes it in."""

    entries: list[Object] = field(default_factory=list)
    revocations: list[Object] = field(default_factory=list)
    lies: list[Object] = field(default_factory=list)
    summary: dict[PeerId, int] = field(default_factory=dict)  # what it has of whom
    revoked: frozenset[str] = frozenset()  # that it knows of
    known_lies: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Told:
    time: float | None  # by its clock
    same: bool  # it has what we have
    news: News


class Gossip:
    """Keeps a roster current over an endpoint, and the endpoint's links in line with the roster."""

    def __init__(
        self,
        roster: Roster,
        endpoint: Endpoint,
        event: Event | None = None,
        wants: Callable[[PeerId], bool] = lambda peer: True,
        every_s: float = EVERY_S,
        charter: bytes = b"",
        answers: Answers | None = None,
    ) -> None:
        """`wants`: to whom a link is kept; the others are known, and can be asked. `charter`: what newcomers ask for
        first (`enter`)."""
        self._roster, self._endpoint, self._event = roster, endpoint, event
        self._wants, self._every_s, self._charter = wants, every_s, charter
        self._answers = answers or Answers(endpoint, event or _nobody_listens, roster.name)
        self._offsets: dict[PeerId, float] = {}
        self._told_skew = False
        self._watchers: list[Callable[[Changed], None]] = []
        endpoint.on(ASK, self._asked, MOST_BODY)
        endpoint.on(NEWS, self._heard, MOST_BODY)
        if charter:
            endpoint.on(CHARTER, self._told_charter, 0)
        roster.changed = self._changed
        for peer in roster.others():
            self._link(peer)

    def watch(self, changed: Callable[[Changed], None]) -> None:
        """Told of whoever comes, moves and goes."""
        self._watchers.append(changed)

    @property
    def skew_s(self) -> float | None:
        """How far this machine's clock is behind the others'; None: nobody was asked yet."""
        return median(self._offsets.values()) if self._offsets else None

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            self.announce()
            await self.round()
            await asyncio.sleep(self._every_s * random.uniform(0.7, 1.3))

    def announce(self) -> None:
        """Where this peer is, if that has changed."""
        if self._roster.announce(self._endpoint.address()):
            self.spread([self._roster.me.id])

    async def round(self) -> None:
        """One question to somebody who may answer."""
        linked = [p for p, link in self._endpoint.links().items() if link.way is not None and p in self._roster]
        known = [p for p in linked or self._roster.others() if not self._answers.rests(p, ASK)]
        if known:
            with contextlib.suppress(Unreachable, Refused):
                await self.ask(random.choice(known))

    async def ask(self, peer: PeerId, timeout_s: float = 10.0) -> None:
        """Both sides know afterwards what either knew. Raises `Unreachable` or `Refused`."""
        roster, began = self._roster, self._roster.clock()
        own = roster.entry(roster.me.id)
        witnessed = own is not None and (own.witness is not None or own.admission.ticket is None)
        fields: Object = {"digest": roster.digest(), "witnessed": witnessed}
        said = await self._answers.ask(peer, Message(ASK, fields), read_told, timeout_s, MOST_BODY)
        if said.time is not None:
            self._clock(peer, said.time, began, roster.clock())
        self._take(said.news, peer)
        if said.same:
            return
        state = json.dumps(self._state()).encode()
        said = await self._answers.ask(peer, Message(ASK, fields, state), read_told, timeout_s, MOST_BODY)
        self._take(said.news, peer)
        self._send([peer], roster.newer(said.news.summary), *self._unknown_to(said.news))

    def spread(self, peers: Iterable[PeerId] = (), besides: PeerId = "") -> None:
        """News, to a few who pass it on: the records of these peers, and all revocations."""
        roster = self._roster
        linked = [p for p, link in self._endpoint.links().items() if link.way is not None and p != besides]
        to = random.sample(linked, min(FANOUT, len(linked)))
        entries = [e for p in peers if (e := roster.entry(p)) is not None]
        self._send(to, entries, list(roster.revoked().values()), self._lies_not_in([]))

    async def leave(self) -> None:
        """Says goodbye, so that nobody looks for this peer."""
        self._roster.announce(left=True)
        linked = [p for p, link in self._endpoint.links().items() if link.way is not None]
        own = self._roster.entry(self._roster.me.id)
        if own is not None:
            self._send(linked, [own], [])
        await asyncio.sleep(0)

    async def _asked(self, peer: PeerId, message: Message) -> Message | None:
        roster = self._roster
        asker = roster.entry(peer) if message.fields.get("witnessed") is not True else None
        entries = [] if asker is None else [asker]  # with the word of its witness, which it will need
        if not len(message.body):
            same = message.fields.get("digest") == roster.digest()
            return Message(ASK, {"time": roster.clock(), "same": same}, next(_bodies(entries, []), b""))
        news = self._read(peer, message)
        entries += roster.newer(news.summary)
        first = next(_bodies(entries, *self._unknown_to(news), self._state()))
        return Message(ASK, {"time": roster.clock()}, first)

    async def _heard(self, peer: PeerId, message: Message) -> Message | None:
        self._take(self._read(peer, message), peer)
        return None

    def _read(self, peer: PeerId, message: Message) -> News:
        """What was said unasked."""
        try:
            return read_news(message.body)
        except BadValue as e:
            self._answers.bad(peer, message.kind, str(e))
            raise Refused(f"{message.kind}: {e}"[:200]) from None

    async def _told_charter(self, peer: PeerId, message: Message) -> Message | None:
        return Message(CHARTER, {}, self._charter)

    def _state(self) -> Object:
        """What is known here, for somebody else to tell what we lack."""
        roster = self._roster
        return {"summary": roster.summary(), "revoked": sorted(roster.revoked()), "known_lies": sorted(roster.lies())}

    def _unknown_to(self, said: News) -> tuple[list[Revocation], list[Lie]]:
        """What somebody who has said that does not know of."""
        lacks = [r for id, r in self._roster.revoked().items() if id not in said.revoked]
        return lacks, self._lies_not_in(said.known_lies)

    def _lies_not_in(self, known: Collection[str]) -> list[Lie]:
        """Proofs against members, but of those whom the other knows about."""
        return [lie for p, lie in self._roster.lies().items() if p not in known and lie.fits]

    def _take(self, news: News, sender: PeerId) -> None:
        if news.entries or news.revocations or news.lies:
            self._roster.take(news.entries, news.revocations, sender, lies=news.lies)

    def _changed(self, changed: Changed, sender: PeerId) -> None:
        """The roster has taken something in: from a message, a greeting, or the organiser at this machine."""
        self.spread(changed.peers, besides=sender)
        for peer in changed.gone:
            self._endpoint.forget(peer)
            self._offsets.pop(peer, None)
            if peer in self._roster:  # it has left, and may come back: welcome then, but nobody looks for it
                self._endpoint.know(peer, Address())
        for peer in changed.fresh:
            self._link(peer)
        for watcher in self._watchers:
            watcher(changed)

    def _link(self, peer: PeerId) -> None:
        entry = self._roster.entry(peer)
        if entry is not None and not entry.left and self._wants(peer):
            self._endpoint.know(peer, entry.address)

    def _send(
        self, to: Iterable[PeerId], entries: list[Entry], revocations: list[Revocation], lies: Sequence[Lie] = ()
    ) -> None:
        for body in _bodies(entries, revocations, lies):
            for peer in to:
                self._endpoint.tell(peer, Message(NEWS, {}, body))

    def _clock(self, peer: PeerId, theirs: float, sent: float, received: float) -> None:
        """Most of the others are right about the time; expiry is then judged by them."""
        self._offsets[peer] = theirs - (sent + received) / 2
        skew = median(self._offsets.values())
        self._roster.offset_s = skew if abs(skew) > SKEW_TOLD_S else 0.0
        if abs(skew) > SKEW_TOLD_S and not self._told_skew and self._event is not None:
            self._event("clock", skew_s=round(skew, 1))
        self._told_skew = abs(skew) > SKEW_TOLD_S


def _bodies(
    entries: list[Entry], revocations: list[Revocation], lies: Sequence[Lie] = (), state: Object | None = None
) -> Iterator[bytes]:
    """As many messages as it takes; none for nothing. `state` goes with the first."""
    held: Object = {"entries": [], "revocations": [], "lies": [], **(state or {})}
    size = 0
    items = [("revocations", r.to_json()) for r in revocations] + [("lies", lie.to_json()) for lie in lies]
    items += [("entries", e.to_json()) for e in entries]
    for where, item in items:
        held[where].append(item)
        size += len(canonical(item))
        if size > FIT:
            yield canonical(held)
            held, size, state = {"entries": [], "revocations": [], "lies": []}, 0, None
    if size or state is not None:
        yield canonical(held)


def read_told(answer: Message) -> Told:
    """Of a peer that was asked for its roster. BadValue for what is none."""
    when, same = answer.fields.get("time"), answer.fields.get("same", False)
    return Told(None if when is None else real(when, MOST_TIME, 0.0), flag(same), read_news(answer.body))


def read_news(body: bytes | memoryview) -> News:
    if not len(body):
        return News()
    s = read_object(body, most_bytes=MOST_BODY)
    return News(
        entries=_objects(s.get("entries"), MOST_ENTRIES),
        revocations=_objects(s.get("revocations"), MOST_REVOKED),
        lies=_objects(s.get("lies"), MOST_REVOKED),
        summary={name(peer): whole(seq) for peer, seq in table(s.get("summary", {}), 2 * MOST_ENTRIES).items()},
        revoked=_texts(s.get("revoked"), MOST_REVOKED),
        known_lies=_texts(s.get("known_lies"), MOST_REVOKED),
    )


def _objects(said: object, most: int) -> list[Object]:
    return [] if said is None else [table(one, 64) for one in items(said, most)]


def _texts(said: object, most: int) -> frozenset[str]:
    return frozenset(() if said is None else (text(one, 256) for one in items(said, most)))


def _nobody_listens(kind: str, **fields: Any) -> None: ...
