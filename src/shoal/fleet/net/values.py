"""Values from another machine: JSON and its parts, each of one type and within a range, or `BadValue`.

Everything that arrives is read here first, so that no number beyond 64 bits, no NaN, no infinity and no text or list
without a largest length is ever seen by the rest. A bool is no number. Python would take all of these: an integer of
400 digits passes every check and then fails to become a float somewhere far away.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection
from typing import Any, NoReturn, cast

MOST_WHOLE = 1 << 62
MOST_REAL = 1e15
MOST_DIGITS = 19  # of a whole number
_HEX = re.compile(r"[0-9a-f]{64}\Z")


class BadValue(ValueError):
    """Not what a peer may say; the message is the reason."""


class OutOfRange(BadValue):
    """A number, but none that an honest peer sends."""


def read_json(data: bytes | memoryview) -> Any:
    """JSON whose numbers are finite and of 64 bits."""
    try:
        return json.loads(bytes(data), parse_int=_int, parse_float=_float, parse_constant=_constant)
    except RecursionError:
        raise BadValue("it is nested too deeply") from None
    except BadValue:
        raise
    except ValueError:
        raise BadValue("it is no JSON") from None


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
    if not isinstance(said, dict) or len(said) > most:
        raise BadValue(f"no object of at most {most} fields")
    return said


def finite(said: object) -> float | None:
    """Of our own, before it is sent: a loss that is NaN is no number for others."""
    ok = isinstance(said, int | float) and not isinstance(said, bool) and abs(said) <= MOST_REAL
    return float(said) if ok else None  # type: ignore[arg-type]  # mypy does not see it through `ok`


def _int(digits: str) -> int:
    if len(digits.lstrip("-")) > MOST_DIGITS:
        raise OutOfRange(f"a whole number of {len(digits)} digits")
    return int(digits)


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
