"""A drill of another kind on a real run; a minute."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.guard.drills import drill, make

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def test_a_poisoned_batch_is_left_out_and_nothing_else_is(tmp_path: Path) -> None:
    make(tmp_path)
    code, found = drill(tmp_path, "--scenario", "nan", "--count", "2", "--seed", "1", within_s=600)
    assert code == 0, found
    assert found["left_out_samples"] == 2 * 4
    assert found["same_digest"] is False, "it has read other batches"
    assert all(fault["detection_s"] is not None for fault in found["faults"])
