"""The `fake` fixture: a run of fake workers in a temporary workspace; nothing of it outlives the test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.guard.fake import FakeRun

from shoal.track.rundir import RunDir


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[FakeRun]:
    run = FakeRun(RunDir.of("demo", tmp_path))
    yield run
    run.end()
