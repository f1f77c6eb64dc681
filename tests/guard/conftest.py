"""`fake`: a run of fake workers in a temporary workspace. `group`: ranks that write a pulse. None outlives its test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.guard.fake import FakeRun
from tests.guard.pretended import Group

from shoal.journal.rundir import RunDir


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[FakeRun]:
    run = FakeRun(RunDir.of("demo", tmp_path))
    yield run
    run.end()


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Group]:
    group = Group(tmp_path)
    yield group
    group.end()
