"""A save becomes a checkpoint, all at once, and old ones go. No torch here.

Parts of all ranks → manifest → published. Whatever a crash leaves in between has no manifest under a published name, so
that no reader looks at it, and the next `prune` deletes it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from shoal.checkpoint import fault_points, ledger
from shoal.checkpoint.find import (
    Found,
    Listed,
    Root,
    Skipped,
    check_headers,
    damage,
    listing,
    open_checkpoint,
    published,
    quarantine,
    reading,
)
from shoal.checkpoint.manifest import Corrupt, Manifest, check, decode, encode, merge
from shoal.checkpoint.names import MANIFEST, Name, part_file, rank_file
from shoal.checkpoint.part import Part, decode_part
from shoal.checkpoint.retain import Candidate, deletable
from shoal.checkpoint.store import Store, at_once, has, store_of
from shoal.errors import CheckpointError, SetupError, TransientError


def manifest_of(name: Name, parts: Iterable[Part], extra: dict[str, Any]) -> Manifest:
    """The parts of all ranks, put together and checked: a tensor that nobody wrote, or two did, is found here and not
    on the day of the resume."""
    in_order = sorted(parts, key=lambda part: part.rank)
    manifest = Manifest(
        step=name.step,
        term=name.term,
        world=len(in_order),
        saved_at=round(time.time(), 3),
        extra=extra,
        files={rank_file(part.rank): part.file for part in in_order},
        layout=merge((part.rank, part.layout) for part in in_order),
    )
    check(manifest)
    return manifest


def complete(store: Store, name: Name, world: int, extra: dict[str, Any]) -> Found:
    """When all ranks have written (and read back): what is there is published with its manifest.

    `Fenced` when a newer term has begun: then nothing appears. What a process that died had begun to publish is
    published as it is.
    """
    folder = store.staging(str(name))
    found = begun(store, name)
    if found is not None and found.folder == str(name):
        _note(Found(store, name, found.manifest))
        return Found(store, name, found.manifest)
    manifest = found.manifest if found else _put_together(store, name, world, extra)
    ledger.check_term(store, name.term)
    if found is None:
        fault_points.reach("before-manifest")
        manifest = replace(manifest, data=encode(manifest))
        store.put(f"{folder}/{MANIFEST}", manifest.data)
    fault_points.reach("before-publish")
    with contextlib.suppress(OSError, TransientError):  # in a bucket it is published already
        at_once(store, lambda rank: store.remove(f"{folder}/{part_file(rank)}"), range(world))
    store.publish(str(name))
    fault_points.reach("published")
    found = Found(store, name, manifest)
    _note(found)
    return found


def begun(store: Store, name: Name) -> Found | None:
    """What has its manifest already, published or about to be; its writer may have died before it could say so."""
    for folder in (store.staging(str(name)), str(name)):  # in the order in which it moves
        if has(store, f"{folder}/{MANIFEST}"):
            found = Found(store, name, decode(store.read(f"{folder}/{MANIFEST}")), folder=folder)
            check_headers(found)
            return found
    return None


def drop_unfinished(store: Store, before: Name) -> None:
    """Deletes what saves have left that came to nothing: of earlier terms, and of earlier steps of the same term. For
    the process that begins `before`, when all ranks are through with what they have begun."""
    _drop_unfinished(store, published(store), before)


def prune(
    root: Root,
    keep: int,
    keep_every: int = 0,
    keep_best: int = 0,
    term: int | None = None,
    known_good: set[Name] | None = None,
    on_bad: Callable[[Skipped], None] = lambda bad: None,
) -> list[Name]:
    """Deletes what nobody wants any more, and what dead saves have left. Returns the checkpoints that it deleted.

    For one process, while no other saves here. Nothing is deleted before one of those that stay has been read to the
    last byte (`known_good` remembers which have); what turns out to be damaged is quarantined (`on_bad` hears of it)
    and does not count as kept. Bad ones that are newer than the oldest kept stay too, as evidence. With `term` given,
    unfinished saves of that term and of later ones stay.
    """
    store = store_of(root)
    store.sweep()
    listed = published(store)
    _drop_unfinished(store, listed, None if term is None else Name(-1, term))
    good = {one.name: summary for one in listed if (summary := _good(one))}
    known_good = set() if known_good is None else known_good
    for bad in _newer_than_a_whole_one(store, good, known_good):
        quarantine(bad)
        on_bad(bad)
        del good[bad.name]
    of = {Candidate(name.step, name.term, summary.eval_loss): name for name, summary in good.items()}
    go = deletable(of, keep, keep_every, keep_best, verified=lambda c: of[c] in known_good)
    stay = good.keys() - {of[c] for c in go}
    # Bad ones and those of writers that were fenced go when all that are kept are newer.
    old = [of[c] for c in go] + [one.name for one in listed if go and one.name not in good and one.name < min(stay)]
    quarantined = {one.name for one in listed if one.quarantined}
    deleted = []
    # What cannot be deleted now is left for the next time: an old checkpoint too many is no reason to end a run.
    with contextlib.suppress(OSError, TransientError, SetupError):
        for name in old:
            fault_points.reach("before-delete")
            ledger.forget_published(store, name)
            store.remove(str(name))
            deleted.append(name)
            if name in quarantined:  # last: what is half deleted is still bad
                ledger.release(store, name)
    return deleted


def _part(store: Store, folder: str, rank: int, world: int) -> Part:
    with reading(part_file(rank), f"{store.where}/{folder}"):
        part = decode_part(store.read(f"{folder}/{part_file(rank)}"))
    if (part.rank, part.world) != (rank, world):
        raise Corrupt(f"{part_file(rank)} is that of rank {part.rank} of {part.world}, not of {rank} of {world}")
    return part


def _note(found: Found) -> ledger.Summary:
    """The checkpoint is there with or without its entry; what fails here is made good by the next `prune`."""
    loss = found.extra.get("eval_loss")
    summary = ledger.Summary(
        world=found.manifest.world,
        bytes=found.bytes,
        manifest_bytes=len(found.manifest.data),
        eval_loss=float(loss) if isinstance(loss, int | float) else None,
    )
    with contextlib.suppress(OSError, TransientError, SetupError):
        ledger.note_published(found.store, found.name, summary)
    return summary


def _put_together(store: Store, name: Name, world: int, extra: dict[str, Any]) -> Manifest:
    folder = store.staging(str(name))
    parts = at_once(store, lambda rank: _part(store, folder, rank, world), range(world))
    manifest = manifest_of(name, parts, extra)
    check_headers(Found(store, name, manifest, folder=folder))  # what another node wrote elsewhere is missed here
    return manifest


def _drop_unfinished(store: Store, listed: list[Listed], before: Name | None) -> None:
    hidden = store.staging("")
    if hidden:
        names = [name for entry in store.list() if (name := Name.of(entry.removeprefix(hidden))) and str(name) != entry]
    else:
        there = [one.name for one in listed if one.there and one.may_be_unfinished()]
        names = [name for name in there if not has(store, f"{name}/{MANIFEST}")]
    for name in names:
        if before is None or (name.term, name.step) < (before.term, before.step):
            with contextlib.suppress(OSError, TransientError, SetupError):
                store.remove(store.staging(str(name)))


def _good(one: Listed) -> ledger.Summary | None:
    """What is noted of a checkpoint that is there with all its bytes. Its manifest is read only where that is not so,
    or nothing is noted: its writer died in between, the entry was lost, an older Shoal wrote it."""
    if one.quarantined or not one.on_history or not one.there:
        return None
    summary = ledger.summary(one.store, one.name) if one.recorded else None
    if summary is not None:
        with listing(one.store):
            sizes = one.store.sizes(str(one.name))
        files = [sizes.get(rank_file(rank)) for rank in range(summary.world)]
        there = sum(size for size in files if size is not None)
        if None not in files and (there, sizes.get(MANIFEST)) == (summary.bytes, summary.manifest_bytes):
            return summary
    try:
        return _note(open_checkpoint(one.store, one.name))
    except CheckpointError:
        return None


def _newer_than_a_whole_one(store: Store, good: Iterable[Name], known_good: set[Name]) -> list[Skipped]:
    """Reads from the newest on until one is good to its last byte: the bad ones before it. None where all are bad."""
    bad: list[Skipped] = []
    for name in sorted(good, reverse=True):
        if name in known_good:
            return bad
        try:
            wrong = damage(open_checkpoint(store, name))
        except Corrupt as e:
            wrong = [str(e)]
        if not wrong:
            known_good.add(name)
            return bad
        bad.append(Skipped(store, name, wrong[0]))
    return []
