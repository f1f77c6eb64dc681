"""`shoal checkpoint ls`: every checkpoint of a run, in which tier it is, and whether it can be used."""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

from shoal.checkpoint import ledger
from shoal.checkpoint.find import Found, Listed, NoManifest, open_checkpoint
from shoal.checkpoint.locate import REMOTE, Place
from shoal.checkpoint.manifest import Corrupt
from shoal.cli.checkpoint.shared import none_yet, note, place
from shoal.errors import CheckpointError, SetupError, TransientError
from shoal.readable import size


def run(args: argparse.Namespace) -> None:
    where = place(args, args.run)
    rows = _rows(where)
    if not rows:
        raise none_yet(where)
    if args.json:
        print(json.dumps(rows, indent=2))
        return
    columns = ("step", "term", "tier", "saved", "size", "ranks", "eval loss", "state")
    print("{:>10}  {:>4}  {:<6}  {:<19}  {:>10}  {:>5}  {:>9}  {}".format(*columns))
    for row in rows:
        print("{:>10}  {:>4}  {:<6}  {:<19}  {:>10}  {:>5}  {:>9}  {}".format(*_shown(row)))


def _rows(where: Place) -> list[dict[str, Any]]:
    """Oldest first."""
    if where.alone is not None:
        return [_row("disk", where.alone.name.step, where.alone.name.term, where.alone, "complete")]
    try:
        listed = where.listed()
    except (TransientError, SetupError) as e:
        here = where.without(REMOTE)
        if len(here.tiers) in (0, len(where.tiers)):
            raise
        note(f"only what is on this machine is listed: {e}")
        listed = here.listed()
    return [row for one in reversed(listed) if (row := _row_of(one, where.tier_of(one.store)))]


def _row_of(one: Listed, tier: str) -> dict[str, Any] | None:
    found, state = None, "complete"
    try:
        if not one.there:
            raise Corrupt("it was published, and is gone")
        found = open_checkpoint(one.store, one.name)
    except NoManifest as e:
        if one.may_be_unfinished():
            return None  # a save in progress, or one that died: nobody looks at it
        state = f"bad: {e}"
    except CheckpointError as e:
        state = f"bad: {e}"
    if one.quarantined:
        state = f"quarantined: {ledger.quarantine_reason(one.store, one.name)}"
    elif found is not None and not one.on_history:
        state = "not on history"
    row = _row(tier, one.name.step, one.name.term, found, state)
    return row | {"path": f"{one.store.where}/{one.name}"}


def _row(tier: str, step: int, term: int, found: Found | None, state: str) -> dict[str, Any]:
    row: dict[str, Any] = {"step": step, "term": term, "tier": tier, "good": state == "complete", "state": state}
    if found is not None:
        row |= {"saved_at": found.manifest.saved_at, "bytes": found.bytes, "world": found.manifest.world}
        row |= {"eval_loss": found.extra.get("eval_loss"), "path": found.where}
    return row


def _shown(row: dict[str, Any]) -> list[str]:
    begin = [str(row["step"]), str(row["term"]), row["tier"]]
    if "bytes" not in row:
        return [*begin, "-", "-", "-", "-", row["state"]]
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row["saved_at"]))
    loss = "-" if row["eval_loss"] is None else f"{row['eval_loss']:.4f}"
    return [*begin, when, size(row["bytes"]), str(row["world"]), loss, row["state"]]
