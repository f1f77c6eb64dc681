"""What a trainer says to its node, as typed values within ranges. It is this machine's own, but may be anybody's code.

`read` raises `BadValue` for whatever is no such line; a word that only a newer trainer knows is passed over.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.net.api import PeerId
from shoal.swarm.ranges import Ranges, parse
from shoal.swarm.round_record import MOST_MEMBERS, MOST_OF_ONE, MOST_SCORE, MOST_SECONDS
from shoal.values import BadValue, finite, inside, name, read_object, table, text, whole

MOST_PATH, MOST_DIGEST, MOST_WHY = 4096, 128, 500


@dataclass(frozen=True)
class Ready:
    params: int


@dataclass(frozen=True)
class Handed:
    """A part."""

    round: int  # its own
    path: Path
    tokens: int
    targets: int  # of these, that it was taught to predict
    steps: int
    used: Ranges
    loss: float | None
    seconds: float


@dataclass(frozen=True)
class Applied:
    hash: str
    digest: str


@dataclass(frozen=True)
class Loaded:
    digest: str


@dataclass(frozen=True)
class Saved:
    path: Path
    digest: str


@dataclass(frozen=True)
class Scored:
    scores: dict[PeerId, float]


@dataclass(frozen=True)
class Stands:
    """How the training stands, as the views show it."""

    status: dict[str, Any]


@dataclass(frozen=True)
class Failed:
    why: str


Word = Ready | Handed | Applied | Loaded | Saved | Scored | Stands | Failed


def read(line: bytes) -> Word | None:
    s = read_object(line)
    kind = text(s.get("kind"), 64)
    with inside(kind):
        return _READ[kind](s) if kind in _READ else None


def _handed(s: dict[str, Any]) -> Handed:
    tokens = whole(s.get("tokens"), MOST_OF_ONE)
    with inside("used"):
        used = parse(s.get("used"))
    with inside("targets"):
        targets = whole(s.get("targets"), MOST_OF_ONE)
    return Handed(
        round=whole(s.get("round")),
        path=_path(s),
        tokens=tokens,
        targets=min(targets, tokens),
        steps=whole(s.get("steps"), MOST_OF_ONE),
        used=used,
        loss=finite(s.get("loss")),
        seconds=min(max(finite(s.get("seconds")) or 0.0, 0.0), MOST_SECONDS),
    )


def _scored(s: dict[str, Any]) -> Scored:
    found = {name(peer): finite(score) for peer, score in table(s.get("scores"), MOST_MEMBERS).items()}
    return Scored({p: min(max(x, -MOST_SCORE), MOST_SCORE) for p, x in found.items() if x is not None})


def _stands(s: dict[str, Any]) -> Stands:
    return Stands({k: v for k, v in table(s, 64).items() if isinstance(v, int | float | str | None)})


def _path(s: dict[str, Any]) -> Path:
    found = text(s.get("path"), MOST_PATH)
    if not found or "\0" in found:
        raise BadValue("no path")
    return Path(found)


_READ: dict[str, Callable[[dict[str, Any]], Word]] = {
    "ready": lambda s: Ready(whole(s.get("params"))),
    "part": _handed,
    "applied": lambda s: Applied(name(s.get("hash")), text(s.get("digest"), MOST_DIGEST)),
    "loaded": lambda s: Loaded(text(s.get("digest"), MOST_DIGEST)),
    "saved": lambda s: Saved(_path(s), text(s.get("digest"), MOST_DIGEST)),
    "scored": _scored,
    "status": _stands,
    "failed": lambda s: Failed(str(s.get("why"))[:MOST_WHY]),
}
