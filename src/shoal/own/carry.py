"""The copy of own code that a run has in its directory: made when it begins, and what it goes on with."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from shoal.errors import SpecError
from shoal.journal.rundir import RunDir
from shoal.own.files import digest, files_of, in_folder
from shoal.spec.run import Run

MOST_NAMED = 4


def carry(run: Run, run_dir: RunDir, near: Path | None = None) -> str | None:
    """Copies the modules that a run names into its directory; a run that has a copy keeps it. Returns what a person
    should know: that the files have changed since, and what was done about it by `own.changed`.

    `near`: a folder that is asked before `own.folder`, on a node to which the run file came with its code.
    """
    if not run.own.objects:
        return None
    folder = near if near is not None and near.is_dir() else Path(run.own.folder or ".")
    if not run_dir.code.is_dir():
        _write(_found(run, _there(folder)), run_dir.code)
        return None
    if not folder.is_dir():
        return None  # the run has what it needs
    had, now = in_folder(run_dir.code), files_of(run, folder)
    if had == now:
        return None
    if run.checkpoint.local and not any(run_dir.checkpoints.glob("*")):
        shutil.rmtree(run_dir.code)  # nothing was computed with it yet that the run goes on from
        _write(_found(run, folder), run_dir.code)
        return f"own code has changed ({_differ(had, now)}); nothing is saved yet, and the new ones are taken"
    said = f"own code has changed since the run began ({_differ(had, now)})"
    if run.own.changed == "refuse":
        raise SpecError(
            f"{said}: own.changed is `refuse`; bring {folder} back to what it was, or resume with own.changed=keep "
            "(the run's copy) or own.changed=take (the new files)."
        )
    if run.own.changed == "keep":
        return f"{said}; the run goes on with its own copy in {run_dir.code}, and own.changed=take takes the new files"
    aside = run_dir.code.with_name(f"code.{digest(had)[:8]}")
    if aside.exists():
        shutil.rmtree(aside)
    run_dir.code.rename(aside)
    _write(now, run_dir.code)
    return f"{said}; the new files are taken, the old ones are in {aside}"


def _found(run: Run, folder: Path) -> dict[str, bytes]:
    """The files of own code; a module that is neither among them nor installed is refused before anything starts."""
    files = files_of(run, folder)
    here = {name.partition("/")[0].removesuffix(".py") for name in files}
    for key, value in run.own.objects.items():
        top = value.partition(":")[0].partition(".")[0]
        if top not in here and find_spec(top) is None:
            raise SpecError(f"{key} names {value}: there is no module {top} in {folder}, nor is one installed.")
    return files


def carried(run: Run, run_dir: RunDir) -> dict[str, bytes]:
    """The files that have to travel with a run to another machine: its copy, or what that will be made of."""
    if not run.own.objects:
        return {}
    if run_dir.code.is_dir() and run.own.changed != "take":
        return in_folder(run_dir.code)
    return _found(run, _there(Path(run.own.folder or ".")))


def digest_of(run_dir: RunDir) -> str | None:
    """Of the run's copy; None where it has none."""
    return digest(in_folder(run_dir.code)) if run_dir.code.is_dir() else None


def _there(folder: Path) -> Path:
    if not folder.is_dir():
        raise SpecError(f"own.folder names {folder}, which is not a folder here; give the folder of your modules.")
    return folder


def _write(files: Mapping[str, bytes], to: Path) -> None:
    """All of it or nothing."""
    to.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=".code-", dir=to.parent))
    try:
        for name, data in files.items():
            path = temporary / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        temporary.chmod(0o755)
        temporary.rename(to)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _differ(had: Mapping[str, bytes], now: Mapping[str, bytes]) -> str:
    names = sorted(name for name in {*had, *now} if had.get(name) != now.get(name))
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return ", ".join(names[:MOST_NAMED]) + more
