"""The output folder of `shoal data prepare` while it is made: whose it is, what of it is done, who may write to it.

OUT/.prepare/plan.json         digest of inputs and options; stays, so that a rerun sees that all is done
OUT/.prepare/unit-00000.json   one a finished unit, with the checksums of its shards; gone when the index is written
OUT/.prepare/tokenizer.json    the tokenizer as it was at the start
OUT/shard-*                    or OUT/train/shard-* and OUT/eval/shard-*
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import xxhash

from shoal.data.index import INDEX_FILE, ShardInfo
from shoal.data.prepare.bad_input import Problems
from shoal.data.prepare.unit import WORK_FOLDER, Job, record_file, write_json
from shoal.data.prepare.units import LIMITS, Unit
from shoal.data.tokenizer import TOKENIZER_FILE, JsonTokenizer, Tokenizer
from shoal.errors import DataError, SetupError
from shoal.plain_file import read_object
from shoal.values import items, text

PLAN_VERSION = 3  # counts up when the same input and options begin to give other shards
LOCK_WAIT_S = 10.0
_OURS = re.compile(r"shard-\d{5,}(-\d+)?\.(tokens|docs|mask|sums)(\.tmp)?|\.?index\.json(\.tmp)?|tokenizer\.json")
_RECORD = re.compile(r"unit-\d{5,}\.json(\.tmp)?")


class OutFolder:
    """Entered, the folder is ours alone and holds nothing but finished work of this very plan."""

    def __init__(self, job: Job, plan: str, overwrite: bool = False) -> None:
        self.path = Path(job.out)
        self.work = self.path / WORK_FOLDER
        self.sides = job.sides()
        self.lock_fd = -1
        self.note = ""
        self._job = job
        self._plan = plan
        self._overwrite = overwrite

    def __enter__(self) -> OutFolder:
        self._refuse_if_foreign()
        self.work.mkdir(parents=True, exist_ok=True)
        self.lock_fd = self._lock()
        try:
            self._settle()
        except BaseException:
            os.close(self.lock_fd)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        os.close(self.lock_fd)

    @property
    def complete(self) -> bool:
        """Whether the data set is there already, made from this plan."""
        return all((side / INDEX_FILE).is_file() for side in self.sides.values())

    def record(self, unit: Unit) -> dict[str, Any] | None:
        """What a finished unit left behind; None when it has to be done (again)."""
        try:
            record = read_object(record_file(self._job.out, unit.number))
            record["hashes"] = [int(text(one, 17), 16) for one in items(record["hashes"], 2)]
            below = record["eval_below"]
            record["eval_below"] = None if below is None else int(text(below, 17), 16)
            Problems(skip=True).add(record["skipped"])
            files = [
                (folder / file.name, file.size_bytes)
                for side, folder in self.sides.items()
                for shard in map(ShardInfo.from_json, record["shards"][side])
                for file in shard.files
            ]
            there = all(path.is_file() and path.stat().st_size == size for path, size in files)
        except (OSError, ValueError, LookupError, TypeError, AttributeError, DataError):
            return None  # none, damaged, or of another Shoal
        return record if there and len(record["hashes"]) == 2 else None

    def forget_records(self) -> None:
        for path in self.work.iterdir():
            if _RECORD.fullmatch(path.name) or path.name == TOKENIZER_FILE:
                path.unlink()

    def sweep(self, units: Sequence[Unit]) -> None:
        """Remove what no record vouches for: half-written files, shards of a unit that has to be done again."""
        kept: dict[str, set[str]] = {side: set() for side in self.sides}
        for record in filter(None, map(self.record, units)):
            for side, shards in record["shards"].items():
                kept[side] |= {file.name for s in shards for file in ShardInfo.from_json(s).files}
        for side, folder in self.sides.items():
            for path in folder.iterdir():
                if _OURS.fullmatch(path.name) and path.name not in kept[side]:
                    path.unlink()

    def _refuse_if_foreign(self) -> None:
        if self.path.exists() and not self.path.is_dir():
            raise DataError(f"{self.path} is a file; give --out a folder.")
        if self.work.is_dir() or not self.path.is_dir():
            return
        there = sorted(os.listdir(self.path))
        if there:
            some = ", ".join(there[:3]) + (" …" if len(there) > 3 else "")
            raise DataError(
                f"the output folder {self.path} has something else in it ({some}); give --out a new or empty folder."
            )

    def _lock(self) -> int:
        """Waits a little: the workers of a run that was killed need a moment to notice."""
        fd = os.open(self.work / "lock", os.O_RDWR | os.O_CREAT, 0o644)
        until_s = time.monotonic() + LOCK_WAIT_S
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return fd
            except BlockingIOError:
                if time.monotonic() > until_s:
                    os.close(fd)
                    raise SetupError(f"another `shoal data prepare` is writing to {self.path}; wait for it.") from None
                time.sleep(0.05)

    def _settle(self) -> None:
        """Go on, or start over."""
        before: str | None
        try:
            plan = read_object(self.work / "plan.json")
            before, version = text(plan["digest"], 64), plan.get("version")
        except (OSError, ValueError, KeyError):
            before = version = None
        if before != self._plan or self._overwrite:
            everywhere = [self.path, self.path / "train", self.path / "eval"]
            if before is not None and not self._overwrite:
                if any((folder / INDEX_FILE).is_file() for folder in everywhere):
                    if version != PLAN_VERSION:
                        raise DataError(
                            f"{self.path} holds a data set that an older Shoal made by other rules; it can be trained "
                            "on as it is; to prepare it by today's, give --out another folder, or replace it with "
                            "--overwrite."
                        )
                    raise DataError(
                        f"{self.path} holds a data set made from other input or with other options; give --out another "
                        "folder, or replace it with --overwrite."
                    )
                self.note = f"the input or the options have changed: what was begun in {self.path} is started over"
            for folder in everywhere:
                self._empty(folder)
            self.forget_records()
        elif not self.complete:
            self.note = f"going on with what was begun in {self.path}"
        for side in self.sides.values():
            side.mkdir(exist_ok=True)
        write_json(self.work / "plan.json", {"digest": self._plan, "version": PLAN_VERSION})

    def _empty(self, folder: Path) -> None:
        if folder.is_dir():
            for path in folder.iterdir():
                if _OURS.fullmatch(path.name):
                    path.unlink()
            if folder != self.path and not any(folder.iterdir()):
                folder.rmdir()


def digest(job: Job, units: Sequence[Unit], tokenizer: Tokenizer) -> str:
    """Names all that the result depends on; where it is written to and how many workers there are do not count."""
    h = xxhash.xxh3_128(f"{PLAN_VERSION}\n".encode())
    if isinstance(tokenizer, JsonTokenizer):
        h.update(tokenizer.content.encode())
    settings = {**job.to_json(), "out": "", "tokenizer": tokenizer.name}
    if not job.skip_bad:
        # Within its limits or not, a unit that is finished came out the same: to raise one loses no work.
        reading = {name: value for name, value in settings["reading"].items() if name not in LIMITS}
        settings["reading"] = reading
    h.update(json.dumps(settings, sort_keys=True).encode())
    for unit in units:
        h.update(json.dumps(unit.to_json(), sort_keys=True).encode())
    return h.hexdigest()


@contextmanager
def writing_to(out: str | os.PathLike[str]) -> Iterator[None]:
    """A disk that is full or may not be written to is the user's to cure: say so in a sentence."""
    try:
        yield
    except OSError as e:
        if e.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise SetupError(
                f"there is no room left to write {os.fspath(out)} ({e.strerror}); make room and run the same command "
                "again: it goes on where it stopped."
            ) from None
        if e.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR):
            raise SetupError(f"{e.filename or os.fspath(out)} cannot be written ({e.strerror}).") from None
        raise
