"""What a test needs of the machine: absent it is skipped, unless SHOAL_REQUIRE names it (as CI does), then it fails.

Such a failure is not tried again (scripts/tests.py): what another test has installed meanwhile would hide it.
"""

from __future__ import annotations

import os
from typing import NoReturn

import pytest
from scripts.tests import MISSING


def unavailable(component: str, why: str) -> NoReturn:
    if component in os.environ.get("SHOAL_REQUIRE", "").split():
        pytest.fail(f"{component} {MISSING}: {why}")
    pytest.skip(why)
