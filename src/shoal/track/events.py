"""Journal records as a tracker wants them: numbers with a step and a time, and the run's beginnings and ends.

A step that is redone after a crash is in the journal twice, and a tracker cannot take a point back (TensorBoard can:
see `to_tensorboard`). The order of the data is a pure function, so the second time gives the same loss up to rounding:
such a point is marked `again` and not uploaded, which leaves one clean curve. Only where the loss truly differs (the
run file was changed in between) is the new value uploaded as well; it has the later time and counts as the latest.
"""

from __future__ import annotations

import math
import re
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from shoal.journal.journal import Record, read
from shoal.observe.router import STEP_METRICS
from shoal.observe.throughput import duration_s, mfu, tokens_per_s

MOST_NAME = 200  # letters of an own metric's name: MLflow takes 250
SAME_LOSS = 1e-4  # relative; other layouts and other machines round differently, a changed run differs by more
_PLAIN = re.compile(r"[^A-Za-z0-9_./ -]")  # all that MLflow takes in a name, but these
Kind = Literal["open", "start", "metrics", "failure", "close"]


@dataclass(frozen=True)
class Event:
    kind: Kind
    t: float
    step: int = 0
    values: dict[str, float] = field(default_factory=dict)
    again: bool = False
    offset: int = 0  # of the journal, behind the record
    note: str = ""  # the failure in words; the status of a close


class Reader:
    """Follows a journal from its beginning; `skip_to` passes over what was uploaded earlier."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.offset = 0
        self._start: Record | None = None
        self._logged = -1  # the last step with own metrics
        self._figures: dict[tuple[int, str], float] = {}
        self._losses = {"loss": array("d"), "eval_loss": array("d")}

    def skip_to(self, offset: int) -> None:
        """What was uploaded is read again all the same: to know which steps will be redone ones."""
        for _, after in self._events(offset):
            self.offset = after

    def batch(self, most_values: int) -> list[Event]:
        """The next events, about as many as one request can carry; empty when there is nothing new."""
        events: list[Event] = []
        values = 0
        for event, after in self._events(None):
            self.offset = after
            if event is not None:
                events.append(event)
                values += len(event.values)
            if values >= most_values:
                break
        return events

    def _events(self, stop: int | None) -> Iterator[tuple[Event | None, int]]:
        if (stop is not None and self.offset >= stop) or not self._path.exists():
            return
        for record, offset in read(self._path, self.offset):
            event = self._event(record)
            yield (None if event is None else replace(event, offset=offset)), offset
            if stop is not None and offset >= stop:
                return

    def _event(self, record: Record) -> Event | None:
        t = float(record["t"])
        match record.get("kind"):
            case "step":
                return self._metrics(t, int(record["step"]), "loss", _step_values(record, self._start))
            case "eval":
                return self._metrics(t, int(record["step"]), "eval_loss", _eval_values(record))
            case "tasks" | "evaluated":
                step = int(record["step"])
                return Event("metrics", t, step, _task_values(record), again=self._measured(step, record))
            case "metrics":
                values = {
                    f"own/{_PLAIN.sub('_', name)[:MOST_NAME]}": float(value) for name, value in record["values"].items()
                }
                return Event("metrics", t, int(record["step"]), values, again=self._known(int(record["step"])))
            case "start":
                self._start = record
                first, attempt = int(record.get("step", 0)), int(record.get("attempt", 0))
                return Event("start", t, first, {"attempt": float(attempt)})
            case "rewind":  # as a start: what comes after its step is told again
                return Event("start", t, int(record["to"]), {"attempt": float(record.get("attempt", 0))})
            case "open":
                return Event("open", t)
            case "failure":
                return Event("failure", t, note=f"{record.get('cause')}: {record.get('evidence')}")
            case "close":
                return Event("close", t, note=str(record.get("status")))
        return None

    def _known(self, step: int) -> bool:
        """Whether own metrics of a step were read before, so that these are of a step that was redone."""
        seen, self._logged = step <= self._logged, max(step, self._logged)
        return seen

    def _measured(self, step: int, record: Record) -> bool:
        """Whether the same figures of a step were read before."""
        values = {(step, name): value for name, value in _task_values(record).items()}
        same = all(math.isclose(self._figures.get(key, math.nan), value) for key, value in values.items())
        self._figures |= values
        return same

    def _metrics(self, t: float, step: int, key: str, values: dict[str, float]) -> Event:
        seen = self._losses[key]
        if step >= len(seen):
            seen.extend([math.nan] * (step + 1 - len(seen)))
        before, now = seen[step], values[key]
        seen[step] = now
        return Event("metrics", t, step, values, again=math.isclose(before, now, rel_tol=SAME_LOSS))


def _eval_values(record: Record) -> dict[str, float]:
    sets = {f"eval_loss/{_PLAIN.sub('_', one['name'])}": float(one["loss"]) for one in record.get("sets") or ()}
    return {"eval_loss": float(record["loss"]), **sets}


def _task_values(record: Record) -> dict[str, float]:
    """The figure and its bounds, where they are finite."""
    found: dict[str, float] = {}
    for one in record["figures"]:
        name = _PLAIN.sub("_", f"task/{one['task']}/{one['measure']}")[:MOST_NAME]
        told = {name: one["value"], f"{name}/low": one.get("low"), f"{name}/high": one.get("high")}
        found |= {key: float(value) for key, value in told.items() if value is not None and math.isfinite(float(value))}
    return found


def _step_values(record: Record, start: Record | None) -> dict[str, float]:
    rate = tokens_per_s(record)
    values = {"loss": float(record["loss"])}
    if "micro_batches" in record:  # a script's, whose tokens nobody counts
        values["step_s"] = duration_s(record) / int(record.get("steps", 1))
    else:
        values |= {"tokens_per_s": rate, "data_wait_s": float(record.get("time", {}).get("data_s", 0.0))}
    for key in ("grad_norm", "lr", *STEP_METRICS):
        if record.get(key) is not None:
            values[key] = float(record[key])
    utilisation = mfu(record, start)
    return values if utilisation is None else {**values, "mfu": utilisation}
