"""Some of a table's rows are for `make test-slow`: those that show what others of it show, on more processes or twice.

@pytest.mark.parametrize("mesh", some_slow(MESHES, slow=TWICE))
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def some_slow(cases: Iterable[Any], slow: Collection[Any]) -> list[Any]:
    cases = list(cases)
    assert all(case in cases for case in slow)
    return [pytest.param(*_row(case), marks=[pytest.mark.slow] if case in slow else []) for case in cases]


def _row(case: Any) -> tuple[Any, ...]:
    return case if isinstance(case, tuple) else (case,)
