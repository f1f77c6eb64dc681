"""Where compiled code is kept: never where another user could have put some."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("numba")
LOOK = "from shoal.codec.compiled import _folder; print(_folder())"


def folder(home: Path, temporary: Path) -> str:
    env = {**os.environ, "HOME": str(home), "TMPDIR": str(temporary)}
    env.pop("XDG_CACHE_HOME", None)
    return subprocess.run([sys.executable, "-c", LOOK], env=env, capture_output=True, text=True, check=True).stdout


@pytest.mark.skipif(os.name == "nt", reason="folders' owners are POSIX")
def test_kept_at_home_else_in_a_folder_of_ones_own_else_nowhere(tmp_path: Path) -> None:
    home, temporary = tmp_path / "home", tmp_path / "tmp"
    home.mkdir()
    temporary.mkdir()
    assert folder(home, temporary).startswith(str(home / ".cache" / "shoal" / "kernels-"))
    blocked = tmp_path / "file"
    blocked.touch()
    there = temporary / f"shoal-{os.getuid()}"
    assert folder(blocked, temporary).startswith(str(there / "kernels-"))
    there.chmod(0o777)
    assert folder(blocked, temporary) == "None\n"
