"""The logs of a run's processes as one stream. They lie in `logs/attempt-003/rank-00001.log`, one file a process; those
of an island in `logs/island-002/attempt-003/…`."""

from __future__ import annotations

import codecs
import heapq
import io
import os
import re
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

from shoal.errors import UsageError
from shoal.journal.rundir import RunDir
from shoal.journal.tail import is_closed
from shoal.observe.follow import Follower
from shoal.observe.status import total_steps
from shoal.plain_file import open_plain

POLL_EVERY_S = 0.2
BLOCK_BYTES = 1 << 20
MOST_LINE_CHARS = 1 << 16  # a longer line is shown in pieces: after a power cut a log may be gigabytes of zeros
_ISLAND = re.compile(r"island-(\d+)")
_ATTEMPT = re.compile(r"attempt-(\d+)")
_RANK = re.compile(r"rank-(\d+)\.log")
# Lines that begin with a time are merged by it; a line without one belongs to the line before it.
_TIME = re.compile(r"\[?(\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?)")


def groups(run_dir: RunDir, island: int | None = None) -> dict[str, Path]:
    """Where the attempts of a run are, or those of each island; by what stands before a rank in its lines."""
    found = _numbered(run_dir.logs, _ISLAND)
    if not found:
        if island is not None:
            raise UsageError(f"run '{run_dir.name}' has no islands; leave --island out.")
        return {"": run_dir.logs}
    if island is not None and island not in found:
        raise UsageError(f"run '{run_dir.name}' has no island {island}; it has {_listed(found)}.")
    return {f"{number}.": folder for number, folder in found.items() if island in (None, number)}


def attempts(folder: Path) -> dict[int, Path]:
    return _numbered(folder, _ATTEMPT)


def ranks(folder: Path) -> dict[int, Path]:
    return _numbered(folder, _RANK)


def merged(
    run_dir: RunDir, rank: int | None, attempt: int | None, last: int | None, island: int | None = None
) -> Iterator[str]:
    """The lines of one attempt over all its ranks, or the last of them. Of islands: the newest attempt of each."""
    streams = []
    for prefix, folder in groups(run_dir, island).items():
        for r, path in _files(run_dir, folder, rank, attempt).items():
            streams.append(_timed(f"{prefix}{r}", path))
    lines = (f"[{label}] {line}" for _, label, _, line in heapq.merge(*streams, key=lambda entry: entry[:3]))
    return lines if last is None else iter(deque(lines, maxlen=last))


def _files(run_dir: RunDir, folder: Path, rank: int | None, attempt: int | None) -> dict[int, Path]:
    found = attempts(folder)
    if not found:
        raise UsageError(f"run '{run_dir.name}' has no logs yet.")
    number = max(found) if attempt is None else attempt
    if number not in found:
        raise UsageError(f"run '{run_dir.name}' has no attempt {number}; it has {min(found)} to {max(found)}.")
    files = ranks(found[number])
    if rank is not None and rank not in files:
        raise UsageError(f"attempt {number} of run '{run_dir.name}' has no rank {rank}; it has {_listed(files)}.")
    return {r: path for r, path in files.items() if rank in (None, r)}


def follow(
    run_dir: RunDir,
    rank: int | None,
    attempt: int | None,
    last: int,
    island: int | None = None,
    over: Callable[[], bool] | None = None,
) -> Iterator[str]:
    """The last lines, then every new one as it comes; a restart's new files are picked up; ends when the run does, or
    once it is `over`: a scheduler may start again what has ended.

    Workers say little while all is well: the journal's news come in between, unless one rank or attempt is asked for.
    """
    news = News(run_dir) if rank is None and attempt is None else None
    readers: dict[Path, Reader] = {}
    newest = {prefix: max(attempts(folder), default=-1) for prefix, folder in groups(run_dir, island).items()}
    if any(number >= 0 for number in newest.values()):
        # Take the ends of the files before printing them, so that no line falls between the two.
        for prefix, folder in groups(run_dir, island).items():
            for r, path in _files(run_dir, folder, rank, attempt).items():
                readers[path] = Reader(f"{prefix}{r}", path, path.stat().st_size)
        yield from merged(run_dir, rank, attempt, last, island)
    said = dict(newest)
    while True:
        ended = over() if over else _ended(run_dir)
        for prefix, number, r, path in _since(run_dir, island, newest, attempt):
            if rank not in (None, r):
                continue
            if path not in readers:
                readers[path] = Reader(f"{prefix}{r}", path, 0)
                if number > said.get(prefix, -1):
                    said[prefix] = number
                    yield f"--- {f'island {prefix[:-1]}, ' if prefix else ''}attempt {number} ---"
            yield from readers[path].new_lines(flush=ended)
        if news:
            yield from news.lines(ended)
        if ended:
            return
        time.sleep(POLL_EVERY_S)


def _ended(run_dir: RunDir) -> bool:
    return is_closed(run_dir.journal_file) or (run_dir.pid_file.exists() and not run_dir.supervised())


def _since(
    run_dir: RunDir, island: int | None, newest: dict[str, int], attempt: int | None
) -> Iterator[tuple[str, int, int, Path]]:
    """The files of the attempts from those on that were the newest when following began."""
    for prefix, base in groups(run_dir, island).items():
        for number, folder in sorted(attempts(base).items()):
            if number >= newest.get(prefix, -1) and attempt in (None, number):
                for r, path in sorted(ranks(folder).items()):
                    yield prefix, number, r, path


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

    def __init__(self, label: str, path: Path, offset: int) -> None:
        self._label, self._path, self._offset = label, path, offset
        self._half = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")  # a block may end within a character

    def new_lines(self, flush: bool) -> Iterator[str]:
        if self._path.stat().st_size > self._offset:
            with open(open_plain(self._path), "rb") as f:
                f.seek(self._offset)
                while block := f.read(BLOCK_BYTES):
                    self._offset += len(block)
                    *whole, self._half = (self._half + self._decoder.decode(block)).split("\n")
                    while len(self._half) > MOST_LINE_CHARS:
                        whole.append(self._half[:MOST_LINE_CHARS])
                        self._half = self._half[MOST_LINE_CHARS:]
                    yield from (f"[{self._label}] {line}" for line in whole)
        if flush and self._half:  # the last words of a process that died while it spoke
            yield f"[{self._label}] {self._half}"
            self._half = ""


def _timed(label: str, path: Path) -> Iterator[tuple[str, str, int, str]]:
    at = ""
    with open(open_plain(path), encoding="utf-8", errors="replace") as f:
        for i, line in enumerate(iter(lambda: f.readline(MOST_LINE_CHARS), "")):
            if found := _TIME.match(line):
                at = found[1].replace(" ", "T").replace(",", ".")
            yield at, label, i, line.rstrip("\n")


def _numbered(folder: Path, pattern: re.Pattern[str]) -> dict[int, Path]:
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return {}
    return {int(found[1]): folder / name for name in sorted(names) if (found := pattern.fullmatch(name))}


def _listed(files: dict[int, Path]) -> str:
    return f"{min(files)} to {max(files)}" if files else "none"
