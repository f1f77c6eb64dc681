"""Whatever bytes come, the parser returns a frame or says `BadFrame`."""

from __future__ import annotations

import contextlib
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.net import frames
from shoal.net.api import Message


def _samples() -> list[bytes]:
    made = [
        frames.head("ask", 7, Message("blob", {"sha": "ab", "n": [1, 2.5, None]}, b"x" * 100)),
        frames.head("tell", 8, Message("m", {}, b"y" * (frames.INLINE + 1))),
        frames.head("answer", 0xFFFFFFFF, Message("ok")),
        frames.piece("tell", 8, frames.PIECE, b"z" * 500),
        frames.refuse("ask", 7, "no ü"),
        frames.stop("answer", 3),
        frames.beat(5, 1.5, 1e6, echo=False),
        frames.more(),
        frames.bye("leaving"),
    ]
    return [b"".join(parts) for parts in made]


def test_frames_come_back_as_they_were_sent() -> None:
    ask, tell, ok, piece, refuse, stop, beat, more, bye = (frames.parse(s) for s in _samples())
    assert isinstance(ask, frames.Head)
    assert ask.whole
    assert ask.body == b"x" * 100
    assert ask.fields["n"] == [1, 2.5, None]
    assert isinstance(tell, frames.Head)
    assert not tell.whole
    assert tell.body_bytes == frames.INLINE + 1
    assert isinstance(ok, frames.Head)
    assert ok.id == 0xFFFFFFFF
    assert isinstance(piece, frames.Piece)
    assert piece.offset == frames.PIECE
    assert bytes(piece.data) == b"z" * 500
    assert refuse == frames.Refuse("ask", 7, "no ü")
    assert stop == frames.Stop("answer", 3)
    assert beat == frames.Beat(5, 1.5, 1e6, False)
    assert isinstance(more, frames.More)
    assert bye == frames.Bye("leaving")


@given(st.binary(max_size=200))
@settings(max_examples=500, deadline=None)
def test_random_bytes_never_crash_the_parser(data: bytes) -> None:
    with contextlib.suppress(frames.BadFrame):
        frames.parse(data)


def test_mutated_frames_never_crash_the_parser() -> None:
    rng, samples = random.Random(9), _samples()
    refused = 0
    for _ in range(20_000):
        data = bytearray(rng.choice(samples))
        for _ in range(rng.randint(1, 4)):
            how = rng.randrange(3)
            at = rng.randrange(len(data)) if data else 0
            if how == 0 and data:
                data[at] = rng.randrange(256)
            elif how == 1:
                del data[at:]
            else:
                data[at:at] = rng.randbytes(rng.randint(1, 9))
        try:
            frames.parse(bytes(data))
        except frames.BadFrame:
            refused += 1
    assert refused > 5_000


@pytest.mark.parametrize(
    "text", [b"[" * 50_000, b'["k",1]', b'["k"]', b"[1,{}]", b'["",{}]', b'{"k":{}}', b"\xff", b'["k",{}]x', b"1e999"]
)
def test_heads_that_are_no_message_are_refused(text: bytes) -> None:
    head = frames._HEAD.pack(1, 1, len(text), 0)
    with pytest.raises(frames.BadFrame):
        frames.parse(head + text)


def test_messages_that_cannot_be_sent_are_said_so_here() -> None:
    with pytest.raises(ValueError, match="put them into its body"):
        frames.head("ask", 1, Message("k", {"x": "y" * frames.MOST_HEAD}))
    with pytest.raises(ValueError):
        frames.head("ask", 1, Message("k", {"x": float("nan")}))
    with pytest.raises(ValueError):
        frames.head("ask", 1, Message("", {}))
