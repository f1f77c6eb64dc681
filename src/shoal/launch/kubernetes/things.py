"""Objects of a cluster, as far as Shoal reads them: of the types that the API promises, or as if they were not said.

An API server checks what it keeps, but a custom resource, an old version, a proxy or a webhook may say other things. A
field of the wrong type counts as missing here, once, so that nobody behind this has to ask again. Pure.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

from shoal.launch.kubernetes.names import Manifest
from shoal.values import BadValue, fields_of, read_object, whole

MOST_TEXT = 64 << 10  # of a message
MOST_PARTS, MOST_BYTES = 1 << 26, 1 << 30  # 100,000 pods
MOST_WHOLE = 1 << 31
_MISSING = object()
_NAMED: dict[str, Any] = {"": str}  # an object whose keys are of others' choice
_WHY = {"reason": str, "message": str}
_CONDITION = {"type": str, "status": str, "lastTransitionTime": datetime, **_WHY}
_ENDED = {"exitCode": int, "startedAt": datetime, "finishedAt": datetime, **_WHY}
_CONTAINER = {"image": str, "state": {"waiting": _WHY, "running": _ENDED, "terminated": _ENDED}}
_SHAPE: dict[str, Any] = {
    "apiVersion": str,
    "kind": str,
    "message": str,
    "metadata": {
        "name": str,
        "uid": str,
        "labels": _NAMED,
        "annotations": _NAMED,
        "ownerReferences": [{"uid": str}],
        "creationTimestamp": str,
        "deletionTimestamp": str,
    },
    "involvedObject": {"uid": str},
    "spec": {
        "active": bool,
        "completions": int,
        "nodeName": str,
        "successPolicy": dict,
        "suspend": bool,
        "unschedulable": bool,
    },
    "status": {
        "allocatable": _NAMED,
        "completionTime": datetime,
        "conditions": [_CONDITION],
        "containerStatuses": [_CONTAINER],
        "phase": str,
        **_WHY,
    },
}
# What is looked up without asking whether it is there.
_SURE = {"apiVersion": "", "kind": "", "metadata": {}, "involvedObject": {}, "spec": {}, "status": {}}


def thing(said: object) -> Manifest:
    """One object; where it is none, one that says nothing."""
    found = _fit(said, _SHAPE)
    known: Manifest = {**_SURE, **(found if isinstance(found, dict) else {})}
    return {**known, "metadata": {"name": "", "uid": "", "labels": {}, "annotations": {}, **known["metadata"]}}


def answer(printed: str) -> Manifest:
    """The object that kubectl printed; BadValue where it is none."""
    return read_object(printed.encode(errors="replace"), most_parts=MOST_PARTS, most_bytes=MOST_BYTES)


def listed(printed: str) -> list[Manifest]:
    """The objects of a list that kubectl printed."""
    items = answer(printed).get("items")
    if not isinstance(items, list):
        raise BadValue("it has no list of items")
    return [fields_of(one) for one in items]


def index_of(pod: Manifest, label: str, most: int) -> int | None:
    """Which node of its job a pod is, from 0 to `most`; None where it says something else: it only has our label."""
    said = pod["metadata"]["annotations"].get(label, "0")
    if not said.isascii() or not said.isdecimal() or len(said) > 7:
        return None
    try:
        return whole(int(said), most)
    except BadValue:
        return None


def _fit(said: Any, shape: Any) -> Any:
    """What is said, in that shape; `_MISSING` where it has another."""
    if isinstance(shape, dict):
        if not isinstance(said, dict):
            return _MISSING
        if shape is _NAMED:
            return {name: value for name, value in said.items() if isinstance(value, str)}
        found = {name: _fit(said[name], inner) for name, inner in shape.items() if said.get(name) is not None}
        return {name: value for name, value in found.items() if value is not _MISSING}
    if isinstance(shape, list):
        if not isinstance(said, list):
            return _MISSING
        fitted = (_fit(one, shape[0]) for one in said)
        return [one for one in fitted if one is not _MISSING]
    if shape is datetime:
        return said if isinstance(said, str) and time_of(said) is not None else _MISSING
    if shape is str:
        return said[:MOST_TEXT] if isinstance(said, str) else _MISSING
    return said if type(said) is shape and (shape is not int or abs(said) < MOST_WHOLE) else _MISSING


def time_of(text: str | None) -> float | None:
    """Of RFC 3339, as Unix time."""
    try:
        return None if not text else datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError, OSError):
        return None
