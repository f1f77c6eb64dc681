"""`shoal checkpoint rm`: deletes what is named, after another good one has been read to its last byte."""

from __future__ import annotations

import argparse
import json

from shoal.checkpoint import ledger
from shoal.checkpoint.find import Found, Listed, damage, open_checkpoint
from shoal.checkpoint.locate import MEMORY, Place
from shoal.cli.checkpoint.shared import none_yet, place, progress
from shoal.errors import CheckpointError, UsageError


def run(args: argparse.Namespace) -> None:
    if (args.step is None) == (args.all_but is None):
        raise UsageError("say what to delete: --step N (more than once, if you like), or --all-but K.")
    if args.all_but is not None and args.all_but < 1:
        raise UsageError("--all-but keeps at least 1; to delete everything, remove the folder.")
    if args.term is not None and args.step is None:
        raise UsageError("--term goes with --step.")
    where = place(args, args.run).without(MEMORY)  # what is there goes by itself, and counts for nothing
    if where.alone is not None:
        raise UsageError(f"{where.label} is a copy by itself: remove the folder.")
    listed = where.listed()
    if not listed:
        raise none_yet(where)
    doomed = _doomed(where, listed, args)
    if not args.even_the_last:
        _refuse_the_last(where, listed, doomed, args.json)
    for one in doomed:
        ledger.forget_published(one.store, one.name)
        one.store.remove(str(one.name))
    if args.json:
        rows = [{"step": o.name.step, "term": o.name.term, "tier": where.tier_of(o.store)} for o in doomed]
        print(json.dumps(rows, indent=2))
        return
    for one in doomed:
        print(f"deleted {one.store.where}/{one.name}")
    if not doomed:
        print("nothing to delete")


def _doomed(where: Place, listed: list[Listed], args: argparse.Namespace) -> list[Listed]:
    """Oldest first: what interrupts a deletion has cost the least."""
    at = [one for one in reversed(listed) if args.tier in (None, where.tier_of(one.store))]
    if args.step is None:
        kept = sorted({one.name for one in listed if _good(one)}, reverse=True)[: args.all_but]
        return [one for one in at if one.name not in kept]
    for step in args.step:
        if not any(one.name.step == step and args.term in (None, one.name.term) for one in at):
            known = ", ".join(map(str, sorted({one.name.step for one in at}))) or "none"
            term = "" if args.term is None else f", term {args.term}"
            raise UsageError(f"{where.label} has no checkpoint of step {step}{term}; it has {known}.")
    return [one for one in at if one.name.step in args.step and args.term in (None, one.name.term)]


def _refuse_the_last(where: Place, listed: list[Listed], doomed: list[Listed], quiet: bool) -> None:
    """Unless nothing good goes, a good one must remain: read in full, not believed."""
    if not any(_good(one) for one in doomed):
        return
    for one in listed:
        if one not in doomed and (found := _good(one)) is not None:
            with progress(f"verifying {one.name}", found.bytes, quiet) as on_bytes:
                if not damage(found, on_bytes=on_bytes):
                    return
    raise CheckpointError(
        f"nothing was deleted: no good checkpoint of {where.label} would remain; --even-the-last deletes all the same."
    )


def _good(one: Listed) -> Found | None:
    """What a run would go on from, as far as its header tells."""
    if not one.there or one.quarantined or not one.on_history:
        return None
    try:
        return open_checkpoint(one.store, one.name)
    except CheckpointError:
        return None
