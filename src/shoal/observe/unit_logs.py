"""What the units of a batch have printed: each unit's own lines, out of the few files that hold them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

from shoal.errors import UsageError
from shoal.journal.claims import listed
from shoal.journal.journal import Record, read
from shoal.journal.rundir import RunDir
from shoal.journal.units import Folder
from shoal.observe.status import status_of
from shoal.plain_file import open_plain
from shoal.values import BadValue, below

POLL_EVERY_S = 0.5
BLOCK_BYTES = 1 << 20
MOST_LINE_CHARS = 1 << 16


def lines(run_dir: RunDir, unit: int | None, attempt: int | None, last: int | None) -> Iterator[str]:
    """Of one unit its newest attempt, or the one that is asked for; of all units whatever has ended, block by block."""
    said = _all(run_dir, {}) if unit is None else _one(run_dir, unit, attempt)
    return said if last is None else iter(deque(said, maxlen=last))


def follow(
    run_dir: RunDir, unit: int | None, attempt: int | None, last: int, ended: Callable[[], bool] | None = None
) -> Iterator[str]:
    """Then what else ends, until the batch has: of units that end side by side no line stands within another's."""
    folder, read_to = Folder(run_dir), dict[int, int]()
    if unit is None:  # what ends while this is read is new to the loop below, and nothing else is
        yield from deque(_all(run_dir, read_to), maxlen=last)
    else:
        for block in sorted(listed(folder)) if folder.blocks.is_dir() else ():
            for _ in _new(folder, block, read_to):
                pass
        yield from lines(run_dir, unit, attempt, last)
    over = False
    while True:
        for block in sorted(listed(folder)) if folder.blocks.is_dir() else ():
            for record in _new(folder, block, read_to):
                if unit in (None, record["unit"]) and record["kind"] == "unit_ended":
                    yield from _labelled(folder, record)
        if over:
            return
        over = ended() if ended is not None else status_of(run_dir).status != "running"
        if not over:
            time.sleep(POLL_EVERY_S)


def _new(folder: Folder, block: int, read_to: dict[int, int]) -> Iterator[Record]:
    try:
        for record, after in read(folder.records(block), read_to.get(block, 0)):
            read_to[block] = after
            yield record
    except FileNotFoundError:
        return


def _all(run_dir: RunDir, read_to: dict[int, int]) -> Iterator[str]:
    folder = Folder(run_dir)
    for block in sorted(listed(folder)) if folder.blocks.is_dir() else ():
        for record in _new(folder, block, read_to):
            if record["kind"] == "unit_ended":
                yield from _labelled(folder, record)


def _one(run_dir: RunDir, unit: int, attempt: int | None) -> Iterator[str]:
    folder = Folder(run_dir)
    plan = folder.plan()
    if plan is None or not 0 <= unit < plan.units:
        known = "it has not come to its first unit" if plan is None else f"its units are 0 to {plan.units - 1}"
        raise UsageError(f"run '{run_dir.name}' has no unit {unit}: {known}.")
    mine = [r for r in _new(folder, plan.block_of(unit), {}) if r.get("unit") == unit]
    tried = sorted({r["attempt"] for r in mine})
    if not tried:
        raise UsageError(
            f"unit {unit} of run '{run_dir.name}' has not begun yet; `shoal ps {run_dir.name}` says how it goes."
        )
    number = tried[-1] if attempt is None else attempt
    if number not in tried:
        raise UsageError(
            f"unit {unit} of run '{run_dir.name}' has no attempt {number}; it has {tried[0]} to {tried[-1]}."
        )
    ended = [r for r in mine if r["attempt"] == number and r["kind"] == "unit_ended"]
    if ended and ended[-1]["outcome"] != "lost":
        return _labelled(folder, ended[-1])
    began = next(r for r in mine if r["attempt"] == number)  # it runs, or went away with its runner
    return _of_file(folder, began, 0, None)


def _labelled(folder: Folder, record: Record) -> Iterator[str]:
    if "log" in record:
        yield from _of_file(folder, record, int(record.get("log_from", 0)), int(record.get("log_bytes", 0)))


def _of_file(folder: Folder, record: Record, begin: int, size: int | None) -> Iterator[str]:
    label, rest = f"[{record['unit']}] ", ""
    try:
        path = folder.logs / Path(below(record.get("log"))).name
        with open(open_plain(path), "rb") as file:
            file.seek(begin)
            while size is None or size > 0:
                block = file.read(BLOCK_BYTES if size is None else min(BLOCK_BYTES, size))
                if not block:
                    break
                size = None if size is None else size - len(block)
                *whole, rest = (rest + block.decode(errors="replace")).split("\n")
                yield from (f"{label}{line}" for line in whole)
                while len(rest) > MOST_LINE_CHARS:
                    yield f"{label}{rest[:MOST_LINE_CHARS]}"
                    rest = rest[MOST_LINE_CHARS:]
    except (OSError, BadValue):  # it was removed
        return
    if rest:
        yield f"{label}{rest}"
