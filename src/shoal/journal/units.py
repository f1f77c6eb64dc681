"""The units of a batch on disk: `runs/NAME/units/`, in blocks, so that a million are a few thousand files.

plan.json               how many units, how many a block, the items' digest; made once, by whoever is first
items                   one item a line, where there are items: the run's own copy
blocks/00017.jsonl      the records of its units, of all attempts: `unit_began`, `unit_ended`; one writer at a time
blocks/00017.done       how they ended, in one object: what `shoal ps` reads
blocks/00017.2.claim    who works on it (shoal.journal.claims)
logs/                   what units printed; small logs of a block in one file
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from shoal import values
from shoal.errors import DataError, SetupError, UsageError
from shoal.journal.journal import read
from shoal.journal.record import Record
from shoal.journal.rundir import RunDir
from shoal.plain_file import NotPlain, read_object, read_plain

BLOCKS = 2000  # about, of a large batch
MOST_UNITS = 10_000_000
MOST_ITEMS_BYTES = 1 << 30
MOST_LINE = 131_072  # bytes: the system takes no longer argument
MOST_TOLD = 20  # failed units of a block that are told in full
_DONE_BYTES = 1 << 20


@dataclass(frozen=True)
class Plan:
    units: int
    block: int  # units in each, but for the last
    items: str | None = None  # SHA-256 of the file of items

    @property
    def blocks(self) -> int:
        return -(-self.units // self.block)

    def block_of(self, unit: int) -> int:
        return unit // self.block

    def units_of(self, block: int) -> range:
        return range(block * self.block, min(self.units, (block + 1) * self.block))


@dataclass(frozen=True)
class Failed:
    """A unit that has used its retries, or must not be tried again."""

    unit: int
    cause: str
    evidence: str
    exit_code: int | None
    attempts: int


@dataclass(frozen=True)
class Summary:
    """How a block ended."""

    round: int
    done: int
    failed: list[int] = field(default_factory=list)
    causes: dict[str, int] = field(default_factory=dict)
    told: list[Failed] = field(default_factory=list)
    took_s: float = 0.0  # of the attempts that were done
    attempts: int = 0


@dataclass
class Unit:
    """Where one stands, by its records."""

    attempts: int = 0  # begun, over its whole life
    failures: int = 0  # in the newest round
    lost: int = 0  # attempts that nobody saw the end of
    done: bool = False
    failed: Record | None = None  # the last end, where it is not tried again in this round
    begun: Record | None = None  # under way, as far as the records say
    took_s: float = 0.0


class Folder:
    """The names of everything."""

    def __init__(self, run_dir: RunDir) -> None:
        self.path = run_dir.path / "units"
        self.blocks, self.logs = self.path / "blocks", self.path / "logs"
        self.runners, self.rounds = self.path / "runners", self.path / "rounds"
        self.plan_file, self.items_file = self.path / "plan.json", self.path / "items"

    def records(self, block: int) -> Path:
        return self.blocks / f"{block:05d}.jsonl"

    def done(self, block: int) -> Path:
        return self.blocks / f"{block:05d}.done"

    def make(self) -> None:
        for folder in (self.blocks, self.logs, self.runners, self.rounds):
            folder.mkdir(parents=True, exist_ok=True)

    def plan(self) -> Plan | None:
        """None before there is one."""
        try:
            said = read_object(self.plan_file, 4096)
        except FileNotFoundError:
            return None
        most = values.whole
        return values.made(
            Plan, said, units=lambda v: most(v, MOST_UNITS, 1), block=lambda v: most(v, MOST_UNITS, 1),
            items=values.maybe(values.name),
        )  # fmt: skip

    def begin(self, units: int, items: bytes | None) -> Plan:
        """The plan, made by the first that comes; all others must have come with the same."""
        self.make()
        digest = None if items is None else hashlib.sha256(items).hexdigest()
        known = self.plan()
        if known is None:
            if items is not None:
                replaced(self.items_file, items)
            created(self.plan_file, _json(Plan(units, max(1, -(-units // BLOCKS)), digest)))
            known = self.plan()
            assert known is not None
        if (known.units, known.items) != (units, digest):
            what = "other items" if known.items != digest else f"{known.units:,} units, not {units:,}"
            raise UsageError(
                f"{self.plan_file} is of {what}: what units a batch has is its history; give this one another name."
            )
        return known

    def read_items(self) -> list[str] | None:
        """By the units' numbers."""
        plan = self.plan()
        if plan is None or plan.items is None:
            return None
        data = read_plain(self.items_file, MOST_ITEMS_BYTES)
        if hashlib.sha256(data).hexdigest() != plan.items:
            raise DataError(f"{self.items_file} has changed since the batch began; restore it from a copy.")
        return lines_of(data, str(self.items_file))


def read_lines(path: Path) -> list[str]:
    """The items of a file: what is not empty, one a line."""
    try:
        data = read_plain(path, MOST_ITEMS_BYTES)
    except NotPlain as e:
        raise DataError(f"batch.items: {e}; give a file with one item a line.") from None
    except OSError as e:
        raise DataError(
            f"batch.items names {path}, which cannot be read ({e.strerror}); give a file of items."
        ) from None
    return lines_of(data, f"batch.items: {path}")


def lines_of(data: bytes, name: str) -> list[str]:
    if b"\0" in data:
        raise DataError(f"{name} has zero bytes, so it is no list of items; give text with one item a line.")
    try:
        found = [line for line in data.decode().split("\n") if line.strip("\r")]
    except UnicodeDecodeError as e:
        raise DataError(f"{name} is no UTF-8 (byte {e.start:,}); write it as UTF-8, one item a line.") from None
    found = [line.removesuffix("\r") for line in found]
    if not found:
        raise DataError(f"{name} has no line with an item in it, so there is nothing to do.")
    if len(found) > MOST_UNITS:
        raise DataError(f"{name} has {len(found):,} lines, and a batch at most {MOST_UNITS:,}; cut it in several.")
    if len(longest := max(found, key=len)) * 4 >= MOST_LINE and len(longest.encode()) >= MOST_LINE // 4:
        raise DataError(
            f"{name}: line {found.index(longest) + 1:,} has {len(longest):,} characters, and an item may have "
            f"{MOST_LINE // 4:,} bytes; put what is longer into files, and list those."
        )
    return found


def standing(records: Iterable[Record], units: range, round_: int) -> dict[int, Unit]:
    """Where each unit of a block stands in that round. What failed for good in an earlier one is open again."""
    found = {unit: Unit() for unit in units}
    for record in records:
        unit = found.get(record.get("unit", -1))
        if unit is None or unit.done:
            continue
        if record["kind"] == "unit_began":
            unit.attempts, unit.begun = record["attempt"] + 1, record
        elif record["kind"] == "unit_ended":
            unit.begun = None
            now = record.get("round", 0) == round_
            match record["outcome"]:
                case "done":
                    unit.done, unit.failed = True, None
                    unit.took_s = float(record.get("took_s", 0.0))
                case "failed":
                    unit.failures += now
                    unit.failed = record if record.get("final") and now else None
                case "lost":
                    unit.lost += now
                    unit.failed = record if record.get("final") and now else None
    return found


def summary_of(stands: dict[int, Unit], round_: int) -> Summary:
    failed = {unit: one.failed for unit, one in stands.items() if one.failed is not None}
    causes: dict[str, int] = {}
    for record in failed.values():
        causes[str(record["cause"])] = causes.get(str(record["cause"]), 0) + 1
    told = [
        Failed(unit, str(r["cause"]), str(r.get("evidence", "")), r.get("exit_code"), stands[unit].attempts)
        for unit, r in list(failed.items())[:MOST_TOLD]
    ]
    done = sum(one.done for one in stands.values())
    took_s = round(sum(one.took_s for one in stands.values()), 3)
    return Summary(round_, done, list(failed), causes, told, took_s, sum(one.attempts for one in stands.values()))


def read_records(path: Path) -> list[Record]:
    try:
        return [record for record, _ in read(path)]
    except FileNotFoundError:
        return []


def write_summary(folder: Folder, block: int, summary: Summary) -> None:
    replaced(folder.done(block), _json(summary))


def read_summary(path: Path) -> Summary | None:
    """None where the block is not done."""
    try:
        said = read_object(path, _DONE_BYTES)
    except FileNotFoundError:
        return None
    return values.made(Summary, said, **_FIELDS)


_FIELDS_OF_FAILED: dict[str, Callable[[Any], Any]] = {
    "unit": values.whole,
    "cause": values.short,
    "evidence": values.short,
    "exit_code": values.maybe(lambda said: values.whole(said, 255)),
    "attempts": values.whole,
}
_FIELDS: dict[str, Callable[[Any], Any]] = {
    "round": values.whole,
    "done": values.whole,
    "failed": values.each(values.whole, MOST_UNITS),
    "causes": values.by_name(values.whole, 100),
    "told": values.each(lambda said: values.made(Failed, said, **_FIELDS_OF_FAILED), MOST_TOLD),
    "took_s": values.real,
    "attempts": values.whole,
}


def created(path: Path, data: bytes) -> bool:
    """Whole, and by one alone: False where it was there before."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}")
    temporary.write_bytes(data)
    try:
        os.link(temporary, path)
        return True
    except FileExistsError:
        return False
    except OSError:  # a file system without links: whoever reads half of it reads it again
        with contextlib.suppress(FileExistsError), open(path, "xb") as file:
            file.write(data)
            return True
        return False
    finally:
        temporary.unlink(missing_ok=True)


def replaced(path: Path, data: bytes) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}")
    try:
        temporary.write_bytes(data)
        temporary.rename(path)
    except OSError as e:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise SetupError(f"cannot write {path} ({e.strerror}); mend that, then `shoal resume` goes on.") from e


def _json(said: Plan | Summary) -> bytes:
    return (json.dumps(asdict(said), separators=(",", ":")) + "\n").encode()
