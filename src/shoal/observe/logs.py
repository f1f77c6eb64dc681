"""The logs of a run's processes as one stream. They lie in `logs/attempt-003/rank-00001.log`, one file a process."""

from __future__ import annotations

import heapq
import io
import os
import re
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from shoal.errors import UsageError
from shoal.observe.follow import Follower
from shoal.observe.status import total_steps
from shoal.track.rundir import RunDir
from shoal.track.tail import is_closed

POLL_EVERY_S = 0.2
_ATTEMPT = re.compile(r"attempt-(\d+)")
_RANK = re.compile(r"rank-(\d+)\.log")
# Lines that begin with a time are merged by it; a line without one belongs to the line before it.
_TIME = re.compile(r"\[?(\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?)")


def attempts(run_dir: RunDir) -> dict[int, Path]:
    return _numbered(run_dir.logs, _ATTEMPT)


def ranks(folder: Path) -> dict[int, Path]:
    return _numbered(folder, _RANK)


def merged(run_dir: RunDir, rank: int | None, attempt: int | None, last: int | None) -> Iterator[str]:
    """The lines of one attempt over all its ranks, or the last of them."""
    found = attempts(run_dir)
    if not found:
        raise UsageError(f"run '{run_dir.name}' has no logs yet.")
    number = max(found) if attempt is None else attempt
    if number not in found:
        raise UsageError(f"run '{run_dir.name}' has no attempt {number}; it has {min(found)} to {max(found)}.")
    files = ranks(found[number])
    if rank is not None and rank not in files:
        raise UsageError(f"attempt {number} of run '{run_dir.name}' has no rank {rank}; it has {_listed(files)}.")
    chosen = {r: path for r, path in files.items() if rank is None or r == rank}
    streams = (_timed(r, path) for r, path in chosen.items())
    lines = (f"[{r}] {line}" for _, r, _, line in heapq.merge(*streams, key=lambda entry: entry[:3]))
    return lines if last is None else iter(deque(lines, maxlen=last))


def follow(run_dir: RunDir, rank: int | None, attempt: int | None, last: int) -> Iterator[str]:
    """The last lines, then every new one as it comes; a restart's new files are picked up; ends when the run does.

    Workers say little while all is well: the journal's news come in between, unless one rank or attempt is asked for.
    """
    news = News(run_dir) if rank is None and attempt is None else None
    readers: dict[Path, Reader] = {}
    newest = max(attempts(run_dir), default=-1)
    if newest >= 0:
        # Take the ends of the files before printing them, so that no line falls between the two.
        for r, path in ranks(attempts(run_dir)[newest if attempt is None else attempt]).items():
            readers[path] = Reader(r, path, path.stat().st_size)
        yield from merged(run_dir, rank, attempt, last)
    said = newest
    while True:
        ended = is_closed(run_dir.journal_file) or (run_dir.pid_file.exists() and not run_dir.supervised())
        for number, folder in sorted(attempts(run_dir).items()):
            if number < newest or (attempt is not None and number != attempt):
                continue
            for r, path in sorted(ranks(folder).items()):
                if rank is not None and r != rank:
                    continue
                if path not in readers:
                    readers[path] = Reader(r, path, 0)
                    if number > said:
                        said = number
                        yield f"--- attempt {number} ---"
                yield from readers[path].new_lines(flush=ended)
        if news:
            yield from news.lines(ended)
        if ended:
            return
        time.sleep(POLL_EVERY_S)


class News:
    """What the live view of the run would show from now on, as plain lines."""

    def __init__(self, run_dir: RunDir) -> None:
        self._said = io.StringIO()  # no terminal, so no line that updates itself: log lines come in between
        self._follower = Follower(run_dir, total_steps(run_dir.spec_file), self._said, replay=False)

    def lines(self, ended: bool) -> list[str]:
        self._follower.poll()
        if ended:
            self._follower.close()
        lines = self._said.getvalue().splitlines()
        self._said.seek(0)
        self._said.truncate()
        return lines


class Reader:
    """What has been appended to a file since the last look, in whole lines."""

    def __init__(self, rank: int, path: Path, offset: int) -> None:
        self._rank, self._path, self._offset = rank, path, offset
        self._half = ""

    def new_lines(self, flush: bool) -> Iterator[str]:
        if self._path.stat().st_size > self._offset:
            with open(self._path, "rb") as f:
                f.seek(self._offset)
                text = self._half + f.read().decode(errors="replace")
                self._offset = f.tell()
            *whole, self._half = text.split("\n")
            yield from (f"[{self._rank}] {line}" for line in whole)
        if flush and self._half:  # the last words of a process that died while it spoke
            yield f"[{self._rank}] {self._half}"
            self._half = ""


def _timed(rank: int, path: Path) -> Iterator[tuple[str, int, int, str]]:
    at = ""
    with open(path, encoding="utf-8", errors="replace") as f:
        for i, line in enumerate(f):
            if found := _TIME.match(line):
                at = found[1].replace(" ", "T").replace(",", ".")
            yield at, rank, i, line.rstrip("\n")


def _numbered(folder: Path, pattern: re.Pattern[str]) -> dict[int, Path]:
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return {}
    return {int(found[1]): folder / name for name in sorted(names) if (found := pattern.fullmatch(name))}


def _listed(files: dict[int, Path]) -> str:
    return f"{min(files)} to {max(files)}" if files else "none"
