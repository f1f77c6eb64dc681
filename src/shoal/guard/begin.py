"""How a run comes to be in its directory: created, continued as it is, changed on purpose, or set aside."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.data.index import fingerprint_in, index_in
from shoal.errors import DataError, SetupError, ShoalError, SpecError
from shoal.journal import lock
from shoal.journal.rundir import RunDir
from shoal.own.carry import carry, digest_of
from shoal.plain_file import read_object
from shoal.script.file import digest
from shoal.spec import Run, dump
from shoal.spec.identity import identity
from shoal.spec.shape import shape_of


@dataclass(frozen=True)
class Asked:
    """A decision that a person made when they resumed a run."""

    key: str
    value: Any
    why: str


def write_spec(run_dir: RunDir, run: Run) -> None:
    _publish(run_dir.spec_file, dump(run))


def create(run_dir: RunDir, run: Run, near: Path | None = None) -> None:
    """The files of a new run, before its journal is opened: a directory without a journal is not a run yet. `near`: own
    code that came with the run file (`shoal.own.carry`)."""
    carry(run, run_dir, near)
    write_spec(run_dir, run)
    about = {**identity(run), **data_identity(run)}
    about |= {"own": digest_of(run_dir)} if run.own.objects else {}
    about |= {"script": digest(Path(run.script.path))} if run.script else {}
    _publish(run_dir.identity_file, json.dumps(about, indent=2) + "\n")
    _write_plan(run_dir, run)


def say_changed(run: Run, run_dir: RunDir, near: Path | None = None) -> None:
    """Of a run that goes on: that the files of its own code have changed, and what is done about it."""
    with writing(run_dir):
        if said := carry(run, run_dir, near):
            print(f"{said}.", flush=True)


def _write_plan(run_dir: RunDir, run: Run) -> None:
    """What is expected of it on this machine, or why that cannot be told: no reason not to train."""
    from shoal.data.documents import documents_of  # numpy: only those who start a run wait for it
    from shoal.plan.expect import expected

    if run.foreign_work is not None:
        return  # nobody can predict it
    try:
        if run.unplanned is not None:
            raise SpecError(run.unplanned)
        shape = shape_of(run.model)
        plan = expected(run, shape, [run_dir.workspace / "hardware"], documents_of(run, shape, run_dir.workspace))
    except (ShoalError, ArithmeticError) as e:
        plan = {"none": str(e)}
    _publish(run_dir.plan_file, json.dumps(plan, indent=2) + "\n")


@contextmanager
def fresh_run(run_dir: RunDir, run: Run) -> Iterator[None]:
    """A new run, held meanwhile; one that has its name is set aside."""
    with ExitStack() as held:
        with writing(run_dir):
            if run_dir.exists():
                with lock.hold(run_dir):
                    print(f"the old run is now {_set_aside(run_dir)}")
            held.enter_context(lock.hold(run_dir))
            create(run_dir, run)
        yield


def _set_aside(run_dir: RunDir) -> Path:
    """Makes room for a fresh run of the same name; nothing is deleted."""
    base = run_dir.path.with_name(f"{run_dir.name}.old-{time.strftime('%Y%m%d-%H%M%S')}")
    there = base
    for n in range(2, 100):  # two within one second
        if not there.exists():
            break
        there = base.with_name(f"{base.name}-{n}")
    run_dir.path.rename(there)
    return there


def data_identity(run: Run) -> dict[str, dict[str, Any]]:
    """Fingerprints of the local data sets, and the tokens that start their documents (null: none, as before there was a
    rule for starts). A remote one is known once the workers have opened it."""
    found = {source.path: index_in(Path(source.path)) for source in (*run.data.train, *run.data.eval)}
    return {
        "data": {path: None if index is None else index.fingerprint for path, index in found.items()},
        "document_starts": {path: index.start_id for path, index in found.items() if index is not None},
    }


def same_data(run_dir: RunDir, now: Sequence[str]) -> None:
    """Refuses other training data in place of those that the run was begun with, where both can be told. (A checkpoint
    remembers them as well; a run that has not saved yet has nothing else.)"""
    try:
        known = read_object(run_dir.identity_file).get("data")
    except (OSError, ValueError):
        return
    # In the order of the sources, under the paths of then. Where one path came twice, the checkpoint has to tell.
    begun_with = list(known.values()) if isinstance(known, dict) and len(known) >= len(now) else []
    for was, place in zip(begun_with, now, strict=False):
        found = fingerprint_in(Path(place))
        if was is not None and found is not None and was != found:
            raise DataError(
                f"{place} holds other data than run '{run_dir.name}' was begun with (fingerprint {found[:8]}, not "
                f"{str(was)[:8]}); give the folder that they were moved to, or start another run."
            )


def other_code(run_dir: RunDir, run: Run) -> str | None:
    """In words, with what other versions than those it was begun with the run goes on; None with the same."""
    try:
        known = read_object(run_dir.identity_file)
    except (OSError, ValueError):
        return None
    before, now = _versions(known), _versions(identity(run))
    if run.script is not None:
        before, now = before | _script(known.get("script")), now | _script(digest(Path(run.script.path)))
    differ = [f"{name} {before[name]} → {now[name]}" for name in now if name in before and before[name] != now[name]]
    if not differ:
        return None
    return f"the run goes on with other code than it was begun with ({', '.join(differ)}): its steps may differ"


def _script(digest: Any) -> dict[str, str]:
    return {"script": digest[:10]} if isinstance(digest, str) else {}


def _versions(about: Mapping[str, Any]) -> dict[str, str]:
    """What can change a result, by name."""
    packages, git = about.get("packages"), about.get("git")
    found = {name: about.get(name) for name in ("shoal", "python")}
    found |= {name: packages.get(name) for name in ("torch", "numpy")} if isinstance(packages, dict) else {}
    found |= {"commit": str(git.get("commit"))[:10]} if isinstance(git, dict) else {}
    return {name: str(version) for name, version in found.items() if version is not None}


@contextmanager
def writing(run_dir: RunDir) -> Iterator[None]:
    """A run directory that cannot be written is a wrong environment, said in one sentence."""
    try:
        yield
    except OSError as e:
        where = e.filename or run_dir.path
        raise SetupError(
            f"cannot write the run directory {run_dir.path} ({e.strerror}: {where}); "
            "free space, mend its permissions, or choose another place with --workspace."
        ) from e


def _publish(path: Path, text: str) -> None:
    """All of the file or none of it, whenever the machine goes down."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(temporary, "w") as f:
            f.write(text)
            f.flush()
            os.fsync(f.fileno())
        temporary.rename(path)
    finally:
        temporary.unlink(missing_ok=True)
