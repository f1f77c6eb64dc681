"""Runs a verb of the command line in this process, as a person would, with what it prints taken away."""

from __future__ import annotations

import contextlib
import io

from tests.fuzz.reader import Finding


def shoal(*argv: str) -> str:
    """What it printed. Raises what the verb raises (`--debug`): its own errors, or a finding."""
    from shoal.cli.main import main

    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        main([*argv, "--debug"])
    for text in (out.getvalue(), err.getvalue()):
        if "Traceback (most" in text or "defect in Shoal" in text:
            raise Finding("it prints a traceback")
    return out.getvalue()
