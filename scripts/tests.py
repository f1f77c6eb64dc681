"""pytest, two files of tests at a time (tests/apart.py); what failed, if it is little, runs once more by itself.

The tests start real processes and take their time from real clocks, on machines that may stand still for seconds. A
test that fails twice is a defect. One that passes the second time is named in the last lines, to be looked into.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

MOST = 3


class Failed:
    """A plugin that notes which tests failed."""

    def __init__(self) -> None:
        self.tests: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and report.nodeid not in self.tests:
            self.tests.append(report.nodeid)


def main(arguments: list[str]) -> int:
    failed = Failed()
    at_once = min(2, len(os.sched_getaffinity(0)))
    code = pytest.main([f"--apart={at_once}", *arguments], plugins=[failed])
    if code != pytest.ExitCode.TESTS_FAILED or not 0 < len(failed.tests) <= MOST:
        return int(code)
    print(f"\n{len(failed.tests)} failed; once more, alone:", flush=True)
    again = subprocess.run([sys.executable, "-m", "pytest", *failed.tests]).returncode
    if again == 0:
        print("\nUNSTEADY: failed in the whole, passed alone:", *failed.tests, sep="\n  ")
    return again


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
