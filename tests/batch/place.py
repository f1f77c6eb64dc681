"""A folder with a command for units: a shell script, which is told the unit's number and notes what it does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from shoal.cli.main import main
from shoal.journal.claims import listed
from shoal.journal.journal import Record, records
from shoal.journal.rundir import RunDir
from shoal.journal.units import Folder

QUICK = ("guard.backoff_s=0.001", "guard.grace_s=5")
# No two of one unit at a time: a lock that the kernel frees with the last process which has it.
ALONE = 'exec 9>"lock-$1"; flock -n 9 || echo "$1" >>clashes\necho "$1" >>began\n'


class Place:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def run_dir(self) -> RunDir:
        return RunDir.of("b", self.folder)

    def command(self, lines: str) -> None:
        (self.folder / "unit.sh").write_text(ALONE + lines)

    def batch(self, units: int, *more: str) -> int:
        return main(self.words(units, *more))

    def words(self, units: int, *more: str) -> list[str]:
        return ["batch", "--name", "b", "--units", str(units), *QUICK, *more, "--", "sh", "unit.sh", "{index}"]

    def start(self, *words: str) -> subprocess.Popen[bytes]:
        """In a process of its own, to be killed."""
        env = {**os.environ, "SHOAL_WORKSPACE": str(self.folder)}
        return subprocess.Popen(
            [sys.executable, "-m", "shoal", *words], cwd=self.folder, env=env, stderr=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )  # fmt: skip

    def noted(self, name: str = "began") -> list[int]:
        path = self.folder / name
        return [int(line) for line in path.read_text().split()] if path.exists() else []

    def records(self, kind: str = "") -> list[Record]:
        folder = Folder(self.run_dir)
        found = (r for block in sorted(listed(folder)) for r in records(folder.records(block)))
        return [r for r in found if not kind or r["kind"] == kind]

    def ends(self, outcome: str) -> Counter[int]:
        return Counter(r["unit"] for r in self.records("unit_ended") if r["outcome"] == outcome)

    def page(self) -> dict[str, Any]:
        from shoal.observe.batch import page_of
        from shoal.observe.status import status_of

        status = status_of(self.run_dir)
        found = json.loads(json.dumps(page_of(self.run_dir, status.status, status.why, []).as_json()))
        assert isinstance(found, dict)
        return found


def once_each(units: Iterable[int]) -> Counter[int]:
    return Counter(dict.fromkeys(units, 1))
