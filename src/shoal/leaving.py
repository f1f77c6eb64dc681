"""How a process leaves once its work is on disk: at once."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import NoReturn


def leave_at_once(code: int) -> NoReturn:
    """Ends this process without tearing the interpreter down, which has nothing more to save. For the 500 modules of
    `shoal train` that takes 0.05 s, on a busy machine 0.25 s, after the last word that the run's journal hears of it;
    for torch it takes seconds."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # whoever read it has gone, or it is closed
            if stream is not None:  # closed before this process began
                stream.flush()
    os._exit(code)
