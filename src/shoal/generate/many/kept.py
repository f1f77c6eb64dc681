"""What has been answered, on disk. Three files:

    OUT.begun.json    what is asked of what: who goes on must ask for the same
    OUT.under-way     answers in the order in which they ended, one a line, appended
    OUT               the answers in the order of the input, when all are there; then OUT.under-way is gone

A line that was torn by a kill is cut off, and its item is done again. OUT appears by a rename, whole and on disk.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from array import array
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from shoal import plain_file, values
from shoal.data.index import fsync_folder
from shoal.errors import DataError, UsageError
from shoal.plain_file import NotPlain, open_plain
from shoal.values import BadValue

SYNC_EVERY_S = 1.0  # a kill loses nothing that was appended; power that fails, at most so much
MOST_LINE_BYTES = 64 << 20  # of an answer; log-probabilities make it long
MISSING = -1
CHANGED = {
    "input": "the file of prompts is another one than it was",
    "model": "the model is another one",
    "weights": "the model's weights are others",
    "tokenizer": "the tokenizer is another one",
    "part": "it was cut into other parts",
}


class Kept:
    """The answers to `lines` of the input, numbered from 0. One process at a time holds it."""

    def __init__(self, out: Path, asked: Mapping[str, Any], lines: range) -> None:
        self.out, self._lines, self._asked = out, lines, dict(asked)
        self._begun, self._way = (out.with_name(out.name + end) for end in (".begun.json", ".under-way"))
        self._at = array("q", [MISSING]) * len(lines)  # where each answer begins in OUT.under-way
        self._synced_s = time.monotonic()
        self._end = 0
        self.done = 0
        self._fd = -1

    @property
    def finished(self) -> bool:
        return self.out.exists()

    @property
    def fresh(self) -> bool:
        """Whether nothing has been begun."""
        return not self._begun.exists()

    def __enter__(self) -> Kept:
        self.out.parent.mkdir(parents=True, exist_ok=True)
        self._agree()
        if self.finished:
            self._way.unlink(missing_ok=True)
            return self
        try:
            self._fd = open_plain(self._way, os.O_RDWR | os.O_CREAT)
        except NotPlain as e:
            raise UsageError(f"{e}; move it away.") from None
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._fd)
            self._fd = -1
            raise UsageError(f"another process is at work on {self.out}: wait for it, or name another --out.") from None
        try:
            self._find()
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self._close()

    def __contains__(self, line: int) -> bool:
        return self._at[line - self._lines.start] != MISSING

    def add(self, line: int, answer: Mapping[str, Any]) -> None:
        """For good, if this process is killed in the next moment. `line` counts from 0."""
        assert line not in self
        data = json.dumps(answer, ensure_ascii=False).encode() + b"\n"
        whole, at = memoryview(data), self._end
        while whole:
            written = os.pwrite(self._fd, whole, self._end)
            self._end += written
            whole = whole[written:]
        self._at[line - self._lines.start] = at
        self.done += 1
        if time.monotonic() - self._synced_s > SYNC_EVERY_S:
            os.fsync(self._fd)
            self._synced_s = time.monotonic()

    def finish(self) -> None:
        """In the order of the input."""
        os.fsync(self._fd)
        new = self.out.with_name(self.out.name + ".new")
        with open(self._fd, "rb", closefd=False) as way, open(new, "wb") as out:
            for at in self._at:
                if at != MISSING:
                    way.seek(at)
                    out.write(way.readline())
            out.flush()
            os.fsync(out.fileno())
        os.replace(new, self.out)
        fsync_folder(self.out.parent)
        self._way.unlink(missing_ok=True)

    def _agree(self) -> None:
        """With what was begun here, or begins it."""
        try:
            before = plain_file.read_object(self._begun, 1 << 20)
        except FileNotFoundError:
            if self.out.exists():
                raise UsageError(f"{self.out} exists, and is not by this verb: name another --out.") from None
            if self._way.exists() and self._way.stat().st_size:
                raise DataError(
                    f"{self._begun} is gone, so what {self._way} answers is not known: move it away."
                ) from None
            _write(self._begun, self._asked)
            return
        except (NotPlain, BadValue) as e:
            raise DataError(f"{e}; move it and its neighbours away to begin anew.") from None
        differ = [name for name in {**self._asked, **before} if before.get(name) != self._asked.get(name)]
        if differ:
            name = differ[0]
            was, now = (_short(said.get(name)) for said in (before, self._asked))
            why = CHANGED.get(name, f"{name} is not what it was")
            raise UsageError(
                f"{self.out} was begun with something else: {why} ({was}, now {now}); ask for the same to go on, or "
                "name another --out to begin anew."
            )

    def _find(self) -> None:
        """What is there. From the first line on that is not whole, nothing counts."""
        with open(self._fd, "rb", closefd=False) as file:
            while line := file.readline(MOST_LINE_BYTES):
                number = self._number(line)
                if number is None:
                    break
                if number not in self:
                    self._at[number - self._lines.start] = self._end
                    self.done += 1
                self._end += len(line)
        os.ftruncate(self._fd, self._end)

    def _number(self, line: bytes) -> int | None:
        if not line.endswith(b"\n"):
            return None
        try:
            said = values.read_object(line, most_bytes=MOST_LINE_BYTES, most_parts=MOST_LINE_BYTES)
            return values.field(said, "line", lambda n: values.whole(n, self._lines.stop, self._lines.start + 1)) - 1
        except BadValue:
            return None

    def _close(self) -> None:
        if self._fd >= 0:
            os.fsync(self._fd)
            os.close(self._fd)
            self._fd = -1


def _short(said: object) -> str:
    text = "nothing" if said is None else json.dumps(said, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}…"


def _write(path: Path, said: Mapping[str, Any]) -> None:
    new = path.with_name(f"{path.name}.{os.getpid()}.new")
    with open(new, "w", encoding="utf-8") as file:
        json.dump(said, file, ensure_ascii=False, indent=1)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(new, path)
    fsync_folder(path.parent)
