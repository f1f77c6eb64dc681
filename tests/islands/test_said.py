"""What islands say to each other and write down: typed, or none; nothing else comes out of a reader."""

from __future__ import annotations

import json
import math
import socket
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from shoal import wire
from shoal.errors import SetupError
from shoal.islands import cut, enter
from shoal.islands.epoch import Card, Epoch, Fence
from shoal.islands.lines import Server, answer, ask
from shoal.islands.member import Frozen
from shoal.islands.succession import State
from shoal.islands.trade import Gone, _parsed
from shoal.swarm.trainer.keeper import Work
from shoal.values import BadValue, whole
from tests.islands.nonsense import ODD, RAW, Made

CARD = Card("0-ab", 0, "127.0.0.1:1", ("127.0.0.1:2",), "here", 7)
EPOCH = Epoch(3, (CARD,), 5, {"0-ab": [1]}, {"1-ab": "left"}, ("0-ab",), "0-ab", 1, 1.5, {"to": 2})
STATE = State(1, 2, [3], behind=False)
FROZEN = {"state": asdict(STATE), "hears": ["0-ab"]}
TOKEN = b"x" * wire.TOKEN_BYTES


@pytest.mark.parametrize(
    ("read", "true"),
    [
        (Card.of, asdict(CARD)),
        (Epoch.of, asdict(EPOCH)),
        (State.of, asdict(STATE)),
        (Frozen.of, FROZEN),
        (Work.of, asdict(Work([[0, 4]], 4, 1, 0.5, 2.0, 4))),
    ],
    ids=["card", "epoch", "state", "frozen", "work"],
)
def test_what_islands_say_is_typed_or_none(read: Callable[[Any], Any], true: dict[str, Any]) -> None:
    true = json.loads(json.dumps(true))
    read(true)
    refused = 0
    for key in true:
        for odd in ODD:
            try:
                read({**true, key: odd})
            except BadValue:  # and nothing else
                refused += 1
    assert refused > 10 * len(true)


def test_an_epoch_comes_back_as_it_was_and_a_damaged_one_is_named(tmp_path: Path) -> None:
    fence = Fence(tmp_path)
    assert fence.create(EPOCH)
    assert fence.newest() == EPOCH
    made = Made(2)
    for _ in range(6):
        fence._path(3).write_bytes(made.rng.choice(RAW))
        with pytest.raises(SetupError, match=r"000003\.json is damaged \("):
            fence.newest()


def test_files_of_islands_that_cannot_be_read_are_of_nobody(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    for i, raw in enumerate(RAW):
        (tmp_path / "here" / f"{i}.json").write_bytes(raw)
        (tmp_path / "cut").write_bytes(raw)
        assert not cut._told(tmp_path / "cut", 0)
    good = {"card": asdict(CARD), "step": 4, "digest": "d", "ended": 0}
    (tmp_path / "here" / "good.json").write_text(json.dumps(good))
    assert [found.card for found in enter._here(tmp_path)] == [CARD]


def test_a_header_of_a_trade_that_makes_no_sense_is_the_end_of_its_member() -> None:
    head = {"step": 3, "nodes": [[0, 4]], "says": {"losses": [None]}}
    assert _parsed(1, bytearray(json.dumps(head).encode()), 3, 4) == ([(0, 4)], {"losses": [None]})
    for raw in RAW:
        with pytest.raises(Gone, match="cannot be understood"):
            _parsed(1, bytearray(raw), 3, 4)
    for nodes in ([[1, 3]], [[0, 5]], [[0, 1]] * 5, [[-1, 2]], [5], [[0]], 5, [[0.0, 4]]):  # of no tree over 4 shards
        with pytest.raises(Gone, match="cannot be understood"):
            _parsed(1, bytearray(json.dumps({**head, "nodes": nodes}).encode()), 3, 4)
    with pytest.raises(Gone, match="is at step 3"):
        _parsed(1, bytearray(json.dumps(head).encode()), 4, 4)


@pytest.mark.parametrize("raw", [raw for raw in RAW if raw not in (b"{}", b'{"records": 5, "head": 1}')])
def test_a_message_between_processes_of_a_run_that_is_none_breaks_the_connection(raw: bytes) -> None:
    a, b = socket.socketpair()
    with a, b:
        a.sendall(len(raw).to_bytes(4, "big") + raw)
        with pytest.raises(wire.Broken, match="a message that is none"):
            wire.receive_message(b, 1 << 20)
        with pytest.raises(ValueError, match="JSON"):
            wire.send(a, {"loss": math.nan})


def test_an_answer_that_cannot_be_read_is_none() -> None:
    server = Server("127.0.0.1", TOKEN, {"status": lambda sock, said: answer(sock, {"n": "five"})})
    try:
        with pytest.raises(OSError, match="'status' that is none: 'five' where a whole number belongs"):
            ask(server.address, TOKEN, {"for": "status"}, lambda reply: whole(reply.get("n")), 60.0)
        assert ask(server.address, TOKEN, {"for": "status"}, lambda reply: reply, 60.0) == {"n": "five"}
    finally:
        server.close()


@pytest.mark.parametrize(
    "text", ["", ":", "h", "h:", "h:x", "h:-1", "h:65536", "h:" + "9" * 5000, "h:٣", "h: 5", "h:1_0"]
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no host:port"):
        wire.address_of(text)
