"""How a process leaves: what it says of an end that was not meant, its exit code, and at once."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from shoal.errors import TRANSIENT, ShoalError

ENDED_BY = "shoal: ended by "  # a process's last line, after the traceback; `shoal.guard.classify` reads it
TEXT_CHARS = 300


def exit_code(do: Callable[[], int]) -> int:
    """What a process leaves with, after one sentence on what is known and a traceback of what is not.

    Whatever is raised: a SystemExit half-way is no success, and an interrupt that no signal has sent is no signal.
    """
    try:
        return do()
    except ShoalError as e:
        print(f"shoal: {_text(e)}", file=sys.stderr)
        return e.exit_code
    except BaseException as e:
        with contextlib.suppress(Exception):  # out of memory, or the stack: the line below still names it
            traceback.print_exc()
        print(f"{ENDED_BY}{_named(e)}", file=sys.stderr)
        return TRANSIENT


_own: list[Path] = []  # folders with own code of this process


def show_own(folder: Path) -> None:
    """An exception that came out of this folder is named by its line there."""
    if folder not in _own:
        _own.append(folder)


def own_place(e: BaseException) -> str:
    """`mine.py:12: `, the innermost line of own code that an exception came through; empty: it came through none."""
    if isinstance(e, SyntaxError) and e.filename and (known := _in_own(e.filename)):
        return f"{known}:{e.lineno}: "
    frames = [(known, f.lineno) for f in traceback.extract_tb(e.__traceback__) if (known := _in_own(f.filename))]
    return "{}:{}: ".format(*frames[-1]) if frames else ""


def _in_own(file: str) -> str | None:
    return next((str(Path(file).relative_to(folder)) for folder in _own if Path(file).is_relative_to(folder)), None)


def _named(e: BaseException) -> str:
    """Kind, text and place, on one line of bounded length: the traceback above may be longer than anybody reads."""
    kind = type(e).__qualname__ if type(e).__module__ == "builtins" else f"{type(e).__module__}.{type(e).__qualname__}"
    lines = _text(e).splitlines()
    text = lines[0][:TEXT_CHARS] if lines else ""
    frames = traceback.extract_tb(e.__traceback__)
    where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    if mine := own_place(e):
        where = f" (your code, {mine.removesuffix(': ')})"
    return f"{kind}{': ' if text else ''}{text}{where}"


def _text(e: BaseException) -> str:
    try:
        return str(e)
    except BaseException:  # of somebody's own making
        return "its text cannot be made"


def leave_at_once(code: int) -> NoReturn:
    """Ends this process without tearing the interpreter down, which has nothing more to save. For the 500 modules of
    `shoal train` that takes 0.05 s, on a busy machine 0.25 s, after the last word that the run's journal hears of it;
    for torch it takes seconds."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # whoever read it has gone, or it is closed
            if stream is not None:  # closed before this process began
                stream.flush()
    os._exit(code)
