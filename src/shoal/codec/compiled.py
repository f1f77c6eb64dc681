"""Python functions made into machine code by numba, kept from one process to the next.

They let go of the interpreter's lock, so that coding runs beside training. Never with `fastmath`: the same bits are
wanted on every machine, and a product that is fused with the sum after it has others.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

import numba

F = TypeVar("F", bound=Callable[..., Any])


def compiled(function: F) -> F:
    made = numba.njit(nogil=True, error_model="numpy")(function)
    folder = _folder()
    if folder is not None:
        config: Any = numba.config
        before = config.CACHE_DIR
        config.CACHE_DIR = before or str(folder)
        try:
            made.enable_caching()
        finally:
            config.CACHE_DIR = before
    return cast("F", made)


@cache
def _folder() -> Path | None:
    """Where the code is kept: a folder of this user's alone, for what is in it is run. None where there is none.

    Beside the sources would be the default, but an installation may be read-only. The name says which sources it was
    made of: numba does not notice when a function that another one calls has changed.
    """
    sources = hashlib.sha256()
    for source in sorted(Path(__file__).parent.glob("*.py")):
        sources.update(source.read_bytes())
    name = f"kernels-{sources.hexdigest()[:16]}"
    cached = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    for base in (Path(cached) / "shoal", Path(tempfile.gettempdir()) / f"shoal-{_user()}"):
        try:
            (base / name).mkdir(mode=0o700, parents=True, exist_ok=True)
            if all(_mine(folder) for folder in (base, base / name)):
                return base / name
        except OSError:
            continue
    return None


def _mine(folder: Path) -> bool:
    """Nobody else can have put code there."""
    status = folder.lstat()
    return os.name == "nt" or (status.st_uid == os.getuid() and not status.st_mode & 0o022 and os.access(folder, 7))


def _user() -> int:
    return os.getuid() if hasattr(os, "getuid") else 0
