"""The report as people read it, and as programs do."""

from __future__ import annotations

import textwrap
from typing import Any

from shoal.adopt.doctor import Report
from shoal.adopt.finding import CONFIRMED, HINT, HURTS, REFUTED, RULES, Finding
from shoal.adopt.measured import Measured
from shoal.adopt.patch import Patch

WIDTH = 110


def as_text(report: Report, patch: Patch, measured: Measured | None) -> str:
    others = len(report.files) - 1
    read = f"{report.script}{f' and {others} more of its project' if others else ''}"
    lines = [f"{read}: read{', and measured' if measured else '; nothing of it was run'}"]
    lines += [line for note in report.notes for line in _wrapped(f"- {note}", "  ")]
    for hurts, title in HURTS.items():
        found = [f for f in report.findings if f.hurts == hurts and f.confidence != REFUTED]
        if found:
            lines += ["", title, *(line for one in found for line in _finding(one, one in patch.mended))]
    refuted = [f for f in report.findings if f.confidence == REFUTED]
    if refuted:
        lines += [
            "",
            "looked wrong, and was measured to be right",
            *(f"  {f.file}:{f.line}  {f.rule}: {f.measured}" for f in refuted),
        ]
    if measured is not None:
        lines += [
            "",
            "measured",
            *(line for row in measured.rows for line in _wrapped(f"{row.name}: {row.found}", "  ")),
        ]
    return "\n".join([*lines, "", _sum(report, patch, measured)])


def _finding(one: Finding, mended: bool) -> list[str]:
    also = f" (and line{'s' if len(one.also) > 1 else ''} {', '.join(map(str, one.also))})" if one.also else ""
    lines = [f"  {one.file}:{one.line}{also}  {one.rule}, {one.confidence}{', can be mended' if mended else ''}"]
    lines += _wrapped(one.reason, "      ")
    lines += _wrapped(f"measured: {one.measured}", "      ") if one.measured else []
    return [*lines, *_wrapped(f"do: {RULES[one.rule].do}", "      ")]


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=indent, subsequent_indent=indent + "  ", break_long_words=False)


def _sum(report: Report, patch: Patch, measured: Measured | None) -> str:
    defects, hints = len(report.defects), sum(f.hurts == HINT and f.confidence != REFUTED for f in report.findings)
    confirmed = sum(f.confidence == CONFIRMED for f in report.findings)
    words = f"{_count(defects, 'defect')}, {_count(hints, 'hint')}"
    words += f", {confirmed} confirmed" if confirmed else ""
    more = [f"`--patch FILE` writes a diff that mends {len(patch.mended)} of them"] if patch.mended else []
    more += ["`--measure` runs the script and tries them"] if measured is None and report.training.steps else []
    return "; ".join([words, *more])


def _count(number: int, what: str) -> str:
    return f"{number or 'no'} {what}{'' if number == 1 else 's'}"


def as_json(report: Report, patch: Patch, measured: Measured | None) -> dict[str, Any]:
    return {
        "script": report.script,
        "files": report.files,
        "notes": report.notes,
        "findings": [finding.as_json() | {"mended": finding in patch.mended} for finding in report.findings],
        "defects": len(report.defects),
        "measured": None if measured is None else measured.as_json(),
    }
