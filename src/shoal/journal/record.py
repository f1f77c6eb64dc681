"""A line of a journal becomes a record here, or nothing: everybody who reads a record may rely on its fields.

A journal is a file that anybody can write to, and disks flip bits. So a record has a kind, a time, and of the kinds
that readers reckon with, fields of the right type and size; the lines that are none are passed over and counted.
Other kinds and other fields are let through: a newer Shoal may write them. docs/reference/journal.md has them all.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from shoal.values import look_at_depth

Record = dict[str, Any]
Check = Callable[[Any], bool]

_LAST_YEAR = 253_402_300_800.0  # the year 10000: the clocks of this machine and of Python know no later one
_LARGEST = 1 << 62
MOST_METRICS = 1000  # of own code, for one step


@dataclass
class Odd:
    """Lines that are no records: how many, and where the first one begins."""

    count: int = 0
    first_byte: int = 0

    def add(self, at: int) -> None:
        self.first_byte = self.first_byte if self.count else at
        self.count += 1

    def __str__(self) -> str:
        lines = "1 line of the journal is no record" if self.count == 1 else f"{self.count:,} lines are no records"
        return f"{lines} (the first at byte {self.first_byte:,}), torn by a crash or changed; passed over"


def _whole(value: Any) -> bool:
    return type(value) is int and -_LARGEST < value < _LARGEST


def _real(value: Any) -> bool:
    return (type(value) is float and math.isfinite(value)) or _whole(value)


def _count(value: Any) -> bool:
    return type(value) is int and 0 <= value < _LARGEST


def _some(value: Any) -> bool:
    return _count(value) and value > 0


def _time(value: Any) -> bool:
    return _real(value) and 0 <= value < _LAST_YEAR


def _measured(value: Any) -> bool:
    """A number, or the word for one that JSON has not."""
    return type(value) is float or _whole(value) or (type(value) is str and value in ("nan", "inf", "-inf"))


def _text(value: Any) -> bool:
    return type(value) is str


def _counts(value: Any) -> bool:
    return type(value) is list and all(map(_count, value))


def _reals(value: Any) -> bool:
    return type(value) is list and bool(value) and all(map(_real, value))


def _named(value: Any) -> bool:
    return type(value) is dict


def _named_reals(value: Any) -> bool:
    return type(value) is dict and all(map(_real, value.values()))


def _named_measured(value: Any) -> bool:
    return type(value) is dict and len(value) <= MOST_METRICS and all(map(_measured, value.values()))


def _named_texts(value: Any) -> bool:
    return type(value) is dict and all(k.isdecimal() and type(v) is str for k, v in value.items())


def _rows(value: Any) -> bool:
    return type(value) is list and all(type(row) is dict and _ROW.fits(row) for row in value)


def _figures(value: Any) -> bool:
    return type(value) is list and all(type(one) is dict and _FIGURE.fits(one) for one in value)


def _texts_written(value: Any) -> bool:
    return type(value) is list and all(type(one) is dict and _WRITTEN.fits(one) for one in value)


def _sets(value: Any) -> bool:
    return type(value) is list and all(type(one) is dict and _SET.fits(one) for one in value)


def _maybe(check: Check) -> Check:
    return lambda value: value is None or check(value)


# Of every kind, also of those not known here. What a kind says of these fields is no wider.
_ANY: dict[str, Check] = {"begin": _time, "attempt": _maybe(_count), "step": _maybe(_count)}


class _Shape:
    """The fields of a kind: those that must be there, and those that may."""

    def __init__(self, must: dict[str, Check], may: dict[str, Check] | None = None) -> None:
        self._must, self._checks = tuple(must), {**_ANY, **(may or {}), **must}

    def fits(self, record: Record) -> bool:
        """A plain loop: this is where reading a journal spends its time."""
        for name in self._must:
            if name not in record:
                return False
        checks = self._checks
        for name, value in record.items():  # noqa: SIM110  # a generator takes twice as long
            if name in checks and not checks[name](value):
                return False
        return True


_ROW = _Shape(
    {"axis": _text, "op": _text, "group": _count, "bytes": _count, "most_calls": _count, "most_bytes": _count}
)
_SET = _Shape({"name": _text, "weight": _real, "loss": _measured, "targets": _count})
_FIGURE = _Shape(
    {"task": _text, "measure": _text, "value": _measured, "n": _count},
    {**dict.fromkeys(("low", "high", "stderr"), _measured), "higher_is_better": lambda value: type(value) is bool},
)
_WRITTEN = _Shape({"prompt": _text, "text": _text}, {"end": _text, "tokens": _count})
_TAKEN: dict[str, Check] = {"attempt": _count, "begin": _time, "position": _count, "samples": _count, "targets": _count}
_WHO = {"rank": _maybe(_count), "island": _maybe(_count), "attempt": _maybe(_count)}
# What a record has that does not say it.
_UNTOLD: dict[str, Record] = {
    "open": {"session": 0},
    "step": {"loss": "nan", "tokens": 0},
    "eval": {"loss": "nan"},
    "close": {"status": "failed", "reason": "no reason is given"},
}
_SHAPES = {
    "open": _Shape({}, {"session": _count, "began": _maybe(_time)}),
    "decision": _Shape({"key": _text}),
    "attempt": _Shape({"attempt": _count}, {"world": _some, "pids": _counts, "agents": _counts}),
    "start": _Shape(
        {},
        {
            "attempt": _count,
            "step": _count,
            "total": _maybe(_count),
            "world": _some,
            "flops_per_token": _maybe(_real),
            "peak_flops": _maybe(_real),
            "moved_bytes": _maybe(_real),
            "peak_bandwidth": _maybe(_real),
            "sharing": _text,
            "params": _maybe(_count),
            "mesh": _named,
            "resumed_from": _maybe(_count),
        },
    ),
    "step": _Shape(
        {"step": _count},
        {
            **_TAKEN,
            "loss": _measured,
            "tokens": _count,
            "grad_norm": _maybe(_measured),
            "lr": _maybe(_measured),
            "time": _named_reals,
            "device": _named_reals,
            "flops": _real,
            "hardware_flops": _real,
            "epoch": _count,
            "steps": _some,
            "micro_batches": _count,
            "islands": _counts,
            "expert_imbalance": _real,
            "expert_dead": _real,
        },
    ),
    "skip": _Shape({"step": _count}, {**_TAKEN, "batch": _count}),
    "rewind": _Shape({"to": _count}, {**_TAKEN, "step": _count}),
    "router": _Shape(
        {"step": _count, "first_layer": _count, "imbalance": _reals, "imbalance_mean": _real},
        {"ep": _count, "ep_imbalance_max": _real},
    ),
    "metrics": _Shape({"step": _count, "values": _named_measured}),
    "traffic": _Shape({"step": _count, "rows": _rows, "world": _some}),
    "eval": _Shape({"step": _count}, {**_TAKEN, "loss": _measured, "precision": _text, "sets": _sets}),
    "tasks": _Shape({"step": _count, "figures": _figures}, _TAKEN),
    "evaluated": _Shape({"step": _count, "figures": _figures}),
    "samples": _Shape({"step": _count, "texts": _texts_written}, _TAKEN),
    "checkpoint": _Shape({"step": _count}, {**_TAKEN, "stall_s": _real, "persist_s": _real, "bytes": _count}),
    "checkpoint_failed": _Shape({}, {**_TAKEN, "step": _count}),
    "uploaded": _Shape({"step": _count}, {"bytes": _count, "seconds": _real}),
    "finished": _Shape({}, {"step": _count}),
    "failure": _Shape({}, {**_WHO, **dict.fromkeys(("at", "since", "noticed"), _maybe(_time))}),
    "island": _Shape({"island": _count}, {"start": _count, "agent": _count, "pids": _counts}),
    "epoch": _Shape(
        {"number": _count, "members": _counts},
        {
            "attempt": _count,
            "step": _count,
            "left": _maybe(_named_texts),
            "joined": _maybe(_counts),
            "noticed": _maybe(_time),
        },
    ),
    "ended": _Shape({"island": _count}, {"agent": _count}),
    "leaving": _Shape({"island": _count}),
    "hang": _Shape({}, {**_WHO, "seconds": _maybe(_real)}),
    "slow": _Shape({}, {**_WHO, "seconds": _maybe(_real)}),
    "straggler": _Shape(
        {"own_s": _real, "usual_s": _real},
        {**_WHO, "step_s": _real, "steps": _count, "by": _text, "ranks": _counts},
    ),
    "units": _Shape({"done": _count, "failed": _count, "total": _some}, {"running": _count}),
    "unit_began": _Shape({"unit": _count, "attempt": _count, "runner": _text}, {"log": _text}),
    "unit_ended": _Shape(
        {"unit": _count, "attempt": _count, "outcome": _text},
        {
            **dict.fromkeys(("cause", "evidence", "log"), _maybe(_text)),
            **dict.fromkeys(("round", "log_from", "log_bytes"), _count),
            "exit_code": _maybe(_whole),
            "took_s": _real,
        },
    ),
    "warning": _Shape({"text": _text}),
    "exit": _Shape({}, {"session": _count}),
    "close": _Shape({}, {"session": _count, "exit_code": _maybe(_whole), "status": _text, "reason": _maybe(_text)}),
}


_OTHER = _Shape({})
_decode = json.JSONDecoder().raw_decode


def parse(line: bytes) -> Record | None:
    """The record that a line holds; None where it holds none."""
    try:
        record = _loads(line)
    except (ValueError, RecursionError):
        return None
    if type(record) is not dict or not _text(record.get("kind")) or not _time(record.get("t")):
        return None
    if not _count(record.get("v", 0)):
        return None
    kind = record["kind"]
    if not _SHAPES.get(kind, _OTHER).fits(record):
        return None
    for name, value in _UNTOLD.get(kind, {}).items():
        record.setdefault(name, value)
    return record


def _loads(line: bytes) -> Any:
    """As `json.loads`, without its search for an encoding where the line begins as ours do."""
    look_at_depth(line)
    if not line.startswith(b'{"'):
        return json.loads(line)
    text = line.decode("utf-8", "surrogatepass")
    found, end = _decode(text)
    if text[end:].strip(" \t\n\r"):
        raise ValueError("more than one value")
    return found
