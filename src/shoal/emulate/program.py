"""The program that moves the packets: compiled from forward.c on first use, or Python where there is no compiler."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

_SOURCE = Path(__file__).with_name("forward.c")


def program() -> list[str]:
    """Kept in ~/.cache/shoal by the hash of its source, so that a new version is compiled anew."""
    name = f"forward-{hashlib.sha256(_SOURCE.read_bytes()).hexdigest()[:16]}"
    kept = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shoal" / "emulate" / name
    if os.access(kept, os.X_OK):
        return [str(kept)]
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return _python("there is no C compiler (cc, gcc or clang)")
    kept.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=kept.parent) as folder:  # renamed when whole: several may do this at once
        new = Path(folder) / name
        done = subprocess.run([compiler, "-O2", "-o", str(new), str(_SOURCE)], capture_output=True, text=True)
        if done.returncode:
            return _python(f"{compiler} cannot compile it: {done.stderr.strip()[:500]}")
        new.replace(kept)
    return [str(kept)]


def _python(why: str) -> list[str]:
    warnings.warn(
        f"The emulated network runs in Python, which carries about 200 Mbit/s in all, a third or less: {why}.",
        stacklevel=2,
    )
    return [sys.executable, "-m", "shoal.emulate.forward"]
