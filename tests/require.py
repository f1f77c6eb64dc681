"""What a test needs of the machine: absent it is skipped, unless SHOAL_REQUIRE names it (as CI does), then it fails."""

from __future__ import annotations

import os
from typing import NoReturn

import pytest


def unavailable(component: str, why: str) -> NoReturn:
    if component in os.environ.get("SHOAL_REQUIRE", "").split():
        pytest.fail(f"{component} is required here (SHOAL_REQUIRE) and missing: {why}")
    pytest.skip(why)
