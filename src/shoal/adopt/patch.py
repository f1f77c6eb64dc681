"""All mends of a script, one after the other: each is kept if the code still compiles and the finding is gone."""

from __future__ import annotations

import difflib
import os
import re
import tempfile
import tokenize
from dataclasses import dataclass
from io import BytesIO

from shoal.adopt.doctor import Report, judge
from shoal.adopt.edits import changed
from shoal.adopt.finding import Finding
from shoal.adopt.mends import edits_for
from shoal.adopt.project import Module, Project, text_of
from shoal.errors import UsageError
from shoal.plain_file import read_plain

MOST_BYTES = 16 << 20


@dataclass(frozen=True)
class Patch:
    before: Project
    after: Project
    mended: list[Finding]

    @property
    def modules(self) -> list[tuple[Module, Module]]:
        """Those that are changed: before and after."""
        pairs = [(self.before.modules[name], module) for name, module in self.after.modules.items()]
        return [(old, new) for old, new in pairs if old.source != new.source]

    @property
    def diff(self) -> str:
        parts = []
        for old, new in self.modules:
            name = old.shown.lstrip("/")
            lines = difflib.unified_diff(_lines(old.source), _lines(new.source), f"a/{name}", f"b/{name}")
            parts += [line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines]
        return "".join(parts)


def patch(report: Report) -> Patch:
    now, mended = report, list[Finding]()
    for finding in report.findings:
        here = next((f for f in now.findings if _key(f) == _key(finding)), None)
        edits = edits_for(now.training, here) if here is not None and here.is_defect else None
        if not edits:
            continue
        try:
            then = judge(changed(now.training.project, edits))
        except (SyntaxError, ValueError, RecursionError):
            continue
        if _kinds(then) < _kinds(now):
            now = then
            mended.append(finding)
    return Patch(report.training.project, now.training.project, mended)


def _lines(source: str) -> list[str]:
    """As `patch` counts them."""
    return re.findall(r"[^\n]*\n|[^\n]+", source)


def _kinds(report: Report) -> set[tuple[str, str, str]]:
    return {_key(finding) for finding in report.findings}


def _key(finding: Finding) -> tuple[str, str, str]:
    return finding.rule, finding.file, finding.reason


def write(made: Patch) -> list[str]:
    """The changed files, each whole or not at all; none where its owner has changed one since it was read."""
    now = [read_plain(old.path, MOST_BYTES) for old, _ in made.modules]
    for (old, _), data in zip(made.modules, now, strict=True):
        if text_of(data) != old.source:
            raise UsageError(f"{old.shown} has changed since it was read; nothing is changed, run `shoal adopt` again.")
    for (old, new), data in zip(made.modules, now, strict=True):
        encoding, _ = tokenize.detect_encoding(BytesIO(data).readline)
        place = os.path.realpath(old.path)
        fd, aside = tempfile.mkstemp(dir=os.path.dirname(place), prefix=".shoal-adopt-")
        try:
            with open(fd, "wb") as file:
                file.write(new.source.encode(encoding))
                os.fchmod(file.fileno(), os.stat(place).st_mode & 0o7777)
            os.replace(aside, place)
        except BaseException:
            os.unlink(aside)
            raise
    return [old.shown for old, _ in made.modules]
