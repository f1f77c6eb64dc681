"""What a member has agreed to, on disk: it is written before anybody is told, and read after a restart."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from shoal.plain_file import read_plain
from shoal.swarm.messages import read_acked, read_votes
from shoal.swarm.round_record import Record
from shoal.swarm.terms import Agreed, shown
from shoal.values import MOST_BYTES, BadValue, read_json, table, whole


def write(file: Path, head: str, agreed: Agreed) -> None:
    said: dict[str, Any] = {"head": head, "term": agreed.term, "votes": shown(agreed.votes or {})}
    said |= {"acked": _body(agreed.acked), "proposed": _body(agreed.proposed)}
    new = file.with_suffix(".new")
    with open(new, "w") as f:
        json.dump(said, f)
        f.flush()
        os.fsync(f.fileno())
    new.replace(file)


def read(file: Path, head: str) -> Agreed:
    """What it says of this head. Nothing of it is taken on trust: the file of an earlier version may hold a term that
    one liar has made up, and the votes show whether most members stand behind it."""
    try:
        said = table(read_json(read_plain(file, MOST_BYTES)), 16)
        if said.get("head") != head:
            return Agreed()
        return Agreed(whole(said.get("term")), _votes(said), _one(said.get("acked")), _one(said.get("proposed")))
    except (OSError, BadValue):
        return Agreed()


def _votes(said: dict[str, Any]) -> Any:
    try:
        return read_votes(said.get("votes", {}))
    except BadValue:
        return {}


def _one(said: object) -> tuple[int, Record] | None:
    try:
        return read_acked(said)
    except BadValue:  # in a term that cannot be; what the record was others may know
        return None


def _body(one: tuple[int, Record] | None) -> dict[str, Any] | None:
    return None if one is None else {"term": one[0], "record": one[1].body()}
