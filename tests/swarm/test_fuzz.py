"""Whatever a stranger writes: refused, never an exception of another kind, and nothing of it kept."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import random
import string
import time
from typing import Any

import pytest

from shoal.errors import DataError, SetupError, UsageError
from shoal.net.api import Address, Message
from shoal.net.identity import Identity, canonical
from shoal.spec import Run
from shoal.swarm import blob_folder
from shoal.swarm.blob_fetch import read_shown
from shoal.swarm.charter import Charter, Input
from shoal.swarm.gossip import read_news, read_told
from shoal.swarm.invite import Admission, Invitation
from shoal.swarm.proposal import values_of
from shoal.swarm.roster import Roster
from shoal.values import BadValue

SWARM = "5a" * 32
ODD: list[Any] = [
    None, True, 0, -1, 1 << 70, 1.5, float("nan"), "", "\x00", "\ud800", "x" * 5000, "ab" * 32, [], {}, [[]], {"a": {}},
    [None] * 100, {"peer": 1},
]  # fmt: skip


NEWS = {"entries": [{}], "revocations": [{}], "lies": [{}], "summary": {"ab" * 32: 3}, "revoked": ["a"]}


def broken(value: Any, rng: random.Random) -> Any:
    """The same with something in it replaced, removed, or repeated."""
    value = copy.deepcopy(value)
    spots: list[tuple[Any, Any]] = []

    def walk(node: Any) -> None:
        keys = list(node) if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ()
        for key in keys:
            spots.append((node, key))
            walk(node[key])

    walk(value)
    for _ in range(rng.randint(1, 3)):
        node, key = rng.choice(spots)
        if isinstance(node, dict) and rng.random() < 0.2:
            node.pop(key, None)
        elif isinstance(node, dict) or key < len(node):
            node[key] = rng.choice(ODD)
    return value


def noise(rng: random.Random) -> bytes:
    text = "".join(rng.choice('[]{}",:0123456789eE.-truefalsnl\\u ' + string.ascii_letters) for _ in range(80))
    return rng.choice([text.encode(), rng.randbytes(60), b"[" * 3000, b'{"a":' * 3000])


@pytest.fixture
def organiser() -> Identity:
    return Identity.new()


def member(organiser: Identity) -> Roster:
    me = Identity.new()
    return Roster(SWARM, organiser.id, me, Admission.direct(SWARM, me.id, organiser))


def test_broken_records_and_revocations(organiser: Identity) -> None:
    rng, roster = random.Random(1), member(organiser)
    other = member(organiser)
    invited = Invitation.new(SWARM, organiser, "demo", time.time() + 1000, {})
    me = Identity.new()
    guest = Roster(SWARM, organiser.id, me, invited.admit(me.id), name="guest")
    guest.announce(Address(("http://r:1",), ("1.2.3.4:5",), ("1.2.3.4:6",)))
    other.admit(me.id, guest.proof())
    true = [json.loads(canonical(e.to_json())) for e in other.newer({})]
    other.revoke(organiser, "peer", Identity.new().id, [me.id])
    words = [r.to_json() for r in other.revoked().values()]
    genuine = {canonical(e) for e in true}
    for _ in range(1500):
        entries, revoked = broken(true, rng), broken(words, rng)
        roster.take(entries, revoked)
        roster.take(rng.choice(ODD), rng.choice(ODD))
        roster.admit(rng.choice([me.id, "zz", "ab" * 32]), rng.choice([noise(rng), b"7", b'{"peer": 3}']))
        for entry in roster.newer({}):
            held = entry.to_json()
            held.pop("witness", None)
            if entry.peer != roster.me.id:  # nothing is in but what its author has signed
                assert any(json.loads(g).items() >= held.items() for g in genuine)
        assert all(r.to_json() in words for r in roster.revoked().values())
    assert roster.take(true, words).news or len(roster.members()) == 3


def test_broken_lines_charters_and_manifests(organiser: Identity) -> None:
    rng = random.Random(2)
    line = Invitation.new(SWARM, organiser, "demo", time.time(), {Identity.new().id: Address(tcp=("a:1",))}).line()
    run = Run.model_validate({"name": "demo", "data": {"train": "x"}, "train": {"steps": 9}})
    values = values_of(run)
    values["data"]["train"][0]["path"] = "inputs/0-x"
    charter = Charter("demo", organiser.id, 1, values, (Input("inputs/0-x", "f", "ab" * 32, 1, 2),))
    assert Charter.of(charter.to_bytes(), charter.swarm) == charter
    held = json.loads(charter.to_bytes())
    folder = json.loads(blob_folder.manifest([blob_folder.File("a/b", 3, "ab" * 32)]))
    for _ in range(500):
        letters = list(line)
        for _ in range(rng.randint(1, 4)):
            letters[rng.randrange(6, len(letters))] = rng.choice(string.ascii_letters + "-_=%")
        with contextlib.suppress(UsageError):
            assert Invitation.read("".join(letters)).line()[:6] == "shoal1"
        for text in (_dumps(broken(held, rng)), noise(rng)):
            try:
                found = Charter.of(text, hashlib.sha256(text).hexdigest())
                assert all(i.place.startswith("inputs/") and ".." not in i.place for i in found.inputs)
            except SetupError:
                pass
        for text in (_dumps(broken(folder, rng)), noise(rng)):
            with contextlib.suppress(DataError):
                assert all(not f.path.startswith(("/", "..")) for f in blob_folder.parse(text))
        fields = {key: rng.choice(ODD) for key in ("time", "same", "have", "size", "missing") if rng.random() < 0.5}
        with contextlib.suppress(BadValue):
            read_news(noise(rng))
        with contextlib.suppress(BadValue):
            read_told(Message("", fields, _dumps(broken(NEWS, rng)))).news.summary.items()
        with contextlib.suppress(BadValue):
            assert 0 <= (read_shown(Message("", fields)).have or 0) < 1 << (1 << 15)


def _dumps(value: Any) -> bytes:
    return json.dumps(value).encode()
