"""Files past the page cache: every length comes back, wherever the chunks lie in memory, on any file system."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import random
import tempfile
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from xxhash import xxh3_128_hexdigest

from shoal.checkpoint import direct
from shoal.checkpoint.files import digests_of
from shoal.checkpoint.store import Folder

LENGTHS = [0, 1, 4095, 4096, 4097, direct.BUFFER_BYTES - 1, direct.BUFFER_BYTES, 2 * direct.BUFFER_BYTES + 12_345]


@pytest.fixture(params=["disk", "memory", "refusing"])
def folder(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A disk; a tmpfs, which has no disk to write to; a file system that opens with O_DIRECT and then refuses it."""
    if request.param == "memory":
        with tempfile.TemporaryDirectory(prefix="shoal-test-", dir="/dev/shm") as shared:
            yield Path(shared)
        return
    if request.param == "refusing":
        for name in ("write", "preadv"):
            monkeypatch.setattr(os, name, _refusing(getattr(os, name)))
    yield tmp_path


def _refusing(real: Callable[..., int]) -> Callable[..., int]:
    def call(fd: int, *args: Any) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "not so")
        return real(fd, *args)

    return call


@pytest.mark.parametrize("length", LENGTHS)
def test_what_was_written_is_read(folder: Path, length: int) -> None:
    data = random.Random(length).randbytes(length)
    direct.write(folder / "file", [memoryview(data)])
    assert (folder / "file").read_bytes() == data
    assert b"".join(map(bytes, direct.read(folder / "file", 0, length))) == data


def test_chunks_of_any_size_and_place_in_memory_follow_each_other(folder: Path) -> None:
    rng = random.Random(1)
    aligned = memoryview(mmap.mmap(-1, 3 * direct.BUFFER_BYTES))
    aligned[:] = rng.randbytes(len(aligned))
    cuts = [*rng.choices(range(len(aligned)), k=20), 4096 * 3, 4096 * 700, direct.BUFFER_BYTES, 0, len(aligned)]
    direct.write(folder / "file", [aligned[a:b] for a, b in pairwise(sorted(cuts))])
    assert (folder / "file").read_bytes() == aligned


@pytest.mark.parametrize(("at", "end"), [(0, 0), (1, 2), (4095, 4097), (5000, 9_000_001), (8192, 16 << 20)])
def test_any_range_is_read(folder: Path, at: int, end: int) -> None:
    data = random.Random(2).randbytes(17 << 20)
    (folder / "file").write_bytes(data)
    assert b"".join(map(bytes, direct.read(folder / "file", at, end))) == data[at:end]


def test_a_file_that_ends_too_early_is_noticed(folder: Path) -> None:
    (folder / "file").write_bytes(b"x" * 10_000)
    for end in (10_001, 20_000, 30 << 20):
        with pytest.raises(EOFError):
            list(direct.read(folder / "file", 0, end))


def test_ranges_are_hashed_in_one_pass_with_gaps_and_out_of_order(tmp_path: Path) -> None:
    data = random.Random(3).randbytes(20 << 20)
    (tmp_path / "file").write_bytes(data)
    ranges = [(0, 0), (7, 100), (200, 9 << 20), (50, 60), (10 << 20, 1), ((10 << 20) + 1, 5000), (19 << 20, 1 << 20)]
    wanted = [xxh3_128_hexdigest(data[at : at + count]) for at, count in ranges]
    assert list(digests_of(Folder(tmp_path), "file", ranges)) == wanted
