"""Early stopping by successive halving: at an eighth, a quarter and half of the way the worse half of the runs ends.

Nobody waits at a rung for the others: a run is stopped as soon as half of those that have come so far were better at
the same step, which may be after it has gone on. So the first ones are judged by few, and a good one may go that a
search that waits would have kept; the best at a rung always goes on. (Successive halving: Jamieson and Talwalkar 2016,
arXiv:1502.07943; without the wait: Li et al. 2020, arXiv:1810.05934.)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path

from shoal.journal.journal import read

SHARES = (8, 4, 2)
KEPT = 0.5


def rungs(steps: int) -> tuple[int, ...]:
    """The steps at which runs are compared."""
    return tuple(sorted({steps // share for share in SHARES} - {0, steps}))


class Curve:
    """What a run's journal says of its loss, read as it grows: of steps near a rung, and the newest."""

    def __init__(self, path: Path, at: Iterable[int] = ()) -> None:
        self._path, self._rungs, self._offset = path, tuple(at), 0
        self._train: dict[int, float] = {}
        self._eval: dict[int, float] = {}
        self.step = 0
        self.last_train: float | None = None

    def refresh(self) -> None:
        if not self._path.exists():
            return
        for record, after in read(self._path, self._offset):
            self._offset = after
            kind, step = record.get("kind"), int(record.get("step") or 0)
            if kind == "step":
                self.step = step
                if any(rung - window(rung) < step <= rung for rung in self._rungs):
                    self._train[step] = _number(record.get("loss"))
                self.last_train = _number(record.get("loss"))
            elif kind == "eval":
                self._eval[step] = _number(record.get("loss"))

    @property
    def last_eval(self) -> float | None:
        return self._eval[max(self._eval)] if self._eval else None

    def at(self, rung: int) -> float | None:
        """The newest evaluation on the way from the rung before it, else the mean of the last steps; None: not there
        yet. No number is the worst that there is."""
        if self.step < rung:
            return None
        before = max((r for r in self._rungs if r < rung), default=0)
        if held_out := [step for step in self._eval if before < step <= rung]:
            return self._eval[max(held_out)]
        near = [loss for step, loss in self._train.items() if rung - window(rung) < step <= rung]
        return sum(near) / len(near) if near else None


def window(rung: int) -> int:
    """Steps whose mean is compared: one batch alone is luck."""
    return max(1, rung // 10)


def losers(at_rung: Mapping[str, float]) -> list[str]:
    """Of those that have come to a rung, the ones that do not go on; the first of equals does."""
    ranked = sorted(at_rung, key=lambda run: at_rung[run])
    return ranked[math.ceil(len(ranked) * KEPT) :]


def _number(loss: object) -> float:
    value = float(str(loss))
    return math.inf if math.isnan(value) else value
