"""The one way in itself: `shoal.values` and `shoal.plain_file`."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from random import Random
from typing import Any

from tests.fuzz.json_values import edge, encoded, mutated
from tests.fuzz.raw_bytes import damaged
from tests.fuzz.reader import Finding, Target, reader
from tests.fuzz.samples import texts_of

GOOD: dict[str, Any] = {"a": [1, 2.5, None, True, 'é[["\\'], "b": {"c": {"d": [[], {}]}}, "n": -5e-3, "big": 2**62}


@reader("values", "values", quick=1500, share=1500)
def values(folder: Path) -> Target:
    """What is taken is what json makes of it, and holds no number without an end."""
    from shoal import values as v

    def read(data: bytes) -> None:
        found = v.read_json(data)
        if json.loads(data) != found:
            raise Finding("another value than json's")
        worst = [found]
        while worst:
            one = worst.pop()
            worst += one.values() if isinstance(one, dict) else one if isinstance(one, list) else ()
            if (isinstance(one, float) and not math.isfinite(one)) or (type(one) is int and abs(one) >= 10**19):
                raise Finding("a number without an end")

    return Target(texts_of(GOOD), read, (v.BadValue,))


@reader("typed-values", "values", quick=1500, share=800)
def typed_values(folder: Path) -> Target:
    """Each typed value is of its type and in its range, or refused."""
    from shoal import values as v

    ways: dict[str, Any] = {
        "whole": lambda said: type(v.whole(said, 100, -5)) is int,
        "real": lambda said: -2.0 <= v.real(said, 3.0, -2.0) <= 3.0,
        "flag": lambda said: v.flag(said) in (True, False),
        "text": lambda said: len(v.text(said, 10)) <= 10,
        "name": lambda said: len(v.name(said)) == 64,
        "items": lambda said: len(v.items(said, 3)) <= 3,
        "fields": lambda said: set(v.fields(said, ("a", "b"))) <= {"a", "b"},
        "table": lambda said: len(v.table(said, 3)) <= 3,
    }
    good = {
        "whole": 5,
        "real": 2.5,
        "flag": True,
        "text": "abc",
        "name": "ab" * 32,
        "items": [1],
        "fields": {"a": 1},
        "table": {"k": 1},
    }

    def generate(rng: Random) -> Any:
        which = rng.choice(tuple(ways))
        return [which, mutated(rng, good[which]) if rng.random() < 0.7 else edge(rng)]

    def read(case: Any) -> None:
        if not ways[case[0]](case[1]):
            raise Finding("out of its range")

    return Target(generate, read, (v.BadValue,))


@reader("plain-file", "plain_file", quick=100, share=40)
def plain_file(folder: Path) -> Target:
    """A file of others, or what stands in its place."""
    from shoal.plain_file import read_object, read_plain, read_words
    from shoal.values import BadValue

    def generate(rng: Random) -> Any:
        kinds = ("file",) * 6 + ("fifo", "folder", "link", "nothing", "device")
        text = encoded(mutated(rng, GOOD))
        return [rng.choice(kinds), (text if rng.random() < 0.7 else damaged(rng, text)).hex()]

    def read(case: Any) -> None:
        kind, content = case[0], bytes.fromhex(case[1])
        path = folder / "one"
        if path.is_dir() and not path.is_symlink():
            path.rmdir()
        else:
            path.unlink(missing_ok=True)
        match kind:
            case "file":
                path.write_bytes(content)
            case "fifo":
                os.mkfifo(path)
            case "folder":
                path.mkdir()
            case "link":
                path.symlink_to(folder / "two")
            case "device":
                path.symlink_to("/dev/zero")
        if kind == "file" and read_plain(path, 1 << 20) != content:
            raise Finding("other bytes than those of the file")
        read_words(path, 1 << 20)
        read_object(path, 1 << 20)

    return Target(generate, read, (BadValue, OSError))
