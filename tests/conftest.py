"""What all tests share: one thread a process, and a corner of the memory (tmpfs) that is gone after them."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator

import pytest

# Before torch comes: its threads do not survive a fork, and a forked rank would wait for them for ever.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session", autouse=True)
def own_memory() -> Iterator[None]:
    """Runs leave snapshots in RAM for their next start; those of killed runs must not stay there after the tests."""
    folder = tempfile.mkdtemp(prefix="shoal-tests-", dir=os.environ.get("SHOAL_MEMORY") or "/dev/shm")
    before, os.environ["SHOAL_MEMORY"] = os.environ.get("SHOAL_MEMORY"), folder
    yield
    shutil.rmtree(folder, ignore_errors=True)
    if before is None:
        del os.environ["SHOAL_MEMORY"]
    else:
        os.environ["SHOAL_MEMORY"] = before
