"""JSON that knows whether a byte of it has changed."""

from __future__ import annotations

import json
from typing import Any

from xxhash import xxh3_128_hexdigest

from shoal.values import BadValue, fields_of

MOST_VALUES = 1 << 24  # a million tensors


def seal(head: bytes) -> bytes:
    """The end of a JSON object: its last member is the checksum of all bytes before the last comma."""
    return b',\n"xxh3_128":"%s"}\n' % xxh3_128_hexdigest(head).encode()


def sealed(data: bytes) -> bool:
    """Whether no byte has changed since."""
    head, _, tail = data.rpartition(b",")
    return b"," + tail == seal(head)


def opened(data: bytes) -> dict[str, Any]:
    """The object in it, whoever sealed it: `BadValue` where it is none, or too large. `values.read_json` takes twice
    the time, since it looks at every number; of these, each is looked at where it is read."""
    if data.count(b",") > MOST_VALUES:
        raise BadValue(f"it holds more than {MOST_VALUES:,} values")
    try:
        return fields_of(json.loads(data.decode()))
    except RecursionError:
        raise BadValue("it is nested too deeply") from None
    except BadValue:
        raise
    except ValueError:
        raise BadValue("it is no JSON") from None
