"""What travels on a connection: frames, each a few fixed numbers, then JSON or bytes.

A frame is refused by its length before anything is allocated for it, and by its form before anybody looks at what it
says. Everything here comes from another machine: `parse` raises `BadFrame` or returns a frame, whatever the bytes.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from typing import Any, Literal

from shoal.net.api import Message
from shoal.values import BadValue, read_json

MOST_HEAD = 1 << 20  # of a message's kind and fields, as JSON
MOST_KIND = 64  # characters
INLINE = 16 << 10  # bodies up to this go with their head, on the control connection; larger ones in pieces beside it
PIECE = 64 << 10  # of a body; small, so that messages that share a connection take turns
MOST_BODY = 1 << 34
MOST_TEXT = 1024
MOST_FRAME = 64 + MOST_HEAD + INLINE
MOST_BULK_FRAME = 64 + PIECE

_ASK, _TELL, _ANSWER, _REFUSE, _PING, _PONG, _PIECE, _STOP, _MORE, _BYE = range(1, 11)
_HEADS: dict[int, Carries] = {_ASK: "ask", _TELL: "tell", _ANSWER: "answer"}
_CODES: dict[Carries, int] = {"ask": _ASK, "tell": _TELL, "answer": _ANSWER}
_HEAD, _BEAT, _PART, _ID = struct.Struct(">BIIQ"), struct.Struct(">BIdd"), struct.Struct(">BBIQ"), struct.Struct(">BBI")

Carries = Literal["ask", "tell", "answer"]
Data = bytes | memoryview


class BadFrame(ValueError):
    """No frame of ours: the connection it came on is not worth keeping."""


@dataclass(frozen=True)
class Head:
    """A message, or the beginning of one whose body comes in pieces."""

    carries: Carries
    id: int  # an answer has that of its question
    kind: str
    fields: dict[str, Any]
    body: Data  # what is here of it: all, or nothing
    body_bytes: int

    @property
    def whole(self) -> bool:
        return self.body_bytes <= INLINE


@dataclass(frozen=True)
class Piece:
    carries: Carries
    id: int
    offset: int
    data: Data


@dataclass(frozen=True)
class Refuse:
    """The answer to a question is no; or the body of an answer is not wanted."""

    carries: Carries
    id: int
    why: str


@dataclass(frozen=True)
class Stop:
    """No more pieces of this, please."""

    carries: Carries
    id: int


@dataclass(frozen=True)
class Beat:
    """A heartbeat, or its echo: the clock, and how fast the sender has received (bytes/s, 0: unknown)."""

    id: int
    sent_s: float
    rate: float
    echo: bool


@dataclass(frozen=True)
class More:
    """Who has accepted the connection cannot dial: it asks for connections for bulk."""


@dataclass(frozen=True)
class Bye:
    why: str


Frame = Head | Piece | Refuse | Stop | Beat | More | Bye


def head(carries: Carries, id: int, message: Message) -> list[Data]:
    """In parts, to be written one after the other. ValueError for what cannot be sent."""
    text = json.dumps([message.kind, message.fields], separators=(",", ":"), allow_nan=False).encode()
    size = len(message.body) if isinstance(message.body, bytes) else message.body.nbytes
    if len(text) > MOST_HEAD:
        raise ValueError(f"A message {message.kind!r} with {len(text)} bytes of fields: put them into its body.")
    if size > MOST_BODY or not 0 < len(message.kind) <= MOST_KIND:
        raise ValueError(f"A message {message.kind[:MOST_KIND]!r} with a body of {size} bytes cannot be sent.")
    parts: list[Data] = [_HEAD.pack(_CODES[carries], id, len(text), size) + text]
    if 0 < size <= INLINE:
        parts.append(message.body)
    return parts


def piece(carries: Carries, id: int, offset: int, data: Data) -> list[Data]:
    return [_PART.pack(_PIECE, _CODES[carries], id, offset), data]


def refuse(carries: Carries, id: int, why: str) -> list[Data]:
    return [_ID.pack(_REFUSE, _CODES[carries], id) + _text(why)]


def stop(carries: Carries, id: int) -> list[Data]:
    return [_ID.pack(_STOP, _CODES[carries], id)]


def beat(id: int, sent_s: float, rate: float, echo: bool) -> list[Data]:
    return [_BEAT.pack(_PONG if echo else _PING, id, sent_s, rate)]


def more() -> list[Data]:
    return [bytes([_MORE])]


def bye(why: str) -> list[Data]:
    return [bytes([_BYE]) + _text(why)]


def parse(data: Data) -> Frame:
    code = data[0] if len(data) else 0
    if code == _PIECE:
        _, of, id, offset = _unpack(_PART, data)
        rest = memoryview(data)[_PART.size :]
        if not 0 < len(rest) <= PIECE or offset + len(rest) > MOST_BODY:
            raise BadFrame("a piece of no or too many bytes")
        return Piece(_carries(of), id, offset, rest)
    if code in _HEADS:
        return _parse_head(data)
    if code in (_REFUSE, _STOP):
        _, of, id = _unpack(_ID, data)
        why = _read_text(data, _ID.size)
        return Refuse(_carries(of), id, why) if code == _REFUSE else Stop(_carries(of), id)
    if code in (_PING, _PONG):
        _, id, sent_s, rate = _unpack(_BEAT, data)
        if len(data) != _BEAT.size or not 0 <= rate < 1e15 or not abs(sent_s) < 1e15:  # NaN is refused too
            raise BadFrame("a heartbeat that is none")
        return Beat(id, sent_s, rate, code == _PONG)
    if code == _MORE and len(data) == 1:
        return More()
    if code == _BYE:
        return Bye(_read_text(data, 1))
    raise BadFrame(f"a frame of the unknown kind {code}")


def _parse_head(data: Data) -> Head:
    code, id, text_bytes, body_bytes = _unpack(_HEAD, data)
    inline = body_bytes if body_bytes <= INLINE else 0
    if text_bytes > MOST_HEAD or body_bytes > MOST_BODY or len(data) != _HEAD.size + text_bytes + inline:
        raise BadFrame("a message whose lengths do not fit it")
    try:
        said = read_json(data[_HEAD.size : _HEAD.size + text_bytes])
    except BadValue as e:
        raise BadFrame(f"a message that is none: {e}") from e
    if not isinstance(said, list) or len(said) != 2:
        raise BadFrame("a message that is not a kind and fields")
    kind, fields = said
    if not isinstance(kind, str) or not 0 < len(kind) <= MOST_KIND or not isinstance(fields, dict):
        raise BadFrame("a message that is not a kind and fields")
    return Head(_HEADS[code], id, kind, fields, bytes(data[_HEAD.size + text_bytes :]), body_bytes)


def _unpack(form: struct.Struct, data: Data) -> tuple[Any, ...]:
    if len(data) < form.size:
        raise BadFrame("a frame that ends early")
    return form.unpack_from(data)


def _carries(code: int) -> Carries:
    if code not in _HEADS:
        raise BadFrame("a frame about what is no message")
    return _HEADS[code]


def _text(why: str) -> bytes:
    return why.encode()[:MOST_TEXT]


def _read_text(data: Data, start: int) -> str:
    if len(data) - start > MOST_TEXT:
        raise BadFrame("a reason that is too long")
    return bytes(data[start:]).decode(errors="replace")
