"""Reads a pickle as what it says, and does nothing of what it asks for.

A pickle is a small program: loading one calls whatever it names. This reader runs the stack machine but calls nothing,
imports nothing and sets no attribute: where a pickle would build an object there is a `Made`, a record of what that was
to be built from. What it may name at all is a short list of the caller's; the first name outside of it is refused. So
somebody else's checkpoint can be looked at, whoever wrote it. No torch here, and not Python's `pickle` either.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Container
from dataclasses import dataclass, field
from typing import Any

from shoal.errors import CheckpointError
from shoal.values import shown


class Refused(CheckpointError):
    """A pickle that is damaged, or wants what no plain data needs; the message is half a sentence."""


@dataclass(frozen=True)
class Global:
    """A name that a pickle refers to. Only a name."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(eq=False)  # by identity: a pickle may use one as a key before it is finished
class Made:
    """What a pickle wanted to be made: `what(*args)`, then given a state or items."""

    what: Global
    args: tuple[Any, ...]
    state: Any = None
    items: dict[Any, Any] = field(default_factory=dict)
    listed: list[Any] = field(default_factory=list)


@dataclass(frozen=True)
class Persistent:
    """Something kept beside the pickle, by its key (torch: the bytes of a tensor)."""

    key: Any


class Anything:
    """For `names`, where somebody's own settings stand beside what is read, and are not looked at: a name does nothing,
    whatever it is."""

    def __contains__(self, name: object) -> bool:
        return True


def read(data: bytes, names: Container[tuple[str, str]]) -> Any:
    """The value of a pickle that names nothing but `names`; else `Refused`."""
    machine = _Machine(data, names)
    try:
        return machine.run()
    except Refused:
        raise
    except (IndexError, KeyError, TypeError, ValueError, struct.error, RecursionError, MemoryError) as e:
        raise Refused(f"it is damaged, or no pickle at all (byte {machine.at}: {type(e).__name__})") from None


_MARK = object()
# A pickle can name one tuple many times over: 64 of them, each of the one before it twice, have 2^64 parts, and Python
# visits every one of them to make a key of it.
MOST_PARTS = 1_000_000  # of one tuple, counted as if it were written out
MOST_WORK = 20_000_000  # the same, of all keys together
MOST_KEY = 1 << 60  # of numbers as keys: above, many can be had that Python's tables cannot tell apart quickly


MOST_DEPTH = 100  # of tuples in tuples: Python makes a key of one by recursion, without a limit of its own


class _Tuple(tuple[Any, ...]):
    """Knows how many parts it has, down to the last, and how deep that is."""

    parts: int
    depth: int


def _size(value: Any) -> tuple[int, int]:
    value = value.key if isinstance(value, Persistent) else value
    return (value.parts, value.depth) if isinstance(value, _Tuple) else (1, 0)


def _tuple(values: list[Any]) -> _Tuple:
    made, sizes = _Tuple(values), [_size(value) for value in values]
    made.parts, made.depth = 1 + sum(parts for parts, _ in sizes), 1 + max((depth for _, depth in sizes), default=0)
    if made.parts > MOST_PARTS or made.depth > MOST_DEPTH:
        raise Refused(f"it has a tuple of more than {MOST_PARTS:,} parts when it is written out, or {MOST_DEPTH} deep")
    return made


class _Machine:
    def __init__(self, data: bytes, names: Container[tuple[str, str]]) -> None:
        self.data, self.names = data, names
        self.at = 0
        self.stack: list[Any] = []
        self.work = 0  # done for keys
        self.memo: dict[int, Any] = {}

    def run(self) -> Any:
        while True:
            code = self.data[self.at]
            self.at += 1
            if code == _STOP:
                if len(self.stack) != 1:
                    raise ValueError("ends with more or less than one value")
                return self.pop()
            do = _DO.get(code)
            if do is None:
                raise Refused(f"it uses the opcode {bytes([code])!r}, which plain data does not need")
            do(self)

    def take(self, count: int) -> bytes:
        part = self.data[self.at : self.at + count]
        if len(part) != count:
            raise ValueError("ends too early")
        self.at += count
        return part

    def number(self, kind: str) -> Any:
        return struct.unpack(kind, self.take(struct.calcsize(kind)))[0]

    def line(self) -> str:
        end = self.data.index(b"\n", self.at)
        return self.take(end + 1 - self.at)[:-1].decode()

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def pop(self) -> Any:
        value = self.stack.pop()
        if value is _MARK:
            raise ValueError("a mark where a value should be")
        return value

    def since_mark(self) -> list[Any]:
        begin = len(self.stack) - 1
        while self.stack[begin] is not _MARK:
            begin -= 1
            if begin < 0:
                raise ValueError("no mark")
        values = self.stack[begin + 1 :]
        del self.stack[begin:]
        return values

    def tuple_of(self, count: int) -> None:
        self.push(_tuple([self.pop() for _ in range(count)][::-1]))

    def named(self, module: str, name: str) -> None:
        if not isinstance(module, str) or not isinstance(name, str):
            raise TypeError("a name that is no text")
        if (module, name) not in self.names:
            raise Refused(f"it asks for {shown(f'{module}.{name}')}, which no plain checkpoint needs")
        self.push(Global(module, name))

    def global_on_stack(self) -> None:
        name, module = self.pop(), self.pop()
        self.named(module, name)

    def make(self) -> None:
        args, what = self.pop(), self.pop()
        if not isinstance(what, Global) or not isinstance(args, tuple):
            raise TypeError("something is made of what cannot be called")
        self.push(Made(what, args))

    def build(self) -> None:
        state, made = self.pop(), self.stack[-1]
        if not isinstance(made, Made):
            raise TypeError("a state for what has none")
        made.state = state

    def append(self, values: list[Any]) -> None:
        into = self.stack[-1]
        into = into.listed if isinstance(into, Made) else into
        if not isinstance(into, list):
            raise TypeError("items for what is no list")
        into.extend(values)

    def set_items(self, flat: list[Any]) -> None:
        into = self.stack[-1]
        table = into.items if isinstance(into, Made) else into
        if not isinstance(table, dict):
            raise TypeError("items for what is no table")
        for key, value in zip(flat[::2], flat[1::2], strict=True):
            table[self.key(key)] = value

    def key(self, value: Any) -> Any:
        """A value that a table may have as its key, as long as that does not take for ever."""
        self.work += _size(value)[0]
        if self.work > MOST_WORK:
            raise Refused(f"the keys of its tables have more than {MOST_WORK:,} parts")
        if isinstance(value, float) or (isinstance(value, int) and abs(value) > MOST_KEY):
            raise Refused("it has a table by numbers that no checkpoint counts with")
        return value

    def kept_beside(self) -> None:
        key = self.pop()
        if isinstance(key, Persistent):
            raise TypeError("a key of a key")
        self.push(Persistent(key))

    def remember(self, key: int) -> None:
        if self.stack[-1] is _MARK:
            raise ValueError("a mark is remembered")
        self.memo[key] = self.stack[-1]


def _long(m: _Machine, count: int) -> None:
    if count < 0:
        raise ValueError("a number of negative length")
    m.push(int.from_bytes(m.take(count), "little", signed=True))


_STOP = ord(".")
_DO: dict[int, Callable[[_Machine], object]] = {
    0x80: lambda m: m.take(1),  # PROTO
    0x95: lambda m: m.take(8),  # FRAME
    ord("("): lambda m: m.push(_MARK),
    ord("0"): lambda m: m.pop(),
    ord("N"): lambda m: m.push(None),
    0x88: lambda m: m.push(True),
    0x89: lambda m: m.push(False),
    ord("K"): lambda m: m.push(m.number("<B")),
    ord("M"): lambda m: m.push(m.number("<H")),
    ord("J"): lambda m: m.push(m.number("<i")),
    0x8A: lambda m: _long(m, m.number("<B")),
    0x8B: lambda m: _long(m, m.number("<i")),
    ord("G"): lambda m: m.push(m.number(">d")),
    0x8C: lambda m: m.push(m.take(m.number("<B")).decode()),
    ord("X"): lambda m: m.push(m.take(m.number("<I")).decode()),
    0x8D: lambda m: m.push(m.take(m.number("<Q")).decode()),
    ord("C"): lambda m: m.push(m.take(m.number("<B"))),
    ord("B"): lambda m: m.push(m.take(m.number("<I"))),
    0x8E: lambda m: m.push(m.take(m.number("<Q"))),
    ord(")"): lambda m: m.push(()),
    0x85: lambda m: m.tuple_of(1),
    0x86: lambda m: m.tuple_of(2),
    0x87: lambda m: m.tuple_of(3),
    ord("t"): lambda m: m.push(_tuple(m.since_mark())),
    ord("]"): lambda m: m.push([]),
    ord("a"): lambda m: m.append([m.pop()]),
    ord("e"): lambda m: m.append(m.since_mark()),
    ord("}"): lambda m: m.push({}),
    ord("s"): lambda m: m.set_items([m.pop(), m.pop()][::-1]),
    ord("u"): lambda m: m.set_items(m.since_mark()),
    0x94: lambda m: m.remember(len(m.memo)),
    ord("q"): lambda m: m.remember(m.number("<B")),
    ord("r"): lambda m: m.remember(m.number("<I")),
    ord("h"): lambda m: m.push(m.memo[m.number("<B")]),
    ord("j"): lambda m: m.push(m.memo[m.number("<I")]),
    ord("c"): lambda m: m.named(m.line(), m.line()),
    0x93: lambda m: m.global_on_stack(),
    ord("R"): lambda m: m.make(),
    0x81: lambda m: m.make(),  # NEWOBJ
    ord("b"): lambda m: m.build(),
    ord("Q"): lambda m: m.kept_beside(),
}
