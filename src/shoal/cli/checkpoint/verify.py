"""`shoal checkpoint verify`: every byte against its checksum."""

from __future__ import annotations

import argparse
import json
from typing import Any

from shoal.checkpoint import ledger
from shoal.checkpoint.find import Found, Listed, NoManifest, damage, open_checkpoint
from shoal.checkpoint.locate import REMOTE, Place
from shoal.checkpoint.names import MANIFEST
from shoal.cli.checkpoint.shared import none_yet, place, progress
from shoal.errors import CheckpointError


def run(args: argparse.Namespace) -> None:
    where = place(args, args.run).at(args.step, args.term)
    if not args.remote and where.without(REMOTE).tiers:
        where = where.without(REMOTE)
    rows = _rows(where, quiet=args.json)
    if args.json:
        print(json.dumps(rows, indent=2))
    if bad := [row for row in rows if row["wrong"]]:
        raise CheckpointError(
            f"{len(bad)} of {len(rows)} checkpoints of {where.label} cannot be used: {bad[0]['name']}: "
            f"{bad[0]['wrong'][0]}; a resume passes over it, and `shoal checkpoint rm` deletes it."
        )


def _rows(where: Place, quiet: bool) -> list[dict[str, Any]]:
    if where.alone is not None:
        return [_told(str(where.alone.folder), where.alone.where, _damage(where.alone, quiet), quiet)]
    listed = where.listed() if where.step is None else where.exactly()
    if not listed:
        raise none_yet(where)
    several = len(where.tiers) > 1
    rows = []
    for one in reversed(listed):
        name = f"{one.name} ({where.tier_of(one.store)})" if several else str(one.name)
        wrong = _wrong(one, quiet)
        if wrong is not None:
            reason = ledger.quarantine_reason(one.store, one.name) if one.quarantined else None
            rows.append(_told(name, f"{one.store.where}/{one.name}", wrong, quiet, reason))
    return rows


def _told(name: str, path: str, wrong: list[str], quiet: bool, quarantined: str | None = None) -> dict[str, Any]:
    """One that is quarantined is known to be bad: it is told, and is no news."""
    if not quiet:
        for words in [f"quarantined: {quarantined}"] if quarantined else wrong or ["every byte is as it was written"]:
            print(f"{name}: {words}")
    known = {"quarantined": quarantined} if quarantined else {}
    return {"name": name, "path": path, "good": not wrong and not quarantined, **known, "wrong": wrong}


def _wrong(one: Listed, quiet: bool) -> list[str] | None:
    """None where there is nothing to be verified: a save in progress."""
    if one.quarantined:
        return []
    if not one.there:
        return ["it was published, and is gone"]
    try:
        found = open_checkpoint(one.store, one.name)
    except NoManifest as e:
        return None if one.may_be_unfinished() else [str(e)]
    except CheckpointError as e:
        return [str(e)]
    return _damage(found, quiet)


def _damage(found: Found, quiet: bool) -> list[str]:
    with progress(str(found.name), found.bytes, quiet) as on_bytes:
        wrong = damage(found, on_bytes=on_bytes)
    folder = found.path("").rstrip("/")
    if not quiet:
        for file in sorted(set(found.store.list(folder)) - {MANIFEST, *found.manifest.files}):
            print(f"{folder}: note: {file} is no part of it, and is ignored")
    return wrong
