"""A pytest plugin (-p tests.gpu.told): each test's end is a line of JSON in the file that SHOAL_TOLD names, at once.

So whoever started pytest knows what was done when it had to be ended, and which test it was in.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

import pytest

FILE = "SHOAL_TOLD"
WORDS_CHARS = 400


def pytest_collection_finish(session: pytest.Session) -> None:
    _tell(kind="collected", tests=[item.nodeid for item in session.items])


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        _tell(kind="end", test=report.nodeid, outcome="failed", s=0.0, told="", words=last_words(report))


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    _tell(kind="begin", test=item.nodeid)
    reports.clear()
    yield
    if not any(r.when == "teardown" for r in reports):  # it was interrupted: nothing is known of it
        return
    bad = next((r for r in reports if r.failed), None) or next((r for r in reports if r.skipped), None)
    told = "; ".join(str(value) for name, value in reports[-1].user_properties if name == "told")
    seconds = sum(r.duration for r in reports)
    outcome, words = (bad.outcome, last_words(bad)) if bad else ("passed", "")
    _tell(kind="end", test=item.nodeid, outcome=outcome, s=round(seconds, 2), told=told, words=words)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    reports.append(report)


reports: list[pytest.TestReport] = []  # of the test that runs


def last_words(report: pytest.TestReport | pytest.CollectReport) -> str:
    """The exception in one line: the first line of its text, which for a worker's end names the worker's own."""
    if report.skipped and isinstance(report.longrepr, tuple):
        return report.longrepr[2].removeprefix("Skipped: ")
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash else str(report.longrepr)
    lines = [line for line in text.splitlines() if line.strip()]
    said = (lines[0] if crash else lines[-1]) if lines else ""
    return said.removeprefix("tests.gpu.crew.Failed: ").removeprefix("AssertionError: ")[:WORDS_CHARS]


def _tell(**fields: Any) -> None:
    with open(os.environ[FILE], "a") as file:
        file.write(json.dumps(fields) + "\n")
