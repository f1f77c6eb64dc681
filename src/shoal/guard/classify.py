"""Names what ended a worker: a class of shoal.observe.causes, the line that shows it, and what to do.

The exit code and the signal are facts; the end of the log is a witness. Facts are asked first. Only the last
traceback (or, without one, the last lines) is read: an error that was survived ten minutes ago explains nothing.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.errors import TOLD_TO_STOP, WRONG_ENVIRONMENT, WRONG_USAGE
from shoal.guard.signals import signal_name
from shoal.guard.surroundings import Change
from shoal.guard.symptoms import ABOUT_DATA, CONSEQUENCES, SAID
from shoal.guard.workers import Death
from shoal.leaving import ENDED_BY
from shoal.masking import mask
from shoal.observe.causes import CAUSES
from shoal.plain_file import open_plain

TAIL_BYTES = 64 * 1024
TAIL_LINES = 20
EVIDENCE_CHARS = 400
NOT_RETRIED = (WRONG_USAGE, WRONG_ENVIRONMENT)

# A line that names an exception where no traceback stands before it: a dotted name that ends as exceptions do.
_KINDS = "Error|Exception|Interrupt|Exit|Stopped|Warning|Timeout"
_EXCEPTION = re.compile(rf"^(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:{_KINDS})\b(?:: .*)?$")
_TRACEBACK = "Traceback (most recent call last)"
_STARTS = ("Fatal Python error",)  # faulthandler's, followed by the stack of every thread
_CHAINED = ("During handling of the above exception", "direct cause of the following exception")


@dataclass(frozen=True)
class Failure:
    """What ended an attempt: one `failure` record of the journal."""

    rank: int | None
    cause: str
    evidence: str
    exit_code: int | None = None
    signal: int | None = None
    at: float | None = None  # wall time at which the worker was seen to have ended

    @property
    def retry(self) -> bool:
        return self.exit_code not in NOT_RETRIED

    @property
    def advice(self) -> str:
        return CAUSES[self.cause]

    def fields(self) -> dict[str, Any]:
        """Of its journal record."""
        return {
            "rank": self.rank,
            "cause": self.cause,
            "evidence": self.evidence,
            "exit_code": self.exit_code,
            "signal": None if self.signal is None else signal_name(self.signal),
            "at": self.at,
        }


def classify(death: Death, around: Change | None = None) -> Failure:
    """The failure that this one death shows."""
    around = around or Change()
    cause, evidence = death.known or _by_code(death, last_words(death.log), around)
    return Failure(death.rank, cause, _clean(evidence), death.exit_code, death.signal, death.t)


def culprit(failures: Iterable[Failure]) -> Failure | None:
    """The one that began it: the first that is no mere consequence of another rank's end, else the first of all."""
    failures = list(failures)
    return next((f for f in failures if f.cause not in CONSEQUENCES), failures[0] if failures else None)


def last_words(log: Path) -> list[str]:
    """The lines that may say why: the last traceback, those it was chained to and all after it; else the last lines."""
    try:
        with open(open_plain(log), "rb") as f:
            f.seek(max(0, os.fstat(f.fileno()).st_size - TAIL_BYTES))
            text = f.read().decode(errors="replace")
    except OSError:
        return []
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    starts = [i for i, line in enumerate(lines) if line.startswith(_STARTS) or _TRACEBACK in line]
    if not starts:
        return lines[-TAIL_LINES:]
    begin = starts.pop()
    after = lines[_names_it(lines, begin) :]
    if not lines[begin].startswith(_STARTS) and len(after) > TAIL_LINES and not _ended_by(after):
        return lines[-TAIL_LINES:]  # it was survived: much was said after it
    while starts and any(mark in lines[begin - 1] for mark in _CHAINED):
        begin = starts.pop()
    return lines[begin:]


def _names_it(lines: list[str], begin: int) -> int:
    """The place of the line that names the exception of the traceback that begins there: the first after the frames,
    which are indented."""
    before = _before(lines[begin])
    for i in range(begin + 1, len(lines)):
        if not lines[i].removeprefix(before).startswith(" "):
            return i
    return len(lines)


def _before(header: str) -> str:
    """What every line of a traceback may begin with: torch's `[rank3]: `, the bar of a group."""
    return header.partition(_TRACEBACK)[0].replace("Exception Group ", "").replace("+", "|")


def _ended_by(lines: list[str]) -> str | None:
    """What a worker of ours has named itself at its end."""
    return next((line for line in reversed(lines) if line.startswith(ENDED_BY)), None)


def _raised(lines: list[str]) -> str | None:
    """The exception that ended it, whatever its kind is called."""
    if ended_by := _ended_by(lines):
        return ended_by
    starts = [i for i, line in enumerate(lines) if _TRACEBACK in line]
    if starts and (named := _names_it(lines, starts[-1])) < len(lines):
        return lines[named].removeprefix(_before(lines[starts[-1]]))
    return next((line for line in reversed(lines) if _EXCEPTION.match(line)), None)


def _by_code(death: Death, lines: list[str], around: Change) -> tuple[str, str]:
    if death.signal is not None:
        return _by_signal(death.signal, lines, around)
    said = _shoal_said(lines)
    if death.exit_code == WRONG_USAGE:
        return "user-error", said or _last(lines) or "exit code 2"
    if death.exit_code == WRONG_ENVIRONMENT:
        return _wrong_environment(said or _last(lines) or "exit code 78")
    if death.exit_code == TOLD_TO_STOP:
        return "killed", "the worker was told to stop by somebody else than its supervisor"
    found = _said(lines)
    if found:
        return found
    exception = _raised(lines)
    if around.disk_is_full:  # a full disk swallows the very line that would say so
        return "disk-full", f"{around.free_bytes:,} bytes are free on the run directory's disk"
    if exception or said:
        return "exception", exception or said or ""
    end = f"the log ends with: {lines[-1]}" if lines else "the log is empty"
    return "unknown", f"exit code {death.exit_code}, and {end}"


def _by_signal(number: int, lines: list[str], around: Change) -> tuple[str, str]:
    name = signal_name(number)
    if number == signal.SIGKILL:
        if around.oom_kills:
            return "host-memory", f"{name}, and {around.oom_evidence}"
        return "killed", f"ended by {name}"
    if number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
        return "killed", f"ended by {name}"
    if number == signal.SIGBUS and around.disk_is_full:
        return "disk-full", f"{name}, and {around.free_bytes:,} bytes are free on the run directory's disk"
    # NCCL's watchdog and failed allocations abort the process: the log knows more than the signal.
    found = _said(lines)
    if found:
        return found
    fatal = next((line for line in lines if line.startswith("Fatal Python error")), None)
    return "crash", f"ended by {name}" + (f": {fatal}" if fatal else "")


def _wrong_environment(sentence: str) -> tuple[str, str]:
    found = _said([sentence])
    if found and found[0] in ("numerics", "disk-full"):
        return found
    if "checkpoint" in sentence.lower():
        return "checkpoint", sentence
    return ("data" if ABOUT_DATA.search(sentence) else "environment"), sentence


def _said(lines: list[str]) -> tuple[str, str] | None:
    for cause, pattern in SAID:
        for line in reversed(lines):
            if pattern.search(line):
                return cause, line
    return None


def _shoal_said(lines: list[str]) -> str | None:
    """The one sentence a worker prints for an error of shoal.errors."""
    return next((line.removeprefix("shoal: ") for line in reversed(lines) if line.startswith("shoal: ")), None)


def _last(lines: list[str]) -> str | None:
    return lines[-1] if lines else None


def _clean(line: str) -> str:
    """One journal field: bounded, on one line, and without the password of an address that an error quotes."""
    line = mask(line.strip().removeprefix(ENDED_BY).removeprefix("shoal: "))
    return line if len(line) <= EVIDENCE_CHARS else line[: EVIDENCE_CHARS - 1] + "…"
