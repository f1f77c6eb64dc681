"""How an island finds the others: it joins those who are there, or, if nobody is, gathers with those who come too."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shoal.islands.epoch import Card, Epoch, Fence, machine
from shoal.islands.lease import DEAD_S, Lease
from shoal.islands.lines import Message, ask
from shoal.plain_file import read_object
from shoal.values import BadValue, text, whole

GATHER_S = 20.0  # for islands that were started together; with those that are there by then it begins
LOOK_S = 0.1
STATUS_S = 1.0
MOST_HERE = 1 << 20


class OldState(OSError):
    """The fleet goes back, to an older state than this island has restored."""


def find(
    card: Card,
    fence: Fence,
    token: bytes,
    islands: int,
    step: int,
    digest: str,
    ended: int,
    told_to_stop: Callable[[], bool],
) -> Epoch | Card | None:
    """The epoch that this island is in, or the member that gives it the state. Waits for as long as it takes; None if
    it was told to stop meanwhile.

    `ended`: the number of the epoch that has ended a life, if the state was restored as that one tells; else 0.
    """
    here = fence.folder / "here" / f"{card.key}.json"
    here.parent.mkdir(parents=True, exist_ok=True)
    for old in here.parent.glob(f"{card.island}-*.json"):  # of lives that were killed while they looked for others
        old.unlink(missing_ok=True)
    here.write_text(json.dumps({"card": asdict(card), "step": step, "digest": digest, "ended": ended}))
    try:
        came, watched = time.monotonic(), _Watched(fence)
        while not told_to_stop():
            newest = fence.newest()
            if newest is not None and newest.ends_life and newest.number != ended:
                raise OldState("the fleet goes back to an older state")
            if newest is not None and card.key in newest.keys:
                return newest
            if newest is not None and not newest.ends_life and (donor := _donor(newest, card, token)):
                return donor
            if newest is None or newest.ends_life or watched.dead(newest):
                _gather(card, fence, newest, token, islands, time.monotonic() - came)
            time.sleep(LOOK_S)
        return None
    finally:
        here.unlink(missing_ok=True)


def _donor(newest: Epoch, card: Card, token: bytes) -> Card | None:
    """Of the living epoch, if there is one. Any of its members knows whether there is a newer one."""
    with contextlib.suppress(OSError):
        return ask(newest.first.control, token, {"for": "join", "card": asdict(card)}, _read_donor, STATUS_S)
    return None


def _read_donor(reply: Message) -> Card | None:
    return None if reply.get("donor") is None else Card.of(reply["donor"])


def _gather(card: Card, fence: Fence, newest: Epoch | None, token: bytes, islands: int, waited_s: float) -> None:
    """Makes the first epoch, or the first after all had died, if it is this one's turn to do so."""
    ended = newest.number if newest is not None and newest.ends_life else 0
    there = [found for found in _here(fence.folder) if found.ended == ended]
    with ThreadPoolExecutor(len(there) or 1) as threads:
        answers = list(threads.map(lambda found: found.card.key == card.key or _answers(found.card, token), there))
    there = [found for found, answer in zip(there, answers, strict=True) if answer]
    if len({found.card.island for found in there}) < islands and waited_s < GATHER_S:
        return
    furthest = max((found.step for found in there), default=-1)
    digests = sorted(found.digest for found in there if found.step == furthest)
    alike = [f for f in there if f.step == furthest and f.digest == digests[0]]
    if alike and alike[0].card.key == card.key:
        number = 1 if newest is None else newest.number + 1
        life = 1 if newest is None else newest.life + 1
        members = tuple(found.card for found in alike)
        fence.create(Epoch(number, members, furthest, joined=tuple(c.key for c in members), by=card.key, life=life))


@dataclass(frozen=True)
class _Looks:
    """An island that looks for others, as its file says."""

    card: Card
    step: int
    digest: str
    ended: int

    @staticmethod
    def of(s: dict[str, Any]) -> _Looks:
        return _Looks(Card.of(s.get("card")), whole(s.get("step")), text(s.get("digest"), 1024), whole(s.get("ended")))


def _here(folder: Path) -> list[_Looks]:
    """Islands that look for others, in their order. A file that cannot be read is of nobody."""
    found = []
    for path in sorted((folder / "here").iterdir()):
        with contextlib.suppress(OSError, BadValue):
            found.append(_Looks.of(read_object(path, MOST_HERE)))
    return sorted(found, key=lambda f: (f.card.island, f.card.key))


def _answers(card: Card, token: bytes) -> bool:
    with contextlib.suppress(OSError):
        return ask(card.control, token, {"for": "status"}, lambda reply: _is_free(reply, card), STATUS_S)
    return False


def _is_free(reply: Message, card: Card) -> bool:
    return reply.get("key") == card.key and reply.get("epoch") is None


class _Watched:
    """Whether an epoch is dead: all its processes were on this machine and are gone, or its lease has run out."""

    def __init__(self, fence: Fence) -> None:
        self._lease = Lease(fence.folder)
        self._seen: tuple[int, str] | None = None
        self._since = time.monotonic()

    def dead(self, epoch: Epoch) -> bool:
        now = (epoch.number, self._lease.read())
        if now != self._seen:
            self._seen, self._since = now, time.monotonic()
        here = all(card.host == machine() for card in epoch.members)
        if here and not any(_alive(card.pid) for card in epoch.members):
            return True
        return time.monotonic() - self._since > DEAD_S


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
