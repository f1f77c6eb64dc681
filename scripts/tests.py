"""pytest, several files of tests at a time (tests/apart.py); what failed, if it is little, runs once more by itself.

The tests start real processes, on machines that may stand still for seconds. A test that fails twice is a defect. One
that passes the second time is named and counted in the last lines, to be looked into: at most three are borne. Where
SHOAL_UNSTEADY names a file, the count is kept there, over several calls (`.ci/run` makes three). What is missing on
this machine or fails for certain (the mark `once`) is not tried again.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

MOST = 3
MOST_CORES = 4  # memory is finite too
MISSING = "is required here (SHOAL_REQUIRE) and missing"  # as tests/require.py says it


class Failed:
    """A plugin that notes which tests failed, and which of them will again."""

    def __init__(self) -> None:
        self.tests: list[str] = []
        self.certain: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not report.failed:
            return
        known = [self.tests]
        if "once" in report.keywords or MISSING in report.longreprtext:
            known.append(self.certain)
        for tests in known:
            if report.nodeid not in tests:
                tests.append(report.nodeid)


def main(arguments: list[str]) -> int:
    failed = Failed()
    cores = len(os.sched_getaffinity(0))
    lanes = 1 if cores == 1 else min(cores, MOST_CORES) + 1  # a file of tests uses two thirds of a core
    code = pytest.main([f"--apart={lanes}", *arguments], plugins=[failed])
    if code != pytest.ExitCode.TESTS_FAILED or not failed.tests or failed.certain:
        return int(code)
    before = earlier()
    if len(before) + len(failed.tests) > MOST:
        already = f" after {len(before)} that passed only when tried again" if before else ""
        print(f"\n{len(failed.tests)} failed{already}: not tried again (at most {MOST} are).")
        return int(code)
    print(f"\n{len(failed.tests)} failed; once more, alone:", flush=True)
    again = subprocess.run([sys.executable, "-m", "pytest", *failed.tests]).returncode
    if again == 0:
        unsteady = [*before, *failed.tests]
        print(
            f"\nUNSTEADY: {len(unsteady)} of at most {MOST} failed in the whole, passed alone:", *unsteady, sep="\n  "
        )
        if file := os.environ.get("SHOAL_UNSTEADY"):
            Path(file).write_text("".join(f"{test}\n" for test in unsteady))
    return again


def earlier() -> list[str]:
    """Tests that passed only when tried again, in calls before this one."""
    file = Path(os.environ.get("SHOAL_UNSTEADY") or os.devnull)
    return file.read_text().splitlines() if file.exists() else []


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
