"""What the tests of this folder share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.gpu.crew import Crew
from tests.gpu.here import GPUS, ranks_at_once


@pytest.fixture(scope="module")
def crew(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crew]:
    """Of one file of tests; nothing that it started outlives it."""
    crew = Crew(tmp_path_factory.mktemp("logs"), ranks_at_once(), GPUS)
    yield crew
    crew.close()
