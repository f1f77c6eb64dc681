"""The file of a script: that it can be run at all, found out before anything is started; and by what it is known."""

from __future__ import annotations

import hashlib
import sys
import warnings
from pathlib import Path

from shoal.errors import SpecError
from shoal.near import closest
from shoal.plain_file import NotPlain, read_plain

MOST_BYTES = 16 << 20
PROBE = Path(__file__).with_name("probe_path")  # what stands first in PYTHONPATH: the probe's sitecustomize


def look_at(path: Path) -> None:
    """Refuses what Python would not run. Nothing of it is executed."""
    if path.is_dir():
        inside = sorted(one.name for one in path.glob("*.py"))
        such = f", such as {path / inside[0]}" if inside else ""
        raise SpecError(f"{path} is a folder; give the Python file that trains{such}.")
    if path.is_symlink() and not path.exists():
        raise SpecError(f"{path} is a link that leads nowhere; give the Python file that trains.")
    if not path.exists():
        beside = [one.name for one in path.parent.glob("*.py")] if path.parent.is_dir() else []
        near = closest(path.name, beside)
        raise SpecError(f"there is no file {path}; " + (f"did you mean {near}?" if near else "give the script's path."))
    try:
        source = read_plain(path, MOST_BYTES)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compile(source, str(path), "exec", dont_inherit=True)
    except NotPlain as e:
        raise SpecError(f"{e}; give the Python file that trains.") from None
    except OSError as e:
        raise SpecError(f"{path} cannot be read ({e.strerror}); mend its permissions.") from None
    except (SyntaxError, ValueError, RecursionError, MemoryError) as e:
        line = f":{e.lineno}" if isinstance(e, SyntaxError) and e.lineno else ""
        what = e.msg if isinstance(e, SyntaxError) else str(e) or "nested too deep"
        version = ".".join(map(str, sys.version_info[:2]))
        raise SpecError(
            f"{path}{line} is no Python {version} ({what}); give a Python script, or mend that line."
        ) from None


def digest(path: Path) -> str | None:
    """Of its bytes; None where it cannot be read now."""
    try:
        return hashlib.sha256(read_plain(path, MOST_BYTES)).hexdigest()
    except OSError:
        return None
