"""What members of a swarm tell each other and keep: messages, records, charters, invitations, rosters, manifests."""

from __future__ import annotations

import hashlib
import json
import zlib
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

from tests.fuzz.json_values import edge, encoded, mutated
from tests.fuzz.raw_bytes import damaged
from tests.fuzz.reader import Finding, Target, reader
from tests.fuzz.samples import file_target, identity, lines_of, texts_of

A, B, C = "aa" * 32, "bb" * 32, "cc" * 32
SWARM = "5a" * 32
NOW = 1_800_000_000


def record_body() -> dict[str, Any]:
    part = {
        "peer": A,
        "round": 3,
        "blob": B,
        "size": 1000,
        "tokens": 64,
        "steps": 2,
        "used": [[0, 4], [8, 9]],
        "loss": 2.5,
        "seconds": 1.5,
        "scores": {B: 0.5},
        "signature": "ab" * 64,
        "targets": 60,
    }
    ledger = {
        "cursor": 9,
        "done": 5,
        "free": [[5, 7]],
        "held": {A: [[7, 8]]},
        "away": {B: [[8, 9]]},
        "lanes": [A, B],
        "mine": [A],
    }
    return {
        "kind": "round",
        "round": 3,
        "parents": [C],
        "members": [A, B],
        "took": [part],
        "state": "ab12",
        "standing": {A: 0.5},
        "ledger": ledger,
        "tokens": 640,
        "weights": [],
        "left": {C: "gone"},
        "joined": [],
        "time": 1.8e9,
        "by": A,
    }


def certified_body() -> dict[str, Any]:
    return {"record": record_body(), "term": 2, "signatures": {A: "ab" * 64, B: "cd" * 64}}


@reader(
    "swarm-messages",
    "swarm.messages",
    "swarm.trainer_process",
    "swarm.talk",
    "swarm.route_keeper",
    quick=1500,
    share=1000,
    most_mib=512,  # a history: two million values of 200 bytes, and 4 times its 32 MiB
)
def messages(folder: Path) -> Target:
    from shoal.swarm.messages import read, read_history
    from shoal.values import BadValue

    proposed = {"by": A, "head": C, "term": 3, "name": B, "signature": "ab" * 64}
    votes = {A: [2, "ab" * 64]}
    good: dict[str, Any] = {
        "pulse": {
            "head": C,
            "round": 3,
            "ended": 2,
            "begun": 3,
            "wants": True,
            "leaving": False,
            "proposed": proposed,
            "weights": {"digest": "ab", "life": 1, "twice": False, "after": C},
            "status": {"loss": 2.5, "tokens_per_s": 100.0, "busy": 0.5},
            "links": [[B, "direct", 0.05, 1e6, 1e6], [C, None, None, None, None]],
        },
        "vote": {"head": C, "term": 2, "signature": "ab" * 64, "votes": votes},
        "query": {"head": C, "term": 2, "votes": votes},
        "promise": {"head": C, "term": 2, "acked": {"term": 1, "record": record_body()}},
        "propose": {"term": 2, "record": record_body(), "votes": votes, "signature": "ab" * 64},
        "ack": {"hash": C, "term": 2, "signature": "ab" * 64},
        "commit": certified_body(),
        "chain": {"locator": [A, B, C]},
        "part": record_body()["took"][0],
        "history": {"head": C, "records": [certified_body()]},
    }
    kinds = tuple(good)

    def generate(rng: Random) -> bytes:
        kind = rng.choice(kinds)
        text = encoded(mutated(rng, good[kind]))
        return kind.encode() + b"\n" + (text if rng.random() < 0.85 else damaged(rng, text))

    def parse(data: bytes) -> None:
        kind, _, body = data.partition(b"\n")
        said = read_history(body, 100, 32 << 20) if kind == b"history" else read(kind.decode(), body)
        if kind == b"commit" and type(said).of(json.loads(json.dumps(said.body()))) != said:
            raise Finding("a record that is another after a round trip")

    return Target(generate, parse, (BadValue,))


@reader("swarm-snapshots", "swarm.snapshots", quick=500, share=200)
def snapshots(folder: Path) -> Target:
    from shoal.swarm.chain import Chain
    from shoal.swarm.round_record import Record
    from shoal.swarm.snapshots import Snapshots

    chain = Chain(SWARM, Record("start", 0, (), (A,)), lambda *_: True)
    good = [{"hash": C, "round": 3, "blob": B, "size": 100, "digest": "ab"}] * 2
    return file_target(folder / "s" / "index.json", texts_of(good), lambda path: Snapshots(path.parent, chain))


@reader("swarm-answers", "swarm.trainer_process", "swarm.snapshots", quick=300, share=60)
def answers(folder: Path) -> Target:
    """What others answer to a newcomer who asks for a state: the good one is found, whoever else answers."""
    import asyncio
    from types import SimpleNamespace

    from shoal.net.answers import Answers
    from shoal.net.api import Message
    from shoal.swarm.trainer_process import Training

    loop = asyncio.new_event_loop()
    good = [{"hash": C, "round": 3, "blob": B, "size": 100, "digest": "ab"}]

    def read(data: bytes) -> None:
        async def ask(peer: str, *more: Any) -> Any:
            return Message("snapshots", {}, data if peer == A else json.dumps(good).encode())

        training = Training.__new__(Training)
        chain = SimpleNamespace(
            head=SimpleNamespace(hash=C), is_ancestor=lambda a, b: a == C, get=lambda name: SimpleNamespace(round=3)
        )
        talk = SimpleNamespace(
            linked=lambda: [A, B], message=Message, odd=lambda *_, **__: None, blame=lambda *_, **__: None
        )
        training._node = SimpleNamespace(  # type: ignore[assignment]
            snapshots=SimpleNamespace(before=lambda *_: None),
            chain=chain,
            talk=talk,
            answers=Answers(SimpleNamespace(ask=ask), lambda *_, **__: None),  # type: ignore[arg-type]  # of this case
            event=lambda *_, **__: None,
            me=C,
        )
        training.doubt = SimpleNamespace(trust=None, allows=lambda *_: True)  # type: ignore[assignment]
        training._useless = set()
        best, sources = loop.run_until_complete(training._newest_state())
        if best is None or not sources:
            raise Finding("one silly answer hides a good one")

    return Target(texts_of(good), read)


@reader("trainer-words", "swarm.trainer_words", quick=400, share=200)
def trainer_words(folder: Path) -> Target:
    """What a trainer says to its node: this machine's own, but anybody's code."""
    from shoal.swarm import trainer_words as t
    from shoal.values import BadValue

    handed = {"round": 3, "path": "/x", "tokens": 9, "targets": 8, "steps": 2, "used": [[0, 4]], "loss": 2.5}
    good: list[dict[str, Any]] = [
        {"kind": "ready", "params": 5},
        {"kind": "part", **handed, "seconds": 1.5},
        {"kind": "applied", "hash": C, "digest": "ab"},
        {"kind": "loaded", "digest": "ab"},
        {"kind": "saved", "path": "/x", "digest": "ab"},
        {"kind": "scored", "scores": {A: 0.5}},
        {"kind": "status", "loss": 2.5},
        {"kind": "failed", "why": "x"},
    ]
    return Target(texts_of(*good), t.read, (BadValue,))


@reader("swarm-chain", "swarm.chain", "swarm.round_record", quick=300, share=100)
def chain(folder: Path) -> Target:
    from shoal.swarm.chain import Chain
    from shoal.swarm.round_record import Certified, Record

    start = Record("start", 0, (), (A, B))
    one = Certified(Record.of({**record_body(), "round": 1, "parents": [start.hash]}), 1, {A: "ab", B: "cd"})
    lines = [{"add": json.loads(json.dumps(one.body()))}, {"head": one.record.hash}, {"head": start.hash}]

    def read(path: Path) -> None:
        known = Chain(SWARM, start, lambda *_: True, path)
        if known.head.hash not in known:
            raise Finding("a head that is unknown")

    return file_target(folder / "chain.jsonl", lines_of(lines), read)


@reader("swarm-agreed", "swarm.agreed_file", quick=300, share=100)
def agreed(folder: Path) -> Target:
    from shoal.swarm import agreed_file

    one = {"term": 1, "record": record_body()}
    good = {"head": C, "term": 2, "votes": {A: [2, "ab"]}, "acked": one, "proposed": one}
    return file_target(folder / "agreed.json", texts_of(good), lambda path: agreed_file.read(path, C))


def charter_held(**swarm: Any) -> dict[str, Any]:
    from shoal.spec import Run
    from shoal.swarm.charter import Charter, Input
    from shoal.swarm.proposal import values_of

    run = Run.model_validate({"name": "demo", "data": {"train": "x"}, "train": {"steps": 9}, "swarm": swarm})
    values = values_of(run)
    values["data"]["train"][0]["path"] = "inputs/0-x"
    one = Charter("demo", identity(1).id, 1, values, (Input("inputs/0-x", "f", "ab" * 32, 1, 2),))
    return dict(json.loads(one.to_bytes()))


@reader("charter", "swarm.charter", "swarm.proposal", quick=400, share=40)
def charter(folder: Path) -> Target:
    from shoal.errors import SetupError
    from shoal.swarm.charter import Charter

    file = folder / "charter.json"

    def read(data: bytes) -> None:
        file.write_bytes(data)
        found = Charter.load(file)
        if not all(i.place.startswith("inputs/") and ".." not in i.place for i in found.inputs):
            raise Finding("an input outside of the run's folder")
        again = found.to_bytes()
        if Charter.of(again, hashlib.sha256(again).hexdigest()) != found:
            raise Finding("a charter that is another after a round trip")

    return Target(texts_of(charter_held(), charter_held(stages={"count": 2})), read, (SetupError,))


@reader("layout", "swarm.layout", quick=300, share=60)
def layout(folder: Path) -> Target:
    """Signed or not: the organiser, too, may have another version."""
    from shoal.errors import SetupError
    from shoal.net.identity import canonical
    from shoal.swarm.charter import Charter
    from shoal.swarm.layout import SignedLayout
    from shoal.swarm.signed import sign

    text = canonical(charter_held(stages={"count": 2}))
    held, organiser = Charter.of(text, hashlib.sha256(text).hexdigest()), identity(1)
    file, good = folder / "layout.json", {"stages": [[A, B], [C]], "first": [1, 1]}

    def generate(rng: Random) -> bytes:
        made = mutated(rng, good) if rng.random() < 0.7 else dict(good)
        if not isinstance(made, dict) or rng.random() < 0.2:
            return damaged(rng, encoded(made))
        signature: Any = ""
        with suppress(ValueError, TypeError, RecursionError):
            body = {"swarm": held.swarm, "stages": made.get("stages"), "first": made.get("first")}
            signature = sign("layout", body, organiser)
        return encoded({**made, "signature": signature if rng.random() < 0.9 else edge(rng)})

    def read(data: bytes) -> None:
        file.write_bytes(data)
        found = SignedLayout.load(file, held)
        if found is None or len(found.stages) != 2 or not all(found.stages) or len(set(found.peers)) < len(found.peers):
            raise Finding("a layout without a peer for each stage, or with one in two places")
        if SignedLayout.of(found.to_bytes(), held) != found:
            raise Finding("a layout that is another after a round trip")

    return Target(generate, read, (SetupError,))


@reader("invitation", "swarm.invite", "swarm.signed", quick=300, share=60)
def invitation(folder: Path) -> Target:
    from shoal.errors import UsageError
    from shoal.net.api import Address
    from shoal.swarm.invite import PREFIX, Invitation, Ticket
    from shoal.swarm.signed import decode64, encode64, sign

    key = identity(3)
    ticket = Ticket.new(SWARM, identity(1), key.id, NOW)
    line = Invitation(ticket, key, "demo", {identity(2).id: Address(("http://r",), (), ("a:1",))}).line()
    held, _ = json.loads(zlib.decompress(decode64(line.removeprefix(PREFIX))))

    def generate(rng: Random) -> str:
        if rng.random() < 0.3:
            return damaged(rng, line.encode()).decode("utf-8", "surrogateescape")
        changed = mutated(rng, held)
        try:
            said = [changed, sign("line", changed, key)]
        except (ValueError, TypeError, RecursionError, AttributeError):
            said = [changed, "ab"]
        if rng.random() < 0.1:
            said = mutated(rng, said)
        return PREFIX + encode64(zlib.compress(encoded(said), 1))

    def read(text: str) -> None:
        found = Invitation.read(text)
        if Invitation.read(found.line()) != found:
            raise Finding("an invitation that is another after a round trip")

    return Target(generate, read, (UsageError,))


@reader(
    "roster",
    "swarm.roster",
    "swarm.entries",
    "swarm.lies",
    "swarm.gossip",
    quick=150,
    share=20,
    most_mib=512,  # a million values of 200 bytes, and 4 times the 64 MiB of its file
)
def roster(folder: Path) -> Target:
    """What a peer hears of others, and its own file of it."""
    from shoal.errors import SetupError
    from shoal.net.api import Address, Message
    from shoal.swarm.gossip import read_news, read_told
    from shoal.swarm.invite import Admission
    from shoal.swarm.roster import Roster
    from shoal.values import BadValue

    organiser, me, other = identity(1), identity(2), identity(3)
    file = folder / "roster.json"

    def member(who: Any, at: Path | None = None) -> Any:
        known = Roster(
            SWARM, organiser.id, who, Admission.direct(SWARM, who.id, organiser), name="n", clock=lambda: NOW, file=at
        )
        known.announce(Address(("http://r:1",), ("1.2.3.4:5",), ("1.2.3.4:6",)))
        return known

    first, second = member(me, file), member(other)
    first.admit(other.id, second.proof())
    first.revoke(organiser, "peer", C, [other.id])
    first.save()
    good = json.loads(file.read_bytes())
    good["lies"] = [{"by": other.id, "kind": "acks", "evidence": {"term": 1, "first": {}, "second": {}}}]
    good["summary"] = {other.id: 3}
    mine = member(me)

    def read(data: bytes) -> None:
        file.write_bytes(data)
        mine.admit(other.id, data[:4000])
        Roster.load(file, me, clock=lambda: NOW)
        news = read_news(data)
        mine.take(news.entries, news.revocations, sender=other.id, lies=news.lies)
        read_told(Message("roster", {"time": 1.5, "same": False}, data))

    return Target(texts_of(good), read, (SetupError, BadValue))


@reader("blob-folder", "swarm.blob_folder", quick=500, share=200)
def blob_folder(folder: Path) -> Target:
    from shoal.errors import DataError
    from shoal.swarm import blob_folder as b

    good = json.loads(b.manifest([b.File("a/b", 3, A), b.File("c.json", 1 << 30, B)]))

    def read(data: bytes) -> None:
        if any(f.path.startswith(("/", "..")) or "/../" in f.path or "\0" in f.path for f in b.parse(data)):
            raise Finding("a path outside of the folder")

    return Target(texts_of(good), read, (DataError,))


@reader("blob-place", "swarm.blob_store", "swarm.blob_fetch", "swarm.blobs", quick=300, share=60)
def blob_place(folder: Path) -> Target:
    from shoal.net.api import Message
    from shoal.swarm.blob_fetch import read_shown
    from shoal.swarm.blob_store import MOST_PIECES, Store
    from shoal.values import BadValue, read_object

    store = Store(folder / "blobs")
    good = {"path": str(folder / "x"), "size": 3, "mtime_ns": 5}
    at = folder / "blobs" / f"{A}.at"

    def read(data: bytes) -> None:
        at.write_bytes(data)
        store._outside(A)
        shown = read_shown(Message("blob", read_object(data)))
        if shown.have is not None and not 0 <= shown.have < 1 << MOST_PIECES:
            raise Finding("bits that are too many")

    return Target(texts_of(good, {"have": "ff00", "size": 100, "missing": False}), read, (BadValue,))


@reader("swarm-files", "swarm.config", "swarm.control", "cli.swarm.status", quick=200, share=30)
def swarm_files(folder: Path) -> Target:
    """What lies in a run's swarm folder: settings, commands, the status that `swarm status` shows."""
    from shoal.cli.swarm.status import lines
    from shoal.cli.swarm.status import read as read_status
    from shoal.errors import ShoalError
    from shoal.swarm.config import NodeConfig
    from shoal.swarm.control import obey
    from shoal.swarm.invite import Admission
    from shoal.swarm.roster import Roster
    from shoal.swarm.route_keeper import routes_of
    from shoal.values import BadValue

    where = folder / "run" / "swarm"
    config = NodeConfig(where)
    config.save()
    config.commands.mkdir()
    settings = json.loads(config.settings_file.read_bytes())
    me = identity(2)
    known = Roster(SWARM, identity(1).id, me, Admission.direct(SWARM, me.id, identity(1)))
    member = {
        "peer": A,
        "name": "n",
        "loss": 2.0,
        "busy": 0.5,
        "tokens_per_s": 10.0,
        "way": "direct",
        "rtt_s": 0.1,
        "up": 1e6,
        "down": 1e6,
        "lost": 0.0,
        "heard_s": 1.0,
        "share": 0.5,
        "state": "training",
    }
    status = {
        "time": NOW,
        "round": 3,
        "members": [member],
        "done": 5,
        "total": 10,
        "round_s": 1.0,
        "exchange_s": 0.5,
        "utilisation": 0.9,
        "predicted": 0.8,
        "split": {"round": 2, "sides": [[A], [B]]},
        "topology": "star",
        "events": [
            {"time": NOW, "kind": "round", "peer": A},
            {"time": NOW, "kind": "record", "took": [A], "left": {B: "gone"}},
        ],
        "links": {A: [[B, "direct", 0.1, 1.0, 1.0]], B: []},
        "sizes": {A: 100},
    }
    good: dict[str, Any] = {
        "s": settings,
        "c": {"what": "revoke", "revocation": {"what": "peer", "id": A}},
        "t": status,
    }

    def generate(rng: Random) -> bytes:
        kind = rng.choice(tuple(good))
        return kind.encode() + (encoded(mutated(rng, good[kind])) if rng.random() < 0.95 else encoded(edge(rng)))

    def read(data: bytes) -> None:
        kind, text = data[:1], data[1:]
        if kind == b"s":
            config.settings_file.write_bytes(text)
            NodeConfig.load(where)
        elif kind == b"c":
            (config.commands / "1.json").write_bytes(text)
            obey(config, known)
        else:
            config.status_file.write_bytes(text)
            if (found := read_status(config.status_file)) is not None:
                lines("demo", found, True, NOW)
                with suppress(BadValue):  # as `--picture` does
                    routes_of(found)

    return Target(generate, read, (ShoalError,))
