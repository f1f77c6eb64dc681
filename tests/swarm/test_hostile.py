"""What one member may do to another's node: say anything at all, and be named for what it has signed."""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from shoal.net.api import Address, Handler, LinkState, Message, PeerId, Refused
from shoal.net.identity import Identity
from shoal.swarm.invite import Admission
from shoal.swarm.lies import Lie, forks, said_bytes
from shoal.swarm.messages import MOST, Proposed
from shoal.swarm.node import Node
from shoal.swarm.patience import MOST_REFUSED
from shoal.swarm.roster import Roster
from shoal.swarm.round_record import Certified, Part, Record, ack_text, proposal_text, vote_text
from shoal.swarm.signed import Forged, encode64
from shoal.swarm.talk import MOST_APART
from shoal.swarm.view import status
from tests.swarm.toy_swarm import spec

SWARM = "5" * 64
HUGE = 10**400
ODD: list[Any] = [
    None, True, 0, -1, 1 << 62, 1 << 63, HUGE, -HUGE, 1.5, 1e308, -1e308, "", "\x00", "\ud800", "x" * 5000, "ab" * 32,
    [], {}, [[]], {"a": {}}, [None] * 100, [[["a"]]], "NaN", "1e999",
]  # fmt: skip


class Fake:
    """An endpoint in memory: what is told is kept, what is handled is called."""

    def __init__(self, me: PeerId) -> None:
        self.id, self.handlers, self.told = me, dict[str, tuple[Handler, int]](), list[tuple[PeerId, Message]]()
        self.linked: set[PeerId] = set()

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    def address(self) -> Address:
        return Address()

    def on(self, kind: str, handler: Handler, most_body: int = 1 << 20) -> None:
        self.handlers[kind] = handler, most_body

    def know(self, peer: PeerId, address: Address) -> None: ...

    def forget(self, peer: PeerId) -> None:
        self.linked.discard(peer)

    async def ask(self, peer: PeerId, message: Message, timeout_s: float = 10.0, most_body: int = 1 << 20) -> Message:
        raise Refused("nobody answers here")

    def tell(self, peer: PeerId, message: Message) -> None:
        self.told.append((peer, message))

    def links(self) -> dict[PeerId, LinkState]:
        return {p: LinkState(p, "tcp") for p in self.linked}


class Shore:
    """One node, whose swarm has five members; `liar` is one of them."""

    def __init__(self, folder: Path) -> None:
        self.organiser = Identity.new()
        self.keys = sorted((Identity.new() for _ in range(5)), key=lambda key: key.id)
        self.me, self.liar = self.keys[1], self.keys[0]  # the liar leads
        self.events: list[dict[str, Any]] = []
        self.roster = self.roster_of(self.me)
        others = [self.roster_of(key) for key in self.keys]
        self.roster.take([e.to_json() for o in others for e in o.newer({})])
        self.endpoint = Fake(self.me.id)
        self.endpoint.linked = {key.id for key in self.keys if key is not self.me}
        self.node = Node(
            folder, SWARM, self.me, self.endpoint, spec(peers=5), None,
            admitted=self.roster.__contains__, event=self.event, accuse=self.roster.accuse,
        )  # fmt: skip
        members = tuple(key.id for key in self.keys)
        self.head = Record("branch", 1, (self.node.chain.start.hash,), members, by=members[0])
        self.node.decider.adopt(self.certified(self.head, self.keys), 0.0)

    def event(self, kind: str, **fields: Any) -> None:
        self.events.append({"kind": kind, **fields})

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [e for e in self.events if e["kind"] == kind]

    def roster_of(self, key: Identity) -> Roster:
        return Roster(SWARM, self.organiser.id, key, Admission.direct(SWARM, key.id, self.organiser), event=self.event)

    def certified(self, record: Record, keys: list[Identity], term: int = 0) -> Certified:
        text = ack_text(SWARM, record.hash, term)
        return Certified(record, term, {key.id: key.sign(text).hex() for key in keys})

    def round(self, **fields: Any) -> Record:
        members = tuple(key.id for key in self.keys)
        return Record("round", 2, (self.head.hash,), members, by=self.liar.id, **fields)

    async def hears(self, kind: str, body: bytes, by: Identity | None = None) -> str:
        """What the sender is told: empty, or why not. Nothing else may come out of a handler."""
        by = by or self.liar
        handler, most = self.endpoint.handlers[kind]
        if len(body) > most:
            return "too long"
        signature = by.sign(said_bytes(SWARM, kind, body)).hex()
        try:
            await handler(by.id, Message(kind, {"signature": signature}, body))
        except Refused as e:
            return str(e)
        return ""

    def proposed(self, record: Record, by: Identity, term: int = 0) -> Proposed:
        text = proposal_text(SWARM, record.parent, term, record.hash)
        return Proposed(by.id, record.parent, term, record.hash, by.sign(text).hex())

    # One good message of each kind, as the liar would say it.

    def good(self) -> dict[str, dict[str, Any]]:
        record, liar = self.round(), self.liar
        vote = liar.sign(vote_text(SWARM, self.head.hash, 5)).hex()
        part = Part(liar.id, 2, "ab" * 32, 10, 10, 1, ((0, 1),), 1.0, 1.0, {self.me.id: 0.5}, targets=10)
        weights = {"after": self.head.hash, "digest": "ab", "life": 0, "twice": False}
        links = [[self.me.id, "tcp", 0.1, 1e6, 1e6]]
        proposal = self.proposed(record, liar)
        pulse = {"head": self.head.hash, "round": 1, "ended": 0, "begun": 1, "wants": True, "leaving": False}
        pulse |= {"weights": weights, "status": {"loss": 1.0, "tokens_per_s": 1.0, "busy": 0.5}, "links": links}
        ack = liar.sign(ack_text(SWARM, record.hash, 0)).hex()
        return {
            "pulse": {**pulse, "proposed": proposal.body()},
            "vote": {"head": self.head.hash, "term": 5, "signature": vote, "votes": {liar.id: [5, vote]}},
            "query": {"head": self.head.hash, "term": 5, "votes": {liar.id: [5, vote]}},
            "promise": {"head": self.head.hash, "term": 0, "acked": {"term": 0, "record": record.body()}},
            "propose": {"term": 0, "record": record.body(), "votes": {}, "signature": proposal.signature},
            "ack": {"hash": record.hash, "term": 0, "signature": ack},
            "commit": self.certified(record, [liar]).body(),
            "chain": {"locator": [self.head.hash]},
            "part": part.body(),
            "snapshots": {},
        }


def story(folder: Path, body: Callable[[Shore], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        shore = Shore(folder)
        await body(shore)
        await shore.node.tasks.close()

    asyncio.run(run())


def spots(node: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The places of all values in a message."""
    inner = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    return [spot for key, value in inner for spot in [(*at, key), *spots(value, (*at, key))]]


def changed(said: Any, spot: tuple[Any, ...], value: Any) -> Any:
    said = json.loads(json.dumps(said))
    at = said
    for key in spot[:-1]:
        at = at[key]
    at[spot[-1]] = value
    return said


def test_every_field_of_every_message_at_its_extremes_is_understood_or_refused(tmp_path: Path) -> None:
    rng = random.Random(int(os.environ.get("SHOAL_FUZZ", 0)))

    async def body(shore: Shore) -> None:
        monkey = pytest.MonkeyPatch()
        monkey.setattr(shore.node, "accuse", lambda lie: None)  # or it would be put out at once
        monkey.setattr(shore.node.talk.patience, "allows", lambda peer, now: "")
        good = shore.good()
        assert set(good) == set(MOST)
        for kind, said in good.items():
            for spot in spots(said):
                for odd in rng.sample(ODD, 6):
                    await shore.hears(kind, json.dumps(changed(said, spot, odd)).encode())
            for raw in (b"", b"7", b"[" * 100_000, b'{"a":' * 50_000, b"\xff\xfe", b"NaN", b'{"head": 1e999}'):
                await shore.hears(kind, raw[: MOST[kind]])
        shore.node._tick(1.0)
        told = json.dumps(status(shore.node, []), allow_nan=False)  # as the organiser sees it
        assert len(told) < 20_000
        assert shore.node.chain.head.hash == shore.head.hash
        assert shore.node.decider.term == 0

    story(tmp_path, body)


@pytest.mark.parametrize("field", ["loss", "tokens_per_s", "busy"])
def test_a_pulse_with_a_number_of_400_digits_is_refused_and_its_sender_named_with_it(
    tmp_path: Path, field: str
) -> None:
    async def body(shore: Shore) -> None:
        pulse = shore.good()["pulse"]
        assert await shore.hears("pulse", json.dumps(pulse).encode()) == ""
        said = changed(pulse, ("status", field), HUGE)
        assert "400" in (why := await shore.hears("pulse", json.dumps(said).encode())) or "401" in why
        json.dumps(status(shore.node, []), allow_nan=False)
        (named,) = shore.of("put-out")
        assert named["peer"] == shore.liar.id
        assert "has signed a pulse with a whole number of 40" in named["text"]
        assert shore.liar.id not in shore.roster
        assert not shore.roster.admit(shore.liar.id, b"")
        assert shore.liar.id not in shore.node.decider.heard

    story(tmp_path, body)


def test_only_what_is_needed_of_a_pulse_is_kept(tmp_path: Path) -> None:
    async def body(shore: Shore) -> None:
        pulse = shore.good()["pulse"]
        pulse["status"] |= {f"k{i}": "x" * 4000 for i in range(40)}
        pulse["more"] = "y" * 50_000
        assert await shore.hears("pulse", json.dumps(pulse).encode()) == ""
        assert len(repr(shore.node.talk.others[shore.liar.id])) < 3000
        assert shore.endpoint.handlers["pulse"][1] <= 256 << 10  # longer ones are refused before they are read

    story(tmp_path, body)


def test_a_message_that_its_sender_has_not_signed_is_nobodys_proof(tmp_path: Path) -> None:
    async def body(shore: Shore) -> None:
        handler, _ = shore.endpoint.handlers["pulse"]
        for signature in (None, "", "00" * 64, 7):
            with pytest.raises(Refused, match="has not signed"):
                await handler(shore.liar.id, Message("pulse", {"signature": signature}, b"{}"))
        assert shore.liar.id in shore.roster

    story(tmp_path, body)


def test_one_that_makes_no_sense_again_and_again_is_not_listened_to_nor_written_down_for_ever(tmp_path: Path) -> None:
    async def body(shore: Shore) -> None:
        for _ in range(10 * MOST_REFUSED):
            await shore.hears("ack", b'{"hash": 3}')
        assert len(shore.of("refused")) <= MOST_REFUSED
        assert len(shore.of("muted")) == 1
        assert "no sense" in await shore.hears("chain", json.dumps(shore.good()["chain"]).encode())
        assert shore.liar.id in shore.roster  # which proves nothing
        assert await shore.hears("chain", json.dumps(shore.good()["chain"]).encode(), by=shore.keys[2]) == ""

    story(tmp_path, body)


def test_a_leader_that_proposes_two_records_in_one_term_is_named_by_whoever_hears_of_both(tmp_path: Path) -> None:
    async def body(shore: Shore) -> None:
        one, two = shore.proposed(shore.round(time=1.0), shore.liar), shore.proposed(shore.round(time=2.0), shore.liar)
        pulse = shore.good()["pulse"]
        for word, by in ((one, shore.keys[2]), (two, shore.keys[3])):  # each has heard another one
            assert await shore.hears("pulse", json.dumps({**pulse, "proposed": word.body()}).encode(), by) == ""
        (named,) = shore.of("put-out")
        assert named["peer"] == shore.liar.id
        assert "two records in term 0" in named["text"]
        lie = shore.roster.lies()[shore.liar.id]
        assert Lie.of(json.loads(json.dumps(lie.to_json())), SWARM) == lie

    story(tmp_path, body)


def test_a_member_that_agrees_to_two_records_in_one_term_is_named_and_the_others_are_not(tmp_path: Path) -> None:
    async def body(shore: Shore) -> None:
        first, second = (
            shore.certified(shore.round(time=t), [*shore.keys[a:b], shore.liar])
            for t, a, b in ((1.0, 1, 3), (2.0, 3, 5))
        )
        for one in (first, second):
            assert await shore.hears("commit", json.dumps(one.body()).encode(), shore.keys[4]) == ""
        assert [e["peer"] for e in shore.of("put-out")] == [shore.liar.id]
        assert "agreed to two records" in shore.of("put-out")[0]["text"]

    story(tmp_path, body)


def test_a_proof_that_proves_nothing_is_refused(tmp_path: Path) -> None:
    async def body(shore: Shore) -> None:
        honest, other = shore.keys[2], shore.keys[3]
        one, two = shore.proposed(shore.round(time=1.0), honest), shore.proposed(shore.round(time=2.0), other)
        later = shore.proposed(shore.round(time=2.0), honest, term=1)
        good = json.dumps(shore.good()["pulse"]).encode()
        signed = {"message": "pulse", "signature": honest.sign(said_bytes(SWARM, "pulse", good)).hex(), "why": ""}
        for kind, evidence in (
            ("proposals", {"first": one.body(), "second": one.body()}),
            ("proposals", {"first": one.body(), "second": two.body()}),  # of two members
            ("proposals", {"first": one.body(), "second": later.body()}),  # in two terms
            ("proposals", {"first": one.body(), "second": {**one.body(), "name": "f" * 64}}),  # made up
            ("range", {**signed, "body": encode64(good)}),  # a message as it should be
            ("range", {**signed, "body": encode64(good.replace(b'"begun": 1', b'"begun": -1'))}),
            ("acks", {"term": 0, "first": {}, "second": {}}),
            ("else", {}),
        ):
            with pytest.raises(Forged):
                Lie.of({"by": honest.id, "kind": kind, "evidence": evidence}, SWARM)
            assert not shore.roster.take([], lies=[{"by": honest.id, "kind": kind, "evidence": evidence}]).news
        assert honest.id in shore.roster
        two_terms = [shore.certified(shore.round(time=t), shore.keys[:3], term) for t, term in ((1.0, 0), (2.0, 1))]
        shore.node.chain.add(two_terms[0])
        assert forks(shore.node.chain, two_terms[1]) == []  # what is agreed to in a later term is no lie

    story(tmp_path, body)


def test_the_proof_reaches_the_others_and_the_liar_and_stays_on_disk(tmp_path: Path) -> None:
    async def body(shore: Shore) -> None:
        one, two = (shore.proposed(shore.round(time=t), shore.liar) for t in (1.0, 2.0))
        lie = Lie(shore.liar.id, "proposals", {"first": one.body(), "second": two.body()})
        theirs, own = shore.roster_of(shore.keys[3]), shore.roster_of(shore.liar)
        entries = [e.to_json() for e in shore.roster.newer({})]
        for roster in (theirs, own):
            roster.take(entries)
            roster.take([], sender=shore.me.id, lies=[lie.to_json()])
        assert shore.liar.id not in theirs
        assert own.expelled
        assert not theirs.take(entries).fresh  # its record does not bring it back
        theirs._file = tmp_path / "roster.json"
        theirs.save()
        again = Roster.load(tmp_path / "roster.json", shore.keys[3])
        assert shore.liar.id not in again
        assert list(again.lies()) == [shore.liar.id]

    story(tmp_path, body)


def test_who_was_put_out_is_left_out_of_the_next_record_and_its_samples_go_to_others(tmp_path: Path) -> None:
    async def body(shore: Shore) -> None:
        one, two = (shore.proposed(shore.round(time=t), shore.liar) for t in (1.0, 2.0))
        shore.node.accuse(Lie(shore.liar.id, "proposals", {"first": one.body(), "second": two.body()}))
        record = shore.node.offer("branch", shore.head.members, None, 0.0)
        assert record is not None
        assert shore.liar.id not in record.members
        assert record.left == {shore.liar.id: "put out"}
        assert not record.ledger.away

    story(tmp_path, body)


def test_a_branch_that_one_peer_makes_up_is_not_merged_and_not_learnt_without_end(tmp_path: Path) -> None:
    async def body(shore: Shore) -> None:
        for key in shore.keys[2:]:  # most are heard
            await shore.hears("pulse", json.dumps(shore.good()["pulse"]).encode(), key)
        shore.node.decider._born -= 100
        tokens = Part(shore.liar.id, 3, "ab" * 32, 10, 1 << 39, 1, ((0, 1),), targets=1 << 39)
        branch = Record("branch", 2, (shore.head.hash,), (shore.liar.id,), by=shore.liar.id)
        forged = Record("round", 3, (branch.hash,), (shore.liar.id,), (tokens,), tokens=1 << 39, by=shore.liar.id)
        for record in (branch, forged):
            await shore.hears("commit", json.dumps(shore.certified(record, [shore.liar]).body()).encode())
        assert shore.node.chain.head.hash == shore.head.hash
        assert not shore.node.mergeable(forged.hash)
        assert "is not merged" in shore.of("unlawful")[0]["text"]
        shore.node.talk._apart[shore.liar.id] = MOST_APART
        pulse = {**shore.good()["pulse"], "head": "ee" * 32, "proposed": None}
        await shore.hears("pulse", json.dumps(pulse).encode())
        assert not shore.node.talk._asking

    story(tmp_path, body)
