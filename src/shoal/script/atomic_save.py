"""`torch.save` to a path, made atomic: whoever reads the file later finds all of it, or what was there before.

The file is written in a folder beside its place, under its own name: torch puts that name into the archive, and the
bytes shall be those that the script would have written without this.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

PREFIX = ".shoal-save-"


class Saver:
    """Of one rank of one run. `who` is in the names of its folders: what a killed process of it has left is removed."""

    def __init__(self, who: str) -> None:
        self._prefix = f"{PREFIX}{who}-"
        self._cleared = set[str]()

    def save(self, write: Callable[[str], Any], path: str) -> Any:
        """`write` writes a file of the given name. Where it cannot be written aside it is written as it always was."""
        place = os.path.realpath(path)
        folder, name = os.path.dirname(place), os.path.basename(path)
        try:
            mode = os.stat(place).st_mode
        except OSError:
            mode = None
        if not name or (mode is not None and not stat.S_ISREG(mode)):  # a device, a pipe
            return write(path)
        try:
            self._clear(folder)
            aside = tempfile.mkdtemp(prefix=self._prefix, dir=folder)
        except OSError:  # no such folder, or none of ours: torch says so in its own words
            return write(path)
        try:
            file = os.path.join(aside, name)
            done = write(file)
            _sync(file)
            try:
                if mode is not None:
                    os.chmod(file, stat.S_IMODE(mode))
                os.replace(file, place)
            except OSError:  # somebody else's file, which we may write and not replace
                return write(path)
            _sync(folder)
            return done
        finally:
            shutil.rmtree(aside, ignore_errors=True)

    def _clear(self, folder: str) -> None:
        if folder not in self._cleared:
            self._cleared.add(folder)
            for left in Path(folder).glob(f"{self._prefix}*"):
                shutil.rmtree(left, ignore_errors=True)


def _sync(path: str) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError as e:
        if e.errno in (errno.EIO, errno.ENOSPC, errno.EDQUOT):  # others: this file system knows no such call
            raise
    finally:
        os.close(fd)
