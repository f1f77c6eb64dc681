"""A stretch of a journal as arrays: its steps by column, and of every other record what tells whether it is needed.

A run has a million steps and few other records. As a dict a step takes 1.5 kB and ten microseconds to parse; as a row
of numbers it takes about 100 bytes, and what is reckoned from all steps is reckoned at once. The numbers are the
journal's own, so nothing that comes from them is an estimate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from shoal.journal.record import Odd, Record

Array = npt.NDArray[Any]

# Of a `step`: how it is kept, and what stands for one that does not say it. No field can be a negative whole number,
# nor NaN where that means "missing": `shoal.journal.record` lets neither through.
FIELDS: dict[str, tuple[str, float]] = {
    "step": ("<i8", 0),
    "attempt": ("<i8", -1),
    "t": ("<f8", math.nan),
    "begin": ("<f8", math.nan),
    "tokens": ("<i8", 0),
    "loss": ("<f8", math.nan),
    "grad_norm": ("<f8", math.nan),
    "lr": ("<f8", math.nan),
    "flops": ("<f8", math.nan),
    "hardware_flops": ("<f8", math.nan),
    "expert_imbalance": ("<f8", math.nan),
    "expert_dead": ("<f8", math.nan),
    "epoch": ("<i8", -1),
    "islands": ("<i8", -1),  # place in the block's list of them
}
GROUPS = ("time", "device")  # their fields are columns, too: `time.data_s`
MOST_NAMES = 64  # of such columns
# Of every other record; `place` is the number of steps before it in the block.
OTHERS: dict[str, str] = {
    "kind": "<i8",
    "place": "<i8",
    "t": "<f8",
    "begin": "<f8",
    "attempt": "<i8",
    "step": "<i8",
    "offset": "<i8",
    "bytes": "<i8",
}
Load = Callable[[str], Array]


def missing(name: str) -> tuple[str, float]:
    """Type of a column, and its value where nothing is said."""
    return FIELDS.get(name, ("<f8", math.nan))


class Block:
    """Of the journal's bytes from `begin` to `end`."""

    def __init__(
        self,
        begin: int,
        end: int,
        rows: int,
        others: int,
        columns: list[str],
        kinds: list[str],
        islands: list[list[int]],
        odd: Odd,
        load: Load,
    ) -> None:
        """`load` gives a column (a name of `columns`), or an array of the others (`other.NAME`)."""
        self.begin, self.end, self.rows, self.others = begin, end, rows, others
        self.columns, self.kinds, self.islands, self.odd = columns, kinds, islands, odd
        self.load = load

    def column(self, name: str) -> Array:
        if name in self.columns:
            return self.load(name)
        kind, value = missing(name)
        return np.full(self.rows, value, kind)

    def other(self, name: str) -> Array:
        return self.load(f"other.{name}")

    def arrays(self) -> Iterable[str]:
        return (*self.columns, *(f"other.{name}" for name in OTHERS))


class Builder:
    """Makes a block of records, one after the other."""

    def __init__(self, begin: int) -> None:
        self.begin, self.end = begin, begin
        self.odd = Odd()
        self._steps: list[tuple[Any, ...]] = []
        self._groups: dict[str, list[dict[str, Any]]] = {name: [] for name in GROUPS}
        self._others: list[tuple[Any, ...]] = []
        self._kinds: dict[str, int] = {}
        self._islands: dict[tuple[int, ...], int] = {}

    def add(self, record: Record | None, begin: int, end: int) -> None:
        """None for a line that is no record."""
        if record is None:
            self.odd.add(begin)
        elif record["kind"] == "step":
            self._add_step(record)
        else:
            kind = self._kinds.setdefault(record["kind"], len(self._kinds))
            at, attempt, step = record.get("begin"), record.get("attempt"), record.get("step")
            self._others.append(
                (
                    kind,
                    len(self._steps),
                    record["t"],
                    math.nan if at is None else at,
                    -1 if attempt is None else attempt,
                    -1 if step is None else step,
                    begin,
                    end - begin,
                )
            )
        self.end = end

    def _add_step(self, record: Record) -> None:
        get = record.get
        islands = get("islands")
        self._steps.append(
            (
                get("step", 0),
                get("attempt", -1),
                record["t"],
                get("begin", math.nan),
                get("tokens", 0),
                float(get("loss", math.nan)),
                _number(get("grad_norm")),
                _number(get("lr")),
                get("flops", math.nan),
                get("hardware_flops", math.nan),
                get("expert_imbalance", math.nan),
                get("expert_dead", math.nan),
                get("epoch", -1),
                -1 if islands is None else self._islands.setdefault(tuple(islands), len(self._islands)),
            )
        )
        for name, told in self._groups.items():
            told.append(get(name) or {})

    def block(self) -> Block:
        arrays = {
            name: array
            for (name, (kind, value)), told in zip(FIELDS.items(), zip(*self._steps, strict=True), strict=False)
            if not _all(array := np.array(told, dtype=kind), value)
        }
        for group, told in self._groups.items():
            for name in list(dict.fromkeys(name for one in told for name in one))[:MOST_NAMES]:
                arrays[f"{group}.{name}"] = np.array([one.get(name, math.nan) for one in told], dtype="<f8")
        columns = list(arrays)
        others = zip(*self._others, strict=True) if self._others else ([] for _ in OTHERS)
        for (name, kind), values in zip(OTHERS.items(), others, strict=True):
            arrays[f"other.{name}"] = np.array(values, dtype=kind)
        return Block(
            self.begin,
            self.end,
            len(self._steps),
            len(self._others),
            columns,
            list(self._kinds),
            [list(one) for one in self._islands],
            self.odd,
            arrays.__getitem__,
        )


def _number(value: Any) -> float:
    return math.nan if value is None else float(value)


def _all(array: Array, value: float) -> bool:
    return bool(np.isnan(array).all() if math.isnan(value) else (array == value).all())
