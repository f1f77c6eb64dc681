"""What several generators share: JSON texts that are nearly right, files in memory, identities that never change."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

from tests.fuzz.json_values import encoded, mutated
from tests.fuzz.raw_bytes import damaged
from tests.fuzz.reader import Finding, Folder, Target


def texts_of(*good: Any, raw: float = 0.2) -> Callable[[Random], bytes]:
    """JSON texts of changed values; a share `raw` of them damaged as text."""

    def generate(rng: Random) -> bytes:
        text = encoded(mutated(rng, rng.choice(good)))
        return text if rng.random() >= raw else damaged(rng, text)

    return generate


def lines_of(good: Sequence[Any]) -> Callable[[Random], bytes]:
    """JSON lines: one or two changed, sometimes the bytes too."""
    texts = [json.dumps(one).encode() for one in good]

    def generate(rng: Random) -> bytes:
        lines = list(texts)
        for _ in range(rng.randrange(1, 3)):
            at = rng.randrange(len(lines))
            lines[at] = encoded(mutated(rng, good[at]))
        data = b"\n".join(lines) + b"\n"
        return data if rng.random() < 0.7 else damaged(rng, data)

    return generate


def file_target(
    path: Path,
    generate: Callable[[Random], bytes],
    read: Callable[[Path], object],
    allowed: tuple[type[BaseException], ...] = (),
    **more: Any,
) -> Target:
    """A reader of one file."""

    def through(data: bytes) -> None:
        path.write_bytes(data)
        read(path)

    path.parent.mkdir(parents=True, exist_ok=True)
    return Target(generate, through, allowed, **more)


def one_file_of(good: Folder, of_json: Sequence[str], rng: Random) -> Folder:
    """A folder with one of its files changed: JSON as values, others as bytes; now and then one is missing or empty."""
    name = rng.choice(tuple(good))
    held = Folder(good)
    roll = rng.random()
    if roll < 0.04:
        del held[name]
    elif roll < 0.06:
        held[name] = b""
    elif name in of_json and roll < 0.85:
        held[name] = encoded(mutated(rng, json.loads(good[name])))
    else:
        held[name] = damaged(rng, good[name], head=64)
    return held


def no_infinity(said: Any) -> None:
    """JSON of others has no number that Python alone knows."""
    try:
        json.dumps(said, allow_nan=False)
    except (ValueError, RecursionError) as e:
        raise Finding(f"taken: {str(e)[:40]}") from None


def identity(number: int) -> Any:
    """The same in every process, so that a case is its seed and nothing else."""
    from shoal.net.identity import Identity

    return Identity(bytes([number]) * 32)
