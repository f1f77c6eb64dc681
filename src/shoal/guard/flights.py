"""Asks ranks for NCCL's flight record before they are killed, and says in a line who has not come to which collective.

Each rank on a GPU has a pipe beside its pulse (shoal.journal.pulse); a byte in it is the question, a file the answer.
Who cannot answer (its interpreter is held, it is stopped) is not waited for beyond `WAIT_S`: that the others wait for
it is seen in their records. Never imports torch.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from shoal import values
from shoal.journal.pulse_file import ask_file, flight_file
from shoal.plain_file import NotPlain, read_object
from shoal.values import BadValue

WAIT_S = 2.0
MOST_BYTES = 1 << 20
MOST_RANKS = 1 << 20
Flight = Mapping[str, Any]  # as shoal.parallel.flight makes it


def ask(ranks: Sequence[int], folder: Path, wait_s: float = WAIT_S) -> dict[int, Flight]:
    """The records of those ranks of this machine that have one and answer in time."""
    asked = [rank for rank in ranks if _ask(ask_file(folder, rank), flight_file(folder, rank))]
    deadline = time.monotonic() + wait_s
    found: dict[int, Flight] = {}
    while len(found) < len(asked) and time.monotonic() < deadline:
        time.sleep(0.01)
        for rank in asked:
            if rank not in found and (flight := _read(flight_file(folder, rank))) is not None:
                found[rank] = flight
    return found


def _ask(pipe: Path, answer: Path) -> bool:
    """False: it has no pipe, or nobody listens."""
    with suppress(OSError):
        answer.unlink(missing_ok=True)
        fd = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
        try:
            return os.write(fd, b"?") == 1
        finally:
            os.close(fd)
    return False


def _read(path: Path) -> Flight | None:
    try:
        return read_object(path, MOST_BYTES)
    except (NotPlain, BadValue):
        return {}
    except OSError:
        return None


@dataclass(frozen=True)
class _Stand:
    """How far a rank is in a group: the last collective that it has begun."""

    number: int
    name: str
    state: str  # scheduled, started, completed


def sentence(flights: Mapping[int, Flight]) -> str:
    """Which collective on which group, and who had not come; empty: the records do not say."""
    stands: dict[tuple[str, tuple[int, ...]], dict[int, _Stand]] = {}
    axes: dict[tuple[str, tuple[int, ...]], str] = {}
    for rank, flight in sorted(flights.items()):
        with suppress(BadValue):  # another version's format, or damage
            for name, about in values.field(flight, "groups", values.by_name(values.fields_of)).items():
                key = name, tuple(values.field(about, "ranks", values.each(_rank, MOST_RANKS)))
                axes[key] = values.field(about, "axis", values.maybe(values.short)) or name
                if not key[1]:
                    raise BadValue("a group of nobody")
                if (stand := _stand(values.field(about, "collectives", values.each(values.fields_of)))) is not None:
                    stands.setdefault(key, {})[rank] = stand
    waiting = {rank for group in stands.values() for rank, stand in group.items() if stand.state != "completed"}
    told = [_of_group(key[1], axes[key], group, flights.keys(), waiting) for key, group in stands.items()]
    return max((one for one in told if one is not None), default=(0, 0, ""))[2]


def _rank(said: object) -> int:
    return values.whole(said, MOST_RANKS)


def _stand(collectives: Sequence[Mapping[str, Any]]) -> _Stand | None:
    last: _Stand | None = None
    for one in collectives:
        if one.get("is_p2p"):
            continue  # between two; the others of the group do not count them
        number = values.field(one, "collective_seq_id", values.whole)
        if last is None or number >= last.number:
            name = values.field(one, "profiling_name", values.short)
            last = _Stand(number, name.removeprefix("nccl:"), values.field(one, "state", values.short))
    return last


def _of_group(
    members: Sequence[int], axis: str, stands: Mapping[int, _Stand], known: Collection[int], waiting: Collection[int]
) -> tuple[int, int, str] | None:
    """How much it explains (more is better), how many have come, and the sentence; None: nobody waits in it. `known`
    have given a record, `waiting` wait in some group."""
    number = max(stand.number for stand in stands.values())
    ahead = {rank: stand for rank, stand in stands.items() if stand.number == number}
    if all(stand.state == "completed" for stand in ahead.values()):
        return None
    what = f"{next(iter(ahead.values())).name} {number} of group {axis} ({_ranks(members)})"
    if behind := [rank for rank in members if rank in known and rank not in ahead]:
        # One that waits elsewhere itself is not the first cause.
        first = [rank for rank in behind if rank not in waiting]
        return 4 if first else 2, len(ahead), f"{_ranks(first or behind)} had not come to {what}"
    if silent := [rank for rank in members if rank not in known]:
        return 3, len(ahead), f"{_ranks(silent)} gave no record, all others had come to {what}"
    late = [rank for rank, stand in ahead.items() if stand.state == "scheduled"]
    if late and len(late) < len(ahead):
        return 2, len(ahead), f"the device of {_ranks(late)} had not come to {what}"
    return 1, len(ahead), f"all had come to {what} and it did not end: look at the network between them"


def _ranks(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 0 to 7`, `ranks 0, 4 and 12`."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 2 and all(after == rank + 1 for rank, after in pairwise(ranks)):
        return f"ranks {ranks[0]} to {ranks[-1]}"
    shown = [str(rank) for rank in ranks[:8]] + ([f"{len(ranks) - 8} more"] if len(ranks) > 8 else [])
    return f"ranks {', '.join(shown[:-1])} and {shown[-1]}"
