"""DeepSpeed, for the tests of its engine: in a folder of its own, seen by what they start."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def deepspeed() -> Iterator[Path]:
    """The folder. Ranks are forked from this process and see what it sees; it imports nothing of it itself."""
    fetch = subprocess.run([sys.executable, ROOT / "scripts" / "fetch_deepspeed.py"], capture_output=True, text=True)
    assert fetch.returncode == 0, fetch.stderr[-2000:]
    folder = Path(fetch.stdout.splitlines()[-1])
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        patch.setenv("PYTHONPATH", str(folder), prepend=":")
        yield folder
