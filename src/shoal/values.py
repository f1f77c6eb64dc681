"""What others wrote, as values: JSON and its parts, each of one type and within a range, or `BadValue`.

The one way in for what a file of others, a peer or a scheduler says. Everything is read here first, so that no number
beyond 64 bits, no NaN, no infinity, no deep nesting and no text or list without a largest length is ever seen by the
rest. A bool is no number. Python would take all of these: an integer of 400 digits passes every check and then fails to
become a float somewhere far away. `shoal.plain_file` opens files; this module reads what they hold.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar, cast

T = TypeVar("T")
MOST_WHOLE = 1 << 62
MOST_REAL = 1e15
LAST_YEAR = 253_402_300_800.0  # the year 10000: no clock of Python knows a later one
MOST_PID = 1 << 22  # Linux has no higher number of a process; 0 and less would mean many of them at once
MOST_DIGITS = 19  # of a whole number
MOST_DEPTH = 64
MOST_BYTES = 16 << 20  # of one JSON text, and
MOST_PARTS = 1_000_000  # values in it: with both, reading it takes 256 MiB at the worst
MOST_ITEMS = 4_000_000  # of a list or an object that is there already
_BLOCK = 1 << 18
_HEX = re.compile(r"[0-9a-f]{64}\Z")
_AS_ZEROS = bytes.maketrans(b"123456789E", b"000000000e")
_LONG, _FAR = b"0" * MOST_DIGITS, b"e000"
_HALVES = re.compile(rb"\\u[dD][89a-fA-F]")
_AS_SQUARE = bytes.maketrans(b"{}", b"[]")
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


class BadValue(ValueError):
    """Not what may stand there. `reason` says what is wrong, `place` where: a file, a field, a peer."""

    def __init__(self, reason: str, place: str = "") -> None:
        super().__init__(f"{place}: {reason}" if place else reason)
        self.reason, self.place = reason, place

    def within(self, outer: str) -> BadValue:
        """The same, seen from further out: `layers` within `config.json` is `config.json: layers`."""
        return type(self)(self.reason, f"{outer}: {self.place}" if self.place else outer)


class OutOfRange(BadValue):
    """A number, but none that an honest peer sends."""


@contextmanager
def inside(place: str) -> Iterator[None]:
    """Whatever is refused here is refused at `place`."""
    try:
        yield
    except BadValue as e:
        raise e.within(place) from None


def read_json(
    data: bytes | memoryview,
    most_depth: int = MOST_DEPTH,
    most_parts: int = MOST_PARTS,
    huge: bool = False,
    most_bytes: int = MOST_BYTES,
) -> Any:
    """JSON whose numbers are finite and of 64 bits and whose texts can be printed, in UTF-8. Length, depth and count
    are looked at before anything is built. It takes about 200 bytes a value and 4 a byte, so who allows more says so.

    With `huge`, a whole number beyond that is read as a float, for files in which they are usual where nobody looks."""
    if len(data) > most_bytes:
        raise BadValue(f"it has {len(data):,} bytes, where at most {most_bytes:,} are expected")
    data = bytes(data)
    outside = b"".join(_outside(data))
    _bound(outside, most_depth, most_parts)
    digits = outside.translate(_AS_ZEROS, b"+-")
    odd = _LONG in digits or _FAR in digits  # some number may be too large: look at each
    try:
        said = json.loads(  # of a text: given bytes it would also take UTF-16, which nothing above has looked at
            data.removeprefix(b"\xef\xbb\xbf").decode(),
            parse_int=(_int_or_float if huge else _int) if odd else None,
            parse_float=_float if odd else None,
            parse_constant=_constant,
        )
        if b"\\" in data and _HALVES.search(data):
            json.dumps(said, ensure_ascii=False).encode()  # half a character cannot be written anywhere
        return said
    except RecursionError:
        raise BadValue("it is nested too deeply") from None
    except BadValue:
        raise
    except UnicodeEncodeError:
        raise BadValue("it has a text with half a character in it (a lone surrogate)") from None
    except ValueError:
        raise BadValue("it is no JSON") from None


def read_object(
    data: bytes | memoryview,
    most_depth: int = MOST_DEPTH,
    most_parts: int = MOST_PARTS,
    huge: bool = False,
    most_bytes: int = MOST_BYTES,
) -> dict[str, Any]:
    said = read_json(data, most_depth, most_parts, huge, most_bytes)
    if not isinstance(said, dict):
        raise BadValue(f"{_shown(said)} where a JSON object belongs")
    return said


def _outside(data: bytes) -> Iterator[bytes]:
    """What stands outside of its texts, block by block: one list of all pieces, or a pattern that goes over a text with
    many escapes, would take more memory than the values."""
    at = within = 0
    while at < len(data):
        block = data[at : at + _BLOCK]
        if b"\\" in block:
            if (len(block) - len(block.rstrip(b"\\"))) & 1:  # the last one escapes what comes next
                block += data[at + _BLOCK : at + _BLOCK + 1]
            at += len(block)
            block = block.replace(b"\\\\", b"").replace(b'\\"', b"")
        else:
            at += len(block)
        pieces = block.split(b'"')
        yield b"".join(pieces[within::2])
        within ^= (len(pieces) - 1) & 1


def _bound(outside: bytes, most_depth: int, most_parts: int) -> None:
    opened = outside.count(b"[") + outside.count(b"{")
    if opened + outside.count(b",") > most_parts:
        raise BadValue(f"it holds more than {most_parts:,} values")
    if opened <= most_depth:
        return
    left = outside.translate(_AS_SQUARE, _NO_BRACKETS)  # those of the wrong kind are found by the parser
    for _ in range(most_depth):  # each round takes the innermost pairs away
        if not left:
            return
        left = left.replace(b"[]", b"")
    if left:
        raise BadValue(f"it is no JSON, or nested more than {most_depth} deep")


def whole(said: object, most: int = MOST_WHOLE, least: int = 0) -> int:
    if type(said) is not int:
        raise BadValue(f"{_shown(said)} where a whole number belongs")
    if not least <= said <= most:
        raise OutOfRange(f"{_shown(said)} where a whole number from {least} to {most} belongs")
    return said


def real(said: object, most: float = MOST_REAL, least: float = -MOST_REAL) -> float:
    if type(said) not in (int, float):
        raise BadValue(f"{_shown(said)} where a number belongs")
    if not least <= cast(float, said) <= most:  # NaN is in no range
        raise OutOfRange(f"{_shown(said)} where a number from {least:g} to {most:g} belongs")
    return float(cast(float, said))


def flag(said: object) -> bool:
    if not isinstance(said, bool):
        raise BadValue(f"{_shown(said)} where true or false belongs")
    return said


def text(said: object, most: int) -> str:
    if not isinstance(said, str) or len(said) > most:
        raise BadValue(f"{_shown(said)} where a text of at most {most} characters belongs")
    return said


def name(said: object) -> str:
    """A key or a hash."""
    if not isinstance(said, str) or not _HEX.match(said):
        raise BadValue(f"{_shown(said)} where 64 hexadecimal digits belong")
    return said


def items(said: object, most: int) -> list[Any]:
    if not isinstance(said, list | tuple) or len(said) > most:  # a tuple: of our own, where nothing has travelled
        raise BadValue(f"no list of at most {most} things")
    return list(said)


def fields(said: object, known: Collection[str]) -> dict[str, Any]:
    """An object with these fields and no others; some may be missing."""
    if not isinstance(said, dict) or not said.keys() <= set(known):
        raise BadValue("no object, or one with unknown fields")
    return said


def table(said: object, most: int) -> dict[str, Any]:
    """An object whose keys are names of others' choice."""
    if not isinstance(said, dict):
        raise BadValue(f"{_shown(said)} where an object belongs")
    if len(said) > most:
        raise BadValue(f"an object of {len(said)} fields where at most {most} belong")
    return said


def finite(said: object) -> float | None:
    """Of our own, before it is sent: a loss that is NaN is no number for others."""
    ok = isinstance(said, int | float) and not isinstance(said, bool) and abs(said) <= MOST_REAL
    return float(said) if ok else None  # type: ignore[arg-type]  # mypy does not see it through `ok`


def _int(digits: str) -> int:
    if len(digits.lstrip("-")) > MOST_DIGITS:
        raise OutOfRange(f"a whole number of {len(digits)} digits")
    return int(digits)


def _int_or_float(digits: str) -> int | float:
    return _float(digits) if len(digits.lstrip("-")) > MOST_DIGITS else int(digits)


def _float(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise OutOfRange(f"a number that is too large ({digits[:20]})")
    return number


def _constant(which: str) -> NoReturn:
    raise BadValue(f"{which} where a number belongs")


def _shown(said: object) -> str:
    if isinstance(said, bool | float) or said is None:
        return repr(said)
    if isinstance(said, int):
        return repr(said) if abs(said) <= MOST_WHOLE else "a number of more than 62 bits"
    return f"{said[:20]!r}" if isinstance(said, str) else f"a {type(said).__name__}"


def look_at_count(data: bytes, most_parts: int) -> None:
    """For one who parses JSON by other rules than `read_json`, as documents of others have numbers of any kind in the
    fields that nobody reads: refuses more values than so many before they are built. Takes no memory itself."""
    marks = (b"[", b"{", b",")
    if sum(map(data.count, marks)) <= most_parts:
        return
    parts = 0
    for outside in _outside(data):
        parts += sum(map(outside.count, marks))
        if parts > most_parts:
            raise BadValue(f"it holds more than {most_parts:,} values")


def look_at_depth(data: bytes, most_depth: int = MOST_DEPTH) -> None:
    """For the same: how deep a parser of Python goes by itself depends on its version, and who writes it again with an
    indent goes less deep than who has read it."""
    if data.count(b"[") + data.count(b"{") > most_depth:
        _bound(b"".join(_outside(data)), most_depth, len(data))


# What has fields: a reader of one value (`whole`, `flag`, a lambda) for each.


def field(said: object, name: str, read: Callable[[Any], T], *untold: T) -> T:
    """One field of an object; where it is missing, what stands for it, if anything does."""
    if not isinstance(said, Mapping):
        raise BadValue(f"{_shown(said)} where an object belongs")
    if name not in said:
        if untold:
            return untold[0]
        raise BadValue("it is missing", name)
    try:
        return read(said[name])
    except BadValue as e:
        raise e.within(name) from None


def made(of: Callable[..., T], said: object, **read: Callable[[Any], Any]) -> T:
    """What `of` makes of an object's fields: those that are missing have a default there, others are refused."""
    if unknown := fields_of(said).keys() - read.keys():
        raise BadValue("it is not known here", shown(min(unknown, key=str)))
    try:
        return of(**{name: field(said, name, one) for name, one in read.items() if name in fields_of(said)})
    except TypeError:  # one without a default
        raise BadValue("a field is missing") from None


def fields_of(said: object) -> dict[str, Any]:
    if not isinstance(said, dict):
        raise BadValue(f"{_shown(said)} where an object belongs")
    return said


def maybe(read: Callable[[Any], T]) -> Callable[[Any], T | None]:
    return lambda said: None if said is None else read(said)


def each(read: Callable[[Any], T], most: int = MOST_ITEMS) -> Callable[[Any], list[T]]:
    """A list, all of one kind."""
    return lambda said: [read(one) for one in items(said, most)]


def by_name(read: Callable[[Any], T], most: int = MOST_ITEMS) -> Callable[[Any], dict[str, T]]:
    """An object whose fields are all of one kind."""

    def one(name: str, said: object) -> T:
        with inside(shown(name)):
            return read(said)

    return lambda said: {name: one(name, value) for name, value in table(said, most).items()}


def short(said: object) -> str:
    """A name or a sentence."""
    return text(said, 4096)


def path(said: object) -> str:
    """What can be opened: `open` fails on a NUL with an error of its own."""
    if "\0" in short(said) or not said:
        raise BadValue(f"{_shown(said)} where a path belongs")
    return cast(str, said)


def below(said: object) -> str:
    """A path that stays below the folder that names it."""
    parts = path(said).split("/")
    if ".." in parts or "\\" in cast(str, said) or not parts[0]:
        raise BadValue(f"{_shown(said)} where a path within the same folder belongs")
    return cast(str, said)


def pid(said: object) -> int:
    return whole(said, MOST_PID, 1)


def one_of(said: object, known: Collection[str]) -> str:
    if short(said) not in known:
        raise BadValue(f"{_shown(said)} where one of {', '.join(sorted(known))} belongs")
    return cast(str, said)


def read_large(data: bytes, most_parts: int, none_for_nan: bool = False) -> Any:
    """JSON of files with millions of values, each of which is read by its type and range afterwards: half the time of
    `read_json`, which looks at numbers and depth first. What is not read by type goes through `looked_at`.
    `none_for_nan`: of those who write NaN, and bytes that are no text, where nobody reads them."""
    if data.count(b",") > most_parts:
        raise BadValue(f"it holds more than {most_parts:,} values")
    constant = (lambda which: None) if none_for_nan else _constant
    try:
        return json.loads(data.decode(errors="replace" if none_for_nan else "strict"), parse_constant=constant)
    except RecursionError:
        raise BadValue("it is nested too deeply") from None
    except BadValue:
        raise
    except ValueError:
        raise BadValue("it is no JSON") from None


def looked_at(said: object) -> dict[str, Any]:
    """An object of others' choice, out of `read_large`: as if `read_json` had read it."""
    try:
        text = json.dumps(fields_of(said), allow_nan=False).encode()
        return read_object(text, most_parts=MOST_ITEMS, most_bytes=len(text))  # it is there already
    except BadValue:
        raise
    except (ValueError, RecursionError):  # an infinity, or too deep
        raise BadValue("a number that is none, or too deep nesting") from None


def shown(value: object) -> str:
    """What others wrote, for a sentence: short, and in printable letters."""
    said = value if isinstance(value, str) else ascii(value)
    if not said.isprintable() or not said.isascii():
        said = ascii(said)
    return said if len(said) <= 60 else f"{said[:60]}…"
