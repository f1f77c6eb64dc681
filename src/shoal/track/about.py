"""What a tracker is told about a run beside its numbers: parameters, tags and an id that outlives restarts."""

from __future__ import annotations

import hashlib
import json
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import yaml

from shoal.spec.run import Track
from shoal.track.rundir import RunDir
from shoal.track.secrets import mask
from shoal.track.tail import head


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
    resolved = yaml.safe_load(run_dir.spec_file.read_text()) or {}
    track = Track(**resolved.get("track", {}))  # before masking: the mirror itself needs the credentials
    spec = _masked(resolved)
    tags = {f"shoal.{key}": value for key, value in _flat(_identity(run_dir))}
    tags |= {"shoal.run_dir": str(run_dir.path), "shoal.host": host, "shoal.seed": str(spec.get("seed", ""))}
    key = hashlib.sha256(f"{host}\0{run_dir.path}\0{started}".encode()).hexdigest()[:16]
    return About(run_dir.name, key, started, track, spec, dict(_flat(spec)), tags | {"shoal.key": key})


def _identity(run_dir: RunDir) -> dict[str, Any]:
    try:
        found = json.loads(run_dir.identity_file.read_bytes())
    except (FileNotFoundError, ValueError):
        return {}
    return _masked(found) if isinstance(found, dict) else {}


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
