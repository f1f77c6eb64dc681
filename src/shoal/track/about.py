"""What a tracker is told about a run beside its numbers: parameters, tags and an id that outlives restarts."""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from shoal.journal.rundir import RunDir
from shoal.journal.tail import head
from shoal.masking import mask
from shoal.plain_file import read_object
from shoal.spec import load
from shoal.spec.drivers import sections
from shoal.spec.run import Track


@dataclass(frozen=True)
class About:
    name: str
    key: str  # the same for every session of this run, another for a new run of the same name
    started: float
    track: Track
    spec: dict[str, Any]
    params: dict[str, str]
    tags: dict[str, str]


def about(run_dir: RunDir) -> About:
    first = head(run_dir.journal_file) or {}
    started = float(first.get("t", 0.0))
    host = str(first.get("host") or socket.gethostname())
    run = load(run_dir.spec_file).run
    spec = _masked(sections(run))
    key = hashlib.sha256(f"{host}\0{run_dir.path}\0{started}".encode()).hexdigest()[:16]
    tags = {"run_dir": str(run_dir.path), "host": host, "seed": str(run.seed), "key": key, **_identity(run_dir)}
    if run.track.group is not None:
        tags["group"] = run.track.group
    return About(
        name=run_dir.name,
        key=key,
        started=started,
        track=run.track,  # not masked: the mirror itself needs the credentials
        spec=spec,
        params=dict(_flat(spec)),
        tags={f"shoal.{name}": value for name, value in tags.items()},
    )


def _identity(run_dir: RunDir) -> dict[str, str]:
    """What made this run what it is, by names that trackers can filter on; what is not known is left out."""
    try:
        known = _masked(read_object(run_dir.identity_file))
    except (OSError, ValueError):
        return {}
    git, packages, data = (
        of if isinstance(of := known.get(part), dict) else {} for part in ("git", "packages", "data")
    )
    argv = known.get("argv")
    found = {
        "version": known.get("shoal"),
        "git_commit": git.get("commit"),
        "git_dirty": git.get("dirty"),
        "data_fingerprint": ",".join(str(print_) for print_ in data.values() if print_),
        "python": known.get("python"),
        "torch": packages.get("torch"),
        "platform": known.get("platform"),
        "command": " ".join(map(str, argv)) if isinstance(argv, list) else "",
    }
    return {name: str(value) for name, value in found.items() if value not in (None, "")}


def _flat(value: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """`{"a": {"b": [1]}}` → `a.b.0 = 1`."""
    if isinstance(value, list):
        value = dict(enumerate(value)) or "[]"
    if not isinstance(value, dict):
        yield prefix, "" if value is None else str(value)
        return
    for key, inner in value.items():
        yield from _flat(inner, f"{prefix}.{key}" if prefix else str(key))


def _masked(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _masked(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_masked(v) for v in value]
    return mask(value) if isinstance(value, str) else value
