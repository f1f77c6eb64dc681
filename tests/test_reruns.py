"""`scripts/tests.py`: a test that passes only when tried again is named and counted; little of that is borne."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import limit

pytestmark = pytest.mark.skipif(os.path.exists("/dev/nvidiactl"), reason="with a GPU all is one process")

ROOT = Path(__file__).parents[1]
# The first time it fails, then no more.
UNSTEADY = """
import pathlib
import pytest

@pytest.mark.parametrize("n", range({count}))
def test_unsteady(n):
    tried = pathlib.Path(f"tried-{{n}}")
    first = not tried.exists()
    tried.touch()
    assert not first
"""
INSTALLED_LATER = """
import pathlib
from tests.require import unavailable

def test_needs_it():
    tried = pathlib.Path("installed")
    if not tried.exists():
        tried.touch()  # by the test of something else, as it happens
        unavailable("namespaces", "no nft")
"""
LINT = "import pathlib\nimport pytest\n@pytest.mark.once\ndef test_lint(): assert pathlib.Path('x').touch()\n"


def run(folder: Path, test: str, **environment: str) -> tuple[int, str]:
    (folder / "conftest.py").write_text("from tests.conftest import *\n")
    (folder / "pytest.ini").write_text(f"[pytest]\npythonpath = {ROOT}\naddopts = -p no:cacheprovider\n")
    (folder / "test_it.py").write_text(test)
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts/tests.py"), "."],
        cwd=folder,
        env=os.environ | {"SHOAL_UNSTEADY": str(folder / "unsteady")} | environment,
        capture_output=True,
        text=True,
        timeout=limit(120),
    )
    return done.returncode, done.stdout + done.stderr


def test_up_to_three_are_borne_by_name_and_in_all_calls_together(tmp_path: Path) -> None:
    code, out = run(tmp_path, UNSTEADY.format(count=2))
    assert code == 0, out
    assert "UNSTEADY: 2 of at most 3" in out
    assert "test_it.py::test_unsteady[1]" in out.split("UNSTEADY")[1]
    for tried in tmp_path.glob("tried-*"):
        tried.unlink()
    code, out = run(tmp_path, UNSTEADY.format(count=2))
    assert code == 1
    assert "2 failed after 2 that passed only when tried again: not tried again (at most 3 are)." in out


def test_what_is_missing_is_not_tried_until_it_happens_to_be_there(tmp_path: Path) -> None:
    code, out = run(tmp_path, INSTALLED_LATER, SHOAL_REQUIRE="namespaces")
    assert code == 1
    assert "namespaces is required here (SHOAL_REQUIRE) and missing: no nft" in out
    assert "once more" not in out


def test_what_fails_for_certain_fails_once(tmp_path: Path) -> None:
    code, out = run(tmp_path, LINT)
    assert code == 1
    assert "once more" not in out
